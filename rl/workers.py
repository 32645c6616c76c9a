"""Ray actors, and the handles a driver holds on them: a replaceable rollout worker and the trainer.

Actors return data; only the driver logs. Weights travel through the object store. Nothing is detached: what a driver
started ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from compaction.agent import run_rollout
from compaction.protocols import Task
from compaction.rendering import ChatTemplateRenderer, load_renderer
from compaction.rollout import Rollout
from compaction.settings import AgentSettings
from rl.checkpoint import latest_checkpoint, load_checkpoint, new_checkpoint
from rl.engines.torch_engine import TorchEngine
from rl.errors import CheckpointError, WorkerLost
from rl.models import load_policy
from rl.remote import PROCESS_DIED, actor, one_thread, result_of
from rl.rows import Row
from rl.settings import TrainerSettings
from rl.trainer import Trainer

MAX_DEATHS = 3
"""Deaths in a row after which a worker is not replaced: a task that kills its worker must not do so for ever"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutRequest:
    """One rollout to make. Its id, `seed` and the task's id decide its sampling."""

    id: str
    task: Task
    seed: int
    settings: AgentSettings


class RolloutActor:
    """Runs rollouts on an in-process torch engine, `slots` at once.

    The model is loaded in the first call: what a constructor raises reaches a driver without its class.
    """

    def __init__(self, checkpoint: str, slots: int, max_length: int) -> None:
        one_thread()
        self._checkpoint, self._slots, self._max_length = Path(checkpoint), slots, max_length

    @cached_property
    def _engine(self) -> TorchEngine:
        return TorchEngine(load_policy(self._checkpoint), slots=self._slots, max_length=self._max_length)

    @cached_property
    def _renderer(self) -> ChatTemplateRenderer:
        return load_renderer(self._checkpoint)

    async def rollouts(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        gate = asyncio.Semaphore(self._slots)

        async def one(request: RolloutRequest) -> Rollout:
            async with gate:
                return await run_rollout(
                    request.task,
                    self._engine,
                    self._renderer,
                    request.settings,
                    seed=request.seed,
                    rollout_id=request.id,
                )

        return list(await asyncio.gather(*(one(r) for r in requests)))

    async def load_weights(self, weights: dict[str, Any], version: int) -> None:
        self._engine.load_weights(weights, version)

    async def pid(self) -> int:
        return os.getpid()


class RolloutWorker:
    """The driver's handle on one rollout actor. A dead actor is replaced, gets the weights again and redoes the call:
    the seeds are in the requests, so the rollouts are the ones that were lost."""

    def __init__(self, checkpoint: Path, *, slots: int, max_length: int) -> None:
        """`slots`: rollouts at once; `max_length`: most tokens of one of them, the window at least."""
        self._start = lambda: actor(RolloutActor).remote(str(checkpoint), slots, max_length)
        self._actor = self._start()
        self._weights: tuple[Any, int] | None = None
        self._deaths = 0

    async def rollouts(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """All requests' rollouts, in the order asked; infrastructure failures are rollouts without reward.

        Raises WorkerLost when the actor keeps dying, and what a rollout raises before it starts (WindowTooSmall).
        """
        rollouts: list[Rollout] = await self._call("rollouts", requests)
        return rollouts

    async def load_weights(self, weights: Any, version: int) -> None:
        """Swaps the policy's weights (an object reference or a state dict) at a step boundary.

        Raises WorkerLost, and EngineError for weights that do not fit or are not finite.
        """
        await self._call("load_weights", weights, version)
        self._weights = (weights, version)

    async def pid(self) -> int:
        return int(await self._call("pid"))

    def stop(self) -> None:
        ray.kill(self._actor)

    async def _call(self, method: str, *arguments: Any) -> Any:
        while True:
            try:
                result = await result_of(getattr(self._actor, method).remote(*arguments))
            except PROCESS_DIED as error:
                await self._replace(error)
            else:
                self._deaths = 0
                return result

    async def _replace(self, error: Exception) -> None:
        """A new actor that has the weights last loaded."""
        while True:
            self._deaths += 1
            if self._deaths >= MAX_DEATHS:
                self._deaths = 0  # another call, of the next cell perhaps, starts anew
                raise WorkerLost(
                    f"the rollout worker died {MAX_DEATHS} times in a row, last by {type(error).__name__}; free "
                    "memory or lower the number of rollouts at once"
                ) from error
            logger.warning("rollout worker died (%s); replacing it", type(error).__name__)
            with suppress(Exception):  # one that merely does not answer must not go on beside the new one
                self.stop()
            self._actor = self._start()
            if self._weights is None:
                return
            try:
                await result_of(self._actor.load_weights.remote(*self._weights))
                return
            except PROCESS_DIED as again:
                error = again


class TrainerActor:
    """The trainer in a process of its own; like the rollout actor it loads in the first call."""

    def __init__(self, checkpoint: str, settings: TrainerSettings) -> None:
        one_thread()
        self._checkpoint, self._settings = checkpoint, settings

    @cached_property
    def _trainer(self) -> Trainer:
        torch.manual_seed(0)  # a new process starts with random state, which checkpoints would then hold
        return Trainer(self._checkpoint, self._settings)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._trainer, method)(*arguments)

    def version(self) -> int:
        return self._trainer.version

    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._trainer.save(Path(folder))

    def checkpoint(self, root: str, step: int, state: dict[str, Any]) -> None:
        with new_checkpoint(Path(root), step, state) as folder:
            self._trainer.save(folder)

    def resume(self, root: str) -> tuple[int, dict[str, Any]] | None:
        folder = latest_checkpoint(Path(root))
        if folder is None:
            return None
        try:
            found = load_checkpoint(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Delete {folder} to go on from the one before it") from error
        self._trainer.load(folder)
        return found.step, found.state

    def pid(self) -> int:
        return os.getpid()


class TrainerHandle:
    """The driver's handle on the trainer actor: `rl.trainer.Trainer`'s methods as coroutines, and checkpoints.

    Every method raises WorkerLost when the actor has died (its state is in the last checkpoint), and what the trainer
    itself raises: TrainingDiverged, CheckpointError, CheckpointNotFound.
    """

    def __init__(self, checkpoint: Path, settings: TrainerSettings) -> None:
        self._actor = actor(TrainerActor).remote(str(checkpoint), settings)

    async def values(self, rows: Sequence[Row]) -> list[np.ndarray]:
        return await self._await(self._actor.call.remote("values", rows))

    async def update_critic(self, rows: Sequence[Row], targets: Sequence[np.ndarray]) -> dict[str, float]:
        return await self._await(self._actor.call.remote("update_critic", rows, targets))

    async def update_policy(
        self, rows: Sequence[Row], advantages: Sequence[np.ndarray], included: Sequence[np.ndarray] | None
    ) -> dict[str, float]:
        return await self._await(self._actor.call.remote("update_policy", rows, advantages, included))

    async def weights(self) -> tuple[Any, int]:
        """(reference to the policy's state dict in the object store, version)."""
        return self._actor.call.remote("weights"), await self._await(self._actor.version.remote())

    async def load(self, folder: Path) -> None:
        await self._await(self._actor.call.remote("load", folder))

    async def save(self, folder: Path) -> None:
        """Policy, critic, optimisers and RNG into `folder`."""
        await self._await(self._actor.save.remote(str(folder)))

    async def save_policy(self, folder: Path) -> None:
        await self._await(self._actor.call.remote("save_policy", folder))

    async def checkpoint(self, root: Path, step: int, state: dict[str, Any]) -> None:
        """A checkpoint below `root`, atomically; the last two are kept."""
        await self._await(self._actor.checkpoint.remote(str(root), step, state))

    async def resume(self, root: Path) -> tuple[int, dict[str, Any]] | None:
        """Restores the newest checkpoint below `root`: (its step, its state), or None where there is none."""
        return await self._await(self._actor.resume.remote(str(root)))

    async def pid(self) -> int:
        return int(await self._await(self._actor.pid.remote()))

    def stop(self) -> None:
        ray.kill(self._actor)

    async def _await(self, reference: Any) -> Any:
        try:
            return await result_of(reference)
        except PROCESS_DIED as error:
            raise WorkerLost(f"the trainer process died ({type(error).__name__})") from error
