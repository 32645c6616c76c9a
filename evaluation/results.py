"""The result of one cell, as the `--json` object, MLflow and the report carry it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from compaction.settings import Settings
from evaluation.analysis.statistics import Interval, bootstrap_interval, mean_std
from evaluation.grid import Cell
from evaluation.trial import TrialResult, total_cost

K = TypeVar("K", str, int)


class CellResult(Settings):
    """One variant of one training seed in one setting: scores in [0, 1], sizes in tokens; null where there is nothing
    to say, never NaN. Trials without a reward are in `errored` and in no score."""

    model_config = ConfigDict(allow_inf_nan=False)

    variant: str = Field(description="what the policy was trained as")
    seed: int = Field(description="training seed")
    window: int = Field(ge=1, description="C: context window in tokens")
    cap: int = Field(ge=0, description="most compactions per rollout")
    keep_recent: int | None = Field(ge=0, description="turns kept verbatim after a compaction; null exactly at cap 0")
    temperature: float = Field(ge=0, description="sampling temperature; 0 = greedy")
    repeats: int = Field(ge=1, description="attempts per task")
    n_tasks: int = Field(ge=1, description="tasks attempted")
    n_trials: int = Field(ge=1, description="trials: tasks × repeats when complete")
    scored: int = Field(ge=0, description="trials with a reward")
    errored: int = Field(ge=0, description="trials without a reward")
    error_classes: dict[str, int] = Field(description="trials without a reward by kind of failure")
    coverage: float = Field(ge=0, le=1, description="share of trials that have a reward")
    pass_at_1: float | None = Field(
        ge=0, le=1, description="mean over tasks of the task's mean reward over its scored attempts"
    )
    pass_at_1_std: float | None = Field(
        ge=0, description="sample standard deviation over repeats of the repeat's mean reward; null for one repeat"
    )
    ci_low: float | None = Field(ge=0, le=1, description="lower end of the task-clustered 95% bootstrap interval")
    ci_high: float | None = Field(ge=0, le=1, description="upper end of it")
    pass_at_1_compacted: float | None = Field(
        ge=0, le=1, description="mean reward of the scored trials that compacted or tried to"
    )
    pass_at_1_uncompacted: float | None = Field(ge=0, le=1, description="mean reward of the other scored trials")
    compacted_share: float = Field(ge=0, le=1, description="share of trials that compacted or tried to")
    compactions_per_rollout: float = Field(ge=0, description="mean number of compactions that led to a resumed window")
    summary_tokens: float | None = Field(ge=0, description="mean sampled tokens of an accepted summary")
    rejected_summaries: int = Field(ge=0, description="sampled summaries that were not accepted")
    turns: float = Field(ge=0, description="mean turns per trial")
    commands: float = Field(ge=0, description="mean commands run per trial")
    repeated_commands: float = Field(
        ge=0, description="mean per trial of commands run again after a compaction, word for word"
    )
    generated_tokens: float = Field(ge=0, description="mean sampled tokens per trial")
    prompt_tokens: float = Field(ge=0, description="mean prompt tokens per trial, cached ones included")
    cached_tokens: float = Field(ge=0, description="mean prompt tokens per trial that a kept prefix served")
    cost: float | None = Field(
        ge=0, description="US dollars of the trials' last attempts; null where a price is unknown"
    )
    count_sources: dict[str, int] = Field(description="trials by what |h| was counted with: exact, tokenizer, estimate")
    stop_reasons: dict[str, int] = Field(description="trials by why they ended")
    task_scores: dict[str, float] = Field(
        description="per task: mean reward over its scored attempts; for paired tests"
    )
    task_summary_tokens: dict[str, float] = Field(
        description="per task with an accepted summary: mean sampled tokens of its summaries; for paired intervals"
    )
    mlflow_run_id: str | None = Field(default=None, description="MLflow run of this cell")

    @model_validator(mode="after")
    def _counts_add_up(self) -> CellResult:
        if self.scored + self.errored != self.n_trials:
            raise ValueError(f"{self.scored} scored + {self.errored} errored are not {self.n_trials} trials")
        if (self.cap == 0) != (self.keep_recent is None):
            raise ValueError(f"cap={self.cap} with keep_recent={self.keep_recent}: null at cap 0, a number else")
        return self

    @property
    def cell(self) -> Cell:
        return Cell(self.variant, self.seed, self.window, self.cap, self.keep_recent, self.temperature)

    @property
    def interval(self) -> Interval | None:
        return None if self.ci_low is None or self.ci_high is None else Interval(self.ci_low, self.ci_high)


def summarize_cell(cell: Cell, trials: Sequence[TrialResult], *, mlflow_run_id: str | None = None) -> CellResult:
    """What a cell's trials say together.

    Raises ValueError for no trials, for a trial of another cell, and for two trials of one (task, repeat): which of the
    two counts is for a person to say.
    """
    _check_trials(cell, trials)
    scored = [trial for trial in trials if trial.reward is not None]
    task_scores = _means_by(scored, lambda t: t.key.task, _reward)
    repeat_scores = _means_by(scored, lambda t: t.key.repeat, _reward)
    interval = bootstrap_interval(list(task_scores.values()))
    summaries = [tokens for trial in trials for tokens in trial.summary_tokens]
    return CellResult(
        variant=cell.variant,
        seed=cell.seed,
        window=cell.window,
        cap=cell.cap,
        keep_recent=cell.keep_recent,
        temperature=cell.temperature,
        repeats=len({trial.key.repeat for trial in trials}),
        n_tasks=len({trial.key.task for trial in trials}),
        n_trials=len(trials),
        scored=len(scored),
        errored=len(trials) - len(scored),
        error_classes=_counts(trial.error_class for trial in trials if trial.error_class is not None),
        coverage=len(scored) / len(trials),
        pass_at_1=mean_std(list(task_scores.values()))[0],
        pass_at_1_std=mean_std(list(repeat_scores.values()))[1],
        ci_low=interval.low if interval else None,
        ci_high=interval.high if interval else None,
        pass_at_1_compacted=mean_std([_reward(t) for t in scored if t.compacted])[0],
        pass_at_1_uncompacted=mean_std([_reward(t) for t in scored if not t.compacted])[0],
        compacted_share=float(np.mean([trial.compacted for trial in trials])),
        compactions_per_rollout=float(np.mean([trial.compactions for trial in trials])),
        summary_tokens=mean_std(summaries)[0],
        rejected_summaries=sum(trial.rejected_summaries for trial in trials),
        turns=float(np.mean([trial.turns for trial in trials])),
        commands=float(np.mean([trial.commands for trial in trials])),
        repeated_commands=float(np.mean([trial.repeated_commands for trial in trials])),
        generated_tokens=float(np.mean([trial.generated_tokens for trial in trials])),
        prompt_tokens=float(np.mean([trial.prompt_tokens for trial in trials])),
        cached_tokens=float(np.mean([trial.cached_tokens for trial in trials])),
        cost=total_cost(trials),
        count_sources=_counts(trial.count_source for trial in trials),
        stop_reasons=_counts(trial.stop_reason for trial in trials),
        task_scores=task_scores,
        task_summary_tokens=_summary_tokens_by_task(trials),
        mlflow_run_id=mlflow_run_id,
    )


def _check_trials(cell: Cell, trials: Sequence[TrialResult]) -> None:
    if not trials:
        raise ValueError(f"{cell.name}: no trials to summarize")
    seen: set[tuple[str, int]] = set()
    for trial in trials:
        key = trial.key
        ran = (key.variant, key.window, key.cap, key.keep_recent, trial.temperature)
        expected = (cell.variant, cell.window, cell.cap, cell.keep_recent, cell.temperature)
        if ran != expected:
            raise ValueError(
                f"{cell.name}: task {key.task} ran (variant, window, cap, keep_recent, temperature) = {ran}"
            )
        if (key.task, key.repeat) in seen:
            raise ValueError(f"{cell.name}: two results for task {key.task}, repeat {key.repeat}; remove one")
        seen.add((key.task, key.repeat))


def _reward(trial: TrialResult) -> float:
    if trial.reward is None:
        raise ValueError(f"task {trial.key.task} has no reward ({trial.error_class})")
    return trial.reward


def _means_by(
    trials: Iterable[TrialResult], key: Callable[[TrialResult], K], value: Callable[[TrialResult], float]
) -> dict[K, float]:
    groups: dict[K, list[float]] = defaultdict(list)
    for trial in trials:
        groups[key(trial)].append(value(trial))
    return {name: float(np.mean(groups[name])) for name in sorted(groups)}


def _summary_tokens_by_task(trials: Iterable[TrialResult]) -> dict[str, float]:
    groups: dict[str, list[int]] = defaultdict(list)
    for trial in trials:
        groups[trial.key.task].extend(trial.summary_tokens)
    return {task: float(np.mean(groups[task])) for task in sorted(groups) if groups[task]}


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))
