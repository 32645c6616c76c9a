"""One learning step on finished rollouts, in the design's order: values frozen for the batch, advantages on the driver
in float64, critic updates, one policy update. Both loops learn through it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compaction.rollout import Rollout
from rl.advantages import OVERLONG, advantage_metrics, batch_advantages
from rl.rows import Row, gather_segments, rows_of, scatter_segments
from rl.settings import PPOSettings
from rl.workers import TrainerHandle


@dataclass(frozen=True)
class StepResult:
    """What a step did: metrics under the design's names, and the rollouts that it learned from."""

    step: int
    metrics: dict[str, float]
    rollouts: list[Rollout]


class StepClock:
    """Wall seconds of a step by part."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        return self._last - self._started

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}_seconds": s for name, s in self.laps.items()} | {"time/step_seconds": self.seconds}


@dataclass(frozen=True)
class Learner:
    """Turns rollouts into rows and hands them to the trainer."""

    settings: PPOSettings
    trainer: TrainerHandle

    async def learn(
        self, rollouts: Sequence[Rollout], clock: StepClock, *, update_policy: bool, oldest_version: int = 0
    ) -> dict[str, float]:
        """Metrics of one step on the rollouts that have a reward; {} where none has an optimized token.

        Tokens sampled by a version before `oldest_version` carry no gradient: they leave |M| and still count in every
        N. Without `update_policy` only the critic learns. Raises what the trainer raises.
        """
        usable = [r for r in rollouts if r.outcome.reward is not None]
        rows = [row for r in usable for row in self._rows(r)]
        if not rows:
            return {}
        advantage = self.settings.advantage
        if advantage.estimator == "gae":
            values = await self.trainer.values(rows)
        else:
            values = [np.zeros(row.n_optimized) for row in rows]
        clock.lap("values")
        by_rollout = gather_segments(rows, values)
        kept = [r for r in usable if r.id in by_rollout]
        rewards = {r.id: float(r.outcome.reward or 0.0) for r in kept}
        advantages = batch_advantages(
            [by_rollout[r.id] for r in kept], list(rewards.values()), advantage, groups=[r.task_id for r in kept]
        )
        metrics = advantage_metrics(advantages, advantage)
        per_row = scatter_segments(rows, {r.id: a for r, a in zip(kept, advantages, strict=True)})
        if advantage.estimator == "gae":
            targets = [np.full(row.n_optimized, rewards[row.rollout_id]) for row in rows]
            metrics |= await self.trainer.update_critic(rows, targets)
            clock.lap("critic")
        if update_policy:
            included = self._included(rows, kept, oldest_version)
            metrics |= await self.trainer.update_policy(rows, per_row, included)
            clock.lap("policy")
        # A skipped update counts itself; what is not finite beside it is left out, as the trainer does.
        return {name: value for name, value in metrics.items() if np.isfinite(value)}

    def _rows(self, rollout: Rollout) -> list[Row]:
        return rows_of(rollout, train_summaries=self.settings.train_summaries, share_prefix=self.settings.share_prefix)

    def _included(
        self, rows: Sequence[Row], rollouts: Sequence[Rollout], oldest_version: int
    ) -> list[np.ndarray] | None:
        """Which tokens carry gradient; None for all. SUPO's overlong mask takes whole rollouts that hit a limit."""
        if not self.settings.overlong_mask and oldest_version <= 0:
            return None
        limits = OVERLONG if self.settings.overlong_mask else ()
        overlong = {r.id for r in rollouts if r.outcome.stop_reason in limits}
        return [(row.versions[row.optimized] >= oldest_version) & (row.rollout_id not in overlong) for row in rows]


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Counts and means of a batch of rollouts; names without a value (no summary in the batch) are left out."""
    scored = [r for r in rollouts if r.outcome.reward is not None]
    summaries = [n for r in rollouts for n in r.summary_tokens]
    rejected = [c.rejected is not None for r in rollouts for c in r.compactions]
    metrics = {
        "rollout/usable": float(len(scored)),
        "rollout/errored": float(len(rollouts) - len(scored)),
        "rollout/tokens": float(sum(r.usage.completion_tokens for r in rollouts)),
        "rollout/turns": float(np.mean([len(r.turns) for r in rollouts])),
        "rollout/compactions": float(np.mean([r.n_compactions for r in rollouts])),
        "rollout/compacted_share": float(np.mean([r.n_compactions > 0 for r in rollouts])),
    }
    if scored:
        metrics["train/reward"] = float(np.mean([r.outcome.reward for r in scored]))
    if summaries:
        metrics["rollout/summary_tokens"] = float(np.mean(summaries))
    if rejected:
        metrics["rollout/summary_rejected"] = float(np.mean(rejected))
    return metrics
