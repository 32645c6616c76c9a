"""A trajectory as a rollout of another model: its texts under that model's template, tokenizer and prompts.

The windows are those of the trajectory: system, task or resume message, kept turns (context); actions and accepted
summaries (as if sampled: each in the window where it was made); observations, and replies that were no action. A
rollout of ours comes back token for token under its own renderer and prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from compaction.exchange import Exchange
from compaction.history import History, Message, Turn, ids
from compaction.protocols import Completion, FinishReason
from compaction.rendering import ChatTemplateRenderer
from compaction.rollout import CallRecord, Outcome, Rollout, Segment, SegmentBuilder
from compaction.room import system_message
from compaction.scaffolds import Action, Call, load_scaffold
from compaction.scaffolds.tools import COMPLETE
from compaction.settings import AgentSettings
from compaction.summaries import judge_summary, load_prompt_pack
from compaction.thinking import split_thinking
from compaction.trajectory import NotUsable, Said, Summarized, Trajectory

UNSCORED = "unscored"
"""Error class of a rollout whose trajectory came without a reward"""


def rerendered(trajectory: Trajectory, renderer: ChatTemplateRenderer, agent: AgentSettings) -> Rollout:
    """The trajectory as a rollout of the model behind `renderer`, which acts under `agent`: its system prompt, its
    resume text and its summary instruction. No reward of its own is computed.

    Raises NotUsable where the model could not have acted so: another scaffold, a summary that would not be accepted,
    a window that does not fit.
    """
    _check_scaffold(trajectory, agent)
    replay = _Replay.start(trajectory, renderer, agent)
    waiting = list(trajectory.compactions)
    for number, turn in enumerate(trajectory.turns):
        while waiting and waiting[0].after_turn <= number:
            replay.compact(waiting.pop(0))
        replay.act(turn, copied=number < trajectory.copied, last=number == len(trajectory.turns) - 1)
    for summarized in waiting:
        replay.compact(summarized)
    reward = trajectory.reward
    outcome = Outcome(reward, "finished") if reward is not None else Outcome(None, "error", UNSCORED)
    return Rollout(trajectory.id, trajectory.task_id, 0, agent, replay.finished(), outcome)


def _check_scaffold(trajectory: Trajectory, agent: AgentSettings) -> None:
    if trajectory.scaffold not in (None, agent.scaffold):
        raise NotUsable(f"the student's scaffold is {agent.scaffold}", f"made with {trajectory.scaffold}")
    if not trajectory.turns:
        raise NotUsable("it holds no turn")
    if not any(_runs(turn, agent) for turn in trajectory.turns):
        raise NotUsable(f"none of its replies is a command of scaffold {agent.scaffold}")


def _runs(turn: Said, agent: AgentSettings) -> bool:
    return any(call.commands for call in turn.calls) or _parsed(turn.action, agent).kind == "command"


@dataclass
class _Replay:
    """State of one trajectory in the middle of being rendered."""

    trajectory: Trajectory
    renderer: ChatTemplateRenderer
    agent: AgentSettings
    history: History
    segment: SegmentBuilder
    segments: list[Segment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scaffold = load_scaffold(self.agent.scaffold)
        self.pack = load_prompt_pack(self.agent.compaction.prompt_pack)
        self.opened = ids(self.renderer.generation_prompt)
        self.end = self.renderer.end_ids[0]

    @classmethod
    def start(cls, trajectory: Trajectory, renderer: ChatTemplateRenderer, agent: AgentSettings) -> _Replay:
        renderer = renderer.with_thinking(agent.thinking)
        first = system_message(load_prompt_pack(agent.compaction.prompt_pack), load_scaffold(agent.scaffold), renderer)
        history = History(first, tuple(_user(renderer, text) for text in trajectory.opening))
        return cls(trajectory, renderer, agent, history, SegmentBuilder("execution", history.token_ids))

    def act(self, turn: Said, *, copied: bool, last: bool) -> None:
        exchange = self._exchange(turn)
        completion = exchange.completion
        used = self.history.tokens + len(self.opened) + len(completion.token_ids)
        self._fits(used)
        if not copied:
            self.segment.observed(self.opened)
            if _usable(exchange.action):
                self.segment.sampled(completion)
            else:
                self.segment.observed(completion.token_ids)
        if turn.answers is None:
            if not last:
                raise NotUsable("a turn in the middle was shown nothing", turn.action[:80])
            return
        shown = ids(exchange.follow(turn.answers))
        if used + len(shown) > self.agent.compaction.window and last:
            return  # nothing is said behind it
        if not copied:
            self.segment.observed(shown)
        said = exchange.messages(turn.answers)
        self.history = self.history.add(Turn(said, self.opened, completion.token_ids, shown))
        if copied:
            self.segment = SegmentBuilder("execution", self.history.token_ids)

    def compact(self, summarized: Summarized) -> None:
        _, said = split_thinking(summarized.reply)
        verdict = judge_summary(said or "", "stop", self.pack, self.scaffold)
        if verdict.body is None:
            raise NotUsable(
                f"a summary would not be accepted under prompt pack {self.pack.name}", str(verdict.rejected)
            )
        if not 0 <= summarized.kept <= len(self.history.turns):
            raise NotUsable("a compaction keeps more turns than there were", str(summarized.kept))
        asked = ids([*self.renderer.message("user", self.pack.summary_instruction), *self.opened])
        reply = _sampled([*self.renderer.encode(summarized.reply), self.end], "stop")
        self._fits(self.history.tokens + len(asked) + len(reply.token_ids))
        self.segments.append(self.segment.build(len(self.segments)))
        summary = SegmentBuilder("summary", asked)
        summary.sampled(reply)
        self.segments.append(summary.build(len(self.segments)))
        opening = [_user(self.renderer, self.pack.resume_message(verdict.body))]
        if self.agent.compaction.keep_task:
            opening = [*(_user(self.renderer, text) for text in self.trajectory.opening), *opening]
        self.history = self.history.resumed(tuple(opening), summarized.kept)
        self.segment = SegmentBuilder("execution", self.history.token_ids)

    def finished(self) -> tuple[Segment, ...]:
        return (*self.segments, self.segment.build(len(self.segments)))

    def _exchange(self, turn: Said) -> Exchange:
        """The action as it was sampled: with the end token, unless the scaffold's answer says that it was cut.

        (Where that answer was clipped in a full window, a cut reply is taken for a whole one.)
        """
        if turn.answers == (load_scaffold(self.agent.scaffold).parse(turn.action, "length").text,):
            cut = _sampled(self.renderer.encode(turn.action), "length")
            return Exchange(turn.action, cut, Action("malformed", turn.answers[0]), self.renderer)
        reply, action = self._reply(turn)
        sampled = _sampled([*self.renderer.encode(reply), self._end_of(action)], "stop")
        return Exchange(reply, sampled, action, self.renderer)

    def _reply(self, turn: Said) -> tuple[str, Action]:
        """What the student would have said. Calls that stood beside the text stand in it, as its template writes them,
        or in the form that most models are taught."""
        action = _parsed(turn.action, self.agent)
        if _made(action.calls) == _made(turn.calls):
            return turn.action, action
        own = self.renderer.calling(turn.action, [(call.name, call.arguments) for call in turn.calls])
        usual = "\n".join(filter(None, [turn.action, *map(_written, turn.calls)]))
        for reply in filter(None, [own, usual]):
            action = _parsed(reply, self.agent)
            if _made(action.calls) == _made(turn.calls) and _faults(action.calls) == _faults(turn.calls):
                return reply, action
        raise NotUsable("its function calls cannot be written as the student's", turn.action[:80])

    def _end_of(self, action: Action) -> int:
        """What ends a reply: after calls that may be what opens their results (GLM)."""
        if action.calls and self.renderer.takes_results:
            opener = self.renderer.results([""])[0]
            return opener if opener in self.renderer.end_ids else self.end
        return self.end

    def _fits(self, tokens: int) -> None:
        window = self.agent.compaction.window
        if tokens > window:
            raise NotUsable(f"it does not fit the student's window of {window:,} tokens", f"{tokens:,} tokens")


def _parsed(reply: str, agent: AgentSettings) -> Action:
    """As the scaffold reads it; what it asks back in between is in the recorded answers already."""
    _, said = split_thinking(reply)
    return load_scaffold(agent.scaffold).parse(said, "stop")


def _usable(action: Action) -> bool:
    """Whether a reply did something: what its scaffold only answered with advice is context, not to be learned."""
    return action.kind != "malformed" and (
        not action.calls or any(c.commands or c.name == COMPLETE for c in action.calls)
    )


def _made(calls: Sequence[Call] | Sequence[CallRecord]) -> list[tuple[str, tuple[str, ...]]]:
    return [(call.name, call.commands) for call in calls]


def _faults(calls: Sequence[Call] | Sequence[CallRecord]) -> list[str | None]:
    """What was said to calls that could not be used: a call that is written again must be wrong in the same way."""
    return [call.answer for call in calls if not call.commands and call.name != COMPLETE]


def _written(call: CallRecord) -> str:
    """A call in the form that most models are taught."""
    said = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


def _user(renderer: ChatTemplateRenderer, text: str) -> Message:
    return Message("user", text, ids(renderer.message("user", text)))


def _sampled(token_ids: list[int], finish_reason: FinishReason) -> Completion:
    n = len(token_ids)
    return Completion(ids(token_ids), np.zeros(n, np.float32), np.zeros(n, np.int32), finish_reason)
