"""One step of PPO on compacted rollouts, and the synchronous loop around it.

The order of a step is the design's "Learning: one order, no leaks": values frozen for the batch, advantages on the
driver in float64, critic updates, one policy update, weights out. The loop is a coroutine over two actors; what a step
needs is its number, so a run resumed from a checkpoint repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from compaction.protocols import Task
from compaction.rollout import Rollout
from compaction.settings import AgentSettings
from rl.advantages import OVERLONG, advantage_metrics, batch_advantages
from rl.errors import NoUsableRollouts
from rl.rows import Row, gather_segments, rows_of, scatter_segments
from rl.settings import PPOSettings
from rl.workers import RolloutRequest, RolloutWorker, TrainerHandle

TaskSource = Callable[[int, int], list[Task]]
"""(first, n) → that stretch of the endless, seeded stream of training tasks"""


@dataclass(frozen=True)
class StepResult:
    """What a step did: metrics under the design's names, and its rollouts."""

    step: int
    metrics: dict[str, float]
    rollouts: list[Rollout]


@dataclass(frozen=True)
class PPO:
    """The synchronous loop over a rollout worker and a trainer (the handles of rl.workers)."""

    settings: PPOSettings
    agent: AgentSettings
    tasks: TaskSource
    seed: int
    stream: str
    """Part of every rollout's seed: critic pretraining and PPO sample apart"""
    worker: RolloutWorker
    trainer: TrainerHandle

    async def run(self, first_step: int, *, update_policy: bool = True) -> AsyncIterator[StepResult]:
        """Steps `first_step` … `settings.steps` − 1. Without `update_policy` only the critic learns (pretraining).

        Raises NoUsableRollouts, and what the trainer raises (TrainingDiverged).
        """
        empty = 0
        for step in range(first_step, self.settings.steps):
            result = await self.step(step, update_policy)
            empty = 0 if result.metrics["rollout/usable"] else empty + 1
            if empty >= self.settings.max_empty_batches:
                last = next((r.outcome.detail for r in result.rollouts if r.outcome.detail), "no detail")
                raise NoUsableRollouts(f"{empty} batches in a row had no rollout with a reward; last failure: {last}")
            yield result

    async def step(self, step: int, update_policy: bool = True) -> StepResult:
        """Rollouts → values → advantages → critic → policy → weights."""
        clock = _Clock()
        rollouts = await self.worker.rollouts(self.requests(step))
        clock.lap("generate")
        usable = [r for r in rollouts if r.outcome.reward is not None]
        rows = [row for r in usable for row in self._rows(r)]
        metrics = rollout_metrics(rollouts)
        if rows:
            metrics |= await self._learn(rows, usable, update_policy, clock)
        if update_policy:
            await self.worker.load_weights(*await self.trainer.weights())
        clock.lap("sync")
        metrics |= clock.metrics(metrics["rollout/tokens"])
        # A skipped update counts itself; what is not finite beside it is left out, as the trainer does.
        return StepResult(step, {name: value for name, value in metrics.items() if np.isfinite(value)}, rollouts)

    def requests(self, step: int) -> list[RolloutRequest]:
        """The step's rollouts: `batch_size / group_size` fresh tasks, each `group_size` times."""
        prompts = self.settings.batch_size // self.settings.group_size
        tasks = self.tasks(step * prompts, prompts)
        return [
            RolloutRequest(
                f"{step:05d}-{i:04d}-{g}", task, rollout_seed(self.seed, self.stream, step, i, g), self.agent
            )
            for i, task in enumerate(tasks)
            for g in range(self.settings.group_size)
        ]

    def _rows(self, rollout: Rollout) -> list[Row]:
        return rows_of(rollout, train_summaries=self.settings.train_summaries, share_prefix=self.settings.share_prefix)

    async def _learn(
        self, rows: list[Row], rollouts: list[Rollout], update_policy: bool, clock: _Clock
    ) -> dict[str, float]:
        advantage = self.settings.advantage
        if advantage.estimator == "gae":
            values = await self.trainer.values(rows)
        else:
            values = [np.zeros(row.n_optimized) for row in rows]
        clock.lap("values")
        by_rollout = gather_segments(rows, values)
        kept = [r for r in rollouts if r.id in by_rollout]
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
            metrics |= await self.trainer.update_policy(rows, per_row, self._included(rows, kept))
            clock.lap("policy")
        return metrics

    def _included(self, rows: Sequence[Row], rollouts: Sequence[Rollout]) -> list[np.ndarray] | None:
        """SUPO's overlong mask: tokens of rollouts that hit a limit carry no gradient."""
        if not self.settings.overlong_mask:
            return None
        overlong = {r.id for r in rollouts if r.outcome.stop_reason in OVERLONG}
        return [np.full(row.n_optimized, row.rollout_id not in overlong) for row in rows]


def rollout_seed(*parts: object) -> int:
    """A 63-bit seed from whatever names a rollout."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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


class _Clock:
    """Seconds of a step by part."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self, tokens: float) -> dict[str, float]:
        total = self._last - self._started
        out = {f"time/{name}_seconds": seconds for name, seconds in self._laps.items()}
        out["time/step_seconds"] = total
        out["rollout/tokens_per_second"] = tokens / max(self._laps.get("generate", 0.0), 1e-9)
        return out
