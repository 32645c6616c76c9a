"""The synchronous loop: every rollout of a step is made by that step's weights.

What a step needs is its number, so a run resumed from a checkpoint repeats the uninterrupted one bit for bit. The
asynchronous loop is rl.async_ppo; both learn through rl.learner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from compaction.rollout import Rollout
from rl.errors import NoUsableRollouts
from rl.events import Emit, no_events
from rl.learner import Learner, StepClock, StepResult, rollout_metrics
from rl.requests import RequestStream, RolloutRequest
from rl.settings import PPOSettings
from rl.workers import RolloutWorker


@dataclass(frozen=True)
class PPO:
    """Rollout workers and a trainer that take turns."""

    settings: PPOSettings
    stream: RequestStream
    workers: Sequence[RolloutWorker]
    learner: Learner
    emit: Emit = no_events

    async def run(self, first_step: int = 0, *, update_policy: bool = True) -> AsyncIterator[StepResult]:
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
        """Rollouts → learning → weights."""
        clock = StepClock()
        rollouts = await self._rollouts(self.stream.batch(step))
        clock.lap("generate")
        metrics = rollout_metrics(rollouts)
        metrics |= await self.learner.learn(rollouts, clock, update_policy=update_policy)
        if update_policy:
            await self._publish()
        clock.lap("sync")
        metrics |= clock.metrics()
        metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / max(clock.laps["generate"], 1e-9)
        self.emit("trained", step=step, rollouts=[r.id for r in rollouts if r.outcome.reward is not None])
        return StepResult(step, metrics, rollouts)

    async def _publish(self) -> None:
        """The new weights to all workers."""
        trainer = self.learner.trainer
        if trainer.transfers:
            await trainer.send_weights(self.workers)
            return
        weights = await trainer.weights()
        await asyncio.gather(*(worker.load_weights(*weights) for worker in self.workers))

    def state(self) -> tuple[dict[str, Any], list[Rollout]]:
        """What a checkpoint holds beside the trainer: nothing, the step's number is enough."""
        return {}, []

    def restore(self, state: dict[str, Any], rollouts: Sequence[Rollout]) -> None:
        """The counterpart of `state`."""

    async def _rollouts(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Shared out in fixed stretches and handed over in one call each: who makes what, and with whom in a batch,
        decides the last bits."""
        size = -(-len(requests) // len(self.workers))
        stretches = [requests[i : i + size] for i in range(0, len(requests), size)]
        made = await asyncio.gather(
            *(worker.rollouts(stretch) for worker, stretch in zip(self.workers, stretches, strict=False))
        )
        return [rollout for part in made for rollout in part]
