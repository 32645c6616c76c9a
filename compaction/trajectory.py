"""Trajectories as texts: what was said and seen, apart from any tokenizer, so that another model can learn from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compaction.rollout import CallRecord, Rollout, TurnRecord


class NotUsable(Exception):
    """A trajectory that cannot be learned from. `reason` says why, as many others may; `detail` is this one's own."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Said:
    """One turn."""

    action: str
    answers: tuple[str, ...] | None
    """What was shown after it: an observation, or the answer to each of its calls; None: nothing (the last turn)"""
    calls: tuple[CallRecord, ...] = ()
    """The functions that it called, in scaffold `tools`"""


@dataclass(frozen=True)
class Summarized:
    """One compaction that led to a resumed window."""

    after_turn: int
    """Number of turns before it"""
    reply: str
    """The whole reply that holds the summary"""
    kept: int
    """Turns that stood verbatim in the resumed window"""


@dataclass(frozen=True)
class Trajectory:
    """One attempt at a task."""

    id: str
    task_id: str
    opening: tuple[str, ...]
    """User messages before the first turn: the task"""
    turns: tuple[Said, ...]
    compactions: tuple[Summarized, ...] = ()
    copied: int = 0
    """How many turns, from the first, were made in another trajectory: context, never trained on"""
    reward: float | None = None
    """None where nothing says it"""
    scaffold: str | None = None
    """By name, where one of ours made it; None: another agent"""


def trajectory_of(rollout: Rollout) -> Trajectory:
    """A rollout of ours as texts. Raises NotUsable where it has none of them, or its trial failed."""
    if rollout.outcome.error_class is not None:
        raise NotUsable("the trial failed and has no reward", rollout.outcome.error_class)
    if not rollout.instruction:
        raise NotUsable("the task's text is missing: the file is of an earlier version")
    done = [c for c in rollout.compactions if c.tokens_after is not None]
    if not all(c.reply for c in done):
        raise NotUsable("a summary's whole reply is missing: the file is of an earlier version")
    return Trajectory(
        id=rollout.id,
        task_id=rollout.task_id,
        opening=(rollout.instruction,),
        turns=ended([_said(turn) for turn in rollout.turns], rollout.outcome.stop_reason),
        compactions=tuple(Summarized(c.after_turn, c.reply, c.kept) for c in done),
        reward=rollout.outcome.reward,
        scaffold=rollout.settings.scaffold,
    )


def _said(turn: TurnRecord) -> Said:
    answers = tuple(call.answer for call in turn.calls) if turn.calls else (turn.observation,)
    return Said(turn.action, answers, turn.calls)


def ended(turns: list[Said], stop_reason: str | None) -> tuple[Said, ...]:
    """The turns of our agent loop, in which an action that ended the rollout was shown nothing.

    A command that is silent was shown an empty observation; one that a deadline cut off, or one that ends the rollout,
    is recorded with an empty one too.
    """
    if not turns:
        return ()
    last = turns[-1]
    unseen = not any(last.answers or ()) and stop_reason in ("finished", "deadline")
    return (*turns[:-1], replace(last, answers=None) if unseen else last)
