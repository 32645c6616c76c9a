"""Whoever acts in an evaluation. A checkpoint is served by a Ray worker (an endpoint: see endpoint_policy.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol

from compaction.rollout import Rollout
from rl.requests import RolloutRequest
from tasks.cluster import Cluster

if TYPE_CHECKING:
    from rl.serving import Serving


class Policy(Protocol):
    """Serves all cells of one variant and training seed."""

    async def ready(self) -> None:
        """Called before the first trial of a cell. Raises EndpointRefused where the policy cannot act."""
        ...

    async def rollout(self, request: RolloutRequest) -> Rollout: ...

    async def close(self) -> None: ...


class CheckpointPolicy:
    """A checkpoint's rollout worker, started for the first cell that has to run."""

    def __init__(self, serving: Callable[[], Serving], cluster: Cluster, *, slots: int, rollout_timeout: float) -> None:
        """`serving`: made when it is needed, because what it is made of takes seconds to import."""
        self._serving, self._cluster = serving, cluster
        self._slots, self._rollout_timeout = slots, rollout_timeout
        self._worker: Any = None
        self._seat = AsyncExitStack()
        self._starting = asyncio.Lock()

    async def ready(self) -> None:
        self._cluster.ensure()
        from rl.remote import seated
        from rl.workers import RolloutWorker

        async with self._starting:
            if self._worker is None:
                serving = self._serving()
                (seat,) = await self._seat.enter_async_context(seated([serving.gpus]))
                self._worker = RolloutWorker(
                    serving, slots=self._slots, rollout_timeout=self._rollout_timeout, seat=seat
                )

    async def rollouts(
        self, requests: Sequence[RolloutRequest], on_finished: Callable[[int], None] | None = None
    ) -> list[Rollout]:
        """Many at once, in one call of the worker; `on_finished` is told now and then how many are done."""
        rollouts: list[Rollout] = await self._worker.rollouts(requests, on_finished)
        return rollouts

    async def rollout(self, request: RolloutRequest) -> Rollout:
        return (await self.rollouts([request]))[0]

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        await self._seat.aclose()
