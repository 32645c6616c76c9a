"""One task attempted once under one setting: what it is called and what came out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import Field, model_validator

from compaction.protocols import CountSource
from compaction.rollout import CompactionRecord, Rollout, StopReason, TurnRecord
from compaction.scaffolds import Scaffold, load_scaffold
from compaction.settings import Settings
from compaction.thinking import split_thinking


class TrialKey(Settings):
    """Names a trial. Two trials with one key in one cell are an error, never averaged.

    Raises ValidationError where `keep_recent` is given for cap 0: without a compaction nothing is kept, and the same
    cell must not exist under two names.
    """

    dataset: str = Field(description="task set and split, such as trail/test")
    task: str = Field(description="task id")
    variant: str = Field(description="what the policy was trained as: base, compactionrl, no-summary-loss, …")
    window: int = Field(ge=1, description="C: context window in tokens")
    cap: int = Field(ge=0, description="most compactions per rollout")
    keep_recent: int | None = Field(ge=0, description="turns kept verbatim after a compaction; null exactly at cap 0")
    repeat: int = Field(ge=0, description="number of this attempt at the task, from 0")

    @model_validator(mode="after")
    def _keep_recent_goes_with_a_cap(self) -> TrialKey:
        if (self.cap == 0) != (self.keep_recent is None):
            raise ValueError(
                f"cap={self.cap} with keep_recent={self.keep_recent}: keep_recent is null at cap 0, a number else"
            )
        return self


class TrialResult(Settings):
    """What one trial gave. `reward` is None exactly when infrastructure failed: an unscored trial is never a 0."""

    key: TrialKey
    seed: int = Field(description="seed that the rollout was sampled with")
    temperature: float = Field(ge=0, description="sampling temperature; 0 = greedy")
    reward: float | None = Field(ge=0, le=1, description="the verifier's reward")
    error_class: str | None = Field(description="kind of failure where there is no reward; see evaluation.failures")
    stop_reason: StopReason = Field(description="why the rollout ended")
    compactions: int = Field(ge=0, description="compactions that led to a resumed window")
    compacted: bool = Field(description="a compaction was tried, also if none succeeded")
    summary_tokens: tuple[int, ...] = Field(description="sampled tokens of each accepted summary, in order")
    rejected_summaries: int = Field(ge=0, description="sampled summaries that were not accepted")
    turns: int = Field(ge=0, description="turns, over all windows")
    commands: int = Field(ge=0, description="commands run, over all windows")
    repeated_commands: int = Field(
        ge=0, description="commands after a compaction that had been run, word for word, before it"
    )
    generated_tokens: int = Field(ge=0, description="tokens sampled, discarded summaries included")
    prompt_tokens: int = Field(ge=0, description="prompt tokens over all calls, cached ones included")
    cached_tokens: int = Field(ge=0, description="prompt tokens that a kept prefix served")
    cost: float | None = Field(
        ge=0, description="US dollars of this attempt, failed calls included; null where a price is unknown"
    )
    count_source: CountSource = Field(description="what |h| was counted with: exact ids, a tokenizer, an estimate")

    @model_validator(mode="after")
    def _reward_or_error(self) -> TrialResult:
        if (self.reward is None) != (self.error_class is not None):
            raise ValueError(
                f"task {self.key.task}: reward={self.reward} with error_class={self.error_class}; exactly one is null"
            )
        return self


def trial_result(key: TrialKey, rollout: Rollout) -> TrialResult:
    """Counts of a rollout under its name.

    A rollout whose only compaction failed counts as compacted: the failure is compaction's, and putting it with the
    uncompacted ones would hide it. Raises ValueError where the key names another task or setting than the rollout ran.
    """
    _check_key(key, rollout)
    commands, repeated = _commands(rollout)
    return TrialResult(
        key=key,
        seed=rollout.seed,
        temperature=rollout.settings.temperature,
        reward=rollout.outcome.reward,
        error_class=rollout.outcome.error_class,
        stop_reason=rollout.outcome.stop_reason,
        compactions=rollout.n_compactions,
        compacted=bool(rollout.compactions),
        summary_tokens=tuple(rollout.summary_tokens),
        rejected_summaries=sum(_rejected(c) for c in rollout.compactions),
        turns=len(rollout.turns),
        commands=commands,
        repeated_commands=repeated,
        generated_tokens=rollout.usage.completion_tokens,
        prompt_tokens=rollout.usage.prompt_tokens,
        cached_tokens=rollout.usage.cached_tokens,
        cost=rollout.usage.cost,
        count_source=rollout.count_source,
    )


def _rejected(record: CompactionRecord) -> int:
    """Sampled summaries of one compaction that were not accepted: all that evaluation discarded, the last one too; in
    training the one that is kept as a segment."""
    sampled_badly = record.rejected not in (None, "grew", "context_length")
    return len(record.discarded) or int(sampled_badly)


def _commands(rollout: Rollout) -> tuple[int, int]:
    """(commands run, those among them that a compaction had made the agent forget to have run).

    A command in a later window counts as repeated where the same text was run before the compaction that opened the
    window; in the first window nothing is forgotten, and running the tests again there is no repetition.
    """
    scaffold = load_scaffold(rollout.settings.scaffold)
    resumed_after = [c.after_turn for c in rollout.compactions if c.tokens_after is not None]
    first_run: dict[str, int] = {}
    commands = repeated = 0
    for number, turn in enumerate(rollout.turns):
        window_start = max((after for after in resumed_after if after <= number), default=0)
        for command in _run_in(turn, scaffold):
            commands += 1
            repeated += first_run.setdefault(" ".join(command.split()), number) < window_start
    return commands, repeated


def _run_in(turn: TurnRecord, scaffold: Scaffold) -> Sequence[str]:
    """The commands that a turn ran."""
    if scaffold.tools:
        return [command for call in turn.calls for command in call.commands]
    action = scaffold.parse(split_thinking(turn.action)[1], "stop")
    return [action.text] if action.kind == "command" else []


def total_cost(trials: Iterable[TrialResult]) -> float | None:
    """US dollars of these trials together; None where one is unknown."""
    costs = [trial.cost for trial in trials]
    return None if None in costs else float(sum(cost for cost in costs if cost is not None))


def _check_key(key: TrialKey, rollout: Rollout) -> None:
    ran = rollout.settings.compaction
    named = (key.task, key.window, key.cap, key.keep_recent)
    actual = (rollout.task_id, ran.window, ran.cap, ran.keep_recent if ran.cap else None)
    if named != actual:
        raise ValueError(f"rollout {rollout.id} ran (task, window, cap, keep_recent) = {actual}, its key says {named}")
