"""Whoever acts in an evaluation. A checkpoint is served by a Ray worker (an endpoint: see endpoint_policy.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from compaction.rollout import Rollout
from rl.requests import RolloutRequest
from tasks.cluster import Cluster


class Policy(Protocol):
    """Serves all cells of one variant and training seed."""

    async def ready(self) -> None:
        """Called before the first trial of a cell. Raises EndpointRefused where the policy cannot act."""
        ...

    async def rollout(self, request: RolloutRequest) -> Rollout: ...

    async def close(self) -> None: ...


class CheckpointPolicy:
    """A checkpoint's rollout worker, started for the first cell that has to run."""

    def __init__(
        self, checkpoint: Path, cluster: Cluster, *, slots: int, max_length: int, rollout_timeout: float
    ) -> None:
        self._checkpoint, self._cluster = checkpoint, cluster
        self._slots, self._max_length, self._rollout_timeout = slots, max_length, rollout_timeout
        self._worker: Any = None

    async def ready(self) -> None:
        self._cluster.ensure()
        from rl.workers import RolloutWorker, TorchServing

        if self._worker is None:
            serving = TorchServing(self._checkpoint, self._slots, self._max_length)
            self._worker = RolloutWorker(serving, slots=self._slots, rollout_timeout=self._rollout_timeout)

    async def rollouts(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Many at once, in one call of the worker."""
        rollouts: list[Rollout] = await self._worker.rollouts(requests)
        return rollouts

    async def rollout(self, request: RolloutRequest) -> Rollout:
        return (await self.rollouts([request]))[0]

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()
