"""Ray actors, and the handles a driver holds on them: a replaceable rollout worker and the trainer.

Actors return data; only the driver logs. Weights travel through the object store. Nothing is detached: what a driver
started ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import ray
import torch

from compaction.agent import run_rollout
from compaction.protocols import Renderer
from compaction.rollout import Outcome, Rollout
from compaction.storage import read_rollouts, write_rollouts
from rl.checkpoint import latest_checkpoint, load_checkpoint, new_checkpoint
from rl.errors import CheckpointError, WorkerDied, WorkerLost
from rl.remote import PROCESS_DIED, Seat, actor, one_thread, result_of, watched
from rl.requests import RolloutRequest
from rl.rows import Row
from rl.serving import ServedEngine, Serving
from rl.settings import TrainerSettings
from rl.trainer import Trainer
from rl.weight_transfer import WeightSender

MAX_DEATHS = 5
"""Deaths in a row after which a worker is not replaced: a task that kills its worker must not do so for ever"""

SEND_SECONDS = 300.0
"""How long a transfer from GPU to GPU may take"""

ROLLOUTS = "rollouts.parquet"
"""A checkpoint's finished rollouts that are not yet trained"""

logger = logging.getLogger(__name__)


class RolloutActor:
    """Runs rollouts on the engine that it serves, `slots` at once.

    The model is loaded in the first call: what a constructor raises reaches a driver without its class.
    """

    def __init__(self, serving: Serving, slots: int, rollout_timeout: float) -> None:
        one_thread()
        self._serving, self._slots, self._rollout_timeout = serving, slots, rollout_timeout
        self._finished: Counter[str] = Counter()

    @cached_property
    def _served(self) -> tuple[ServedEngine, Renderer]:
        return self._serving.load()

    async def rollouts(self, requests: Sequence[RolloutRequest], call: str = "") -> list[Rollout]:
        """`call`: a name under which `finished` counts."""
        gate = asyncio.Semaphore(self._slots)

        async def one(request: RolloutRequest) -> Rollout:
            async with gate:
                rollout = await self._rollout(request)
            self._finished[call] += 1
            return rollout

        self._finished[call] = 0
        try:
            return list(await asyncio.gather(*(one(r) for r in requests)))
        finally:
            del self._finished[call]

    async def finished(self, call: str) -> int | None:
        """How many rollouts of a call in progress are finished; None before and after it."""
        return self._finished.get(call)

    async def _rollout(self, request: RolloutRequest) -> Rollout:
        """One rollout; one that takes longer than its limit is an infrastructure failure."""
        engine, renderer = self._served
        limit = rollout_limit(request, self._rollout_timeout)
        try:
            async with asyncio.timeout(limit) as timer:
                return await run_rollout(
                    request.task, engine, renderer, request.settings, seed=request.seed, rollout_id=request.id
                )
        except TimeoutError as error:  # ours, or one that something inside raised by itself
            why = f"the rollout took longer than {limit:g} s" if timer.expired() else f"something timed out: {error}"
            outcome = Outcome(None, "error", "infrastructure", why)
            return Rollout(request.id, request.task.id, request.seed, request.settings, (), outcome)

    async def load_weights(self, weights: dict[str, Any], version: int) -> None:
        self._served[0].load_weights(weights, version)

    async def weight_sync(self, step: str, *arguments: Any) -> None:
        """One step of a transfer from the trainer's GPU (rl.weight_transfer)."""
        engine: Any = self._served[0]
        engine.weight_sync(step, *arguments)

    async def pid(self) -> int:
        return os.getpid()


def rollout_limit(request: RolloutRequest, rollout_timeout: float) -> float:
    """Seconds that a rollout may take in all: its agent's deadline, and `rollout_timeout` for all else."""
    return rollout_timeout + (request.task.limits.deadline_seconds or 0.0)


class RolloutWorker:
    """The driver's handle on one rollout actor. A dead actor is replaced and gets the weights again."""

    def __init__(
        self,
        serving: Serving,
        *,
        slots: int,
        rollout_timeout: float = 3_600.0,
        seat: Seat = Seat(),  # noqa: B008
    ) -> None:
        """`slots`: rollouts at once; `rollout_timeout`: seconds of one, its task's own deadline not counted."""
        self.slots = slots
        self._rollout_timeout = rollout_timeout
        self._start = lambda: actor(RolloutActor, seat).remote(serving, slots, rollout_timeout)
        self._actor = self._start()
        self._weights: Callable[[], Awaitable[tuple[Any, int]]] | None = None
        self._deaths = 0
        self._replacing = asyncio.Lock()

    def limit(self, request: RolloutRequest) -> float:
        """Seconds after which the actor itself ends the rollout."""
        return rollout_limit(request, self._rollout_timeout)

    async def rollouts(
        self, requests: Sequence[RolloutRequest], on_finished: Callable[[int], None] | None = None
    ) -> list[Rollout]:
        """All requests' rollouts, in the order asked; infrastructure failures are rollouts without reward.

        `on_finished` is told now and then how many are finished (fewer than before, once a dead actor was replaced).

        If the actor dies, all are made again: the seeds are in the requests, so they are the ones that were lost.
        Raises WorkerLost when the actor keeps dying, and what a rollout raises before it starts (WindowTooSmall).
        """
        call = uuid4().hex
        async with watched(lambda: self._actor.finished.remote(call), on_finished):
            rollouts: list[Rollout] = await self._until_answered("rollouts", requests, call)
        return rollouts

    async def rollout(self, request: RolloutRequest) -> Rollout:
        """One attempt of one rollout, beside others. Raises WorkerDied once a dead actor is replaced."""
        rollouts: list[Rollout] = await self._call("rollouts", [request])
        return rollouts[0]

    async def load_weights(self, weights: Any, version: int) -> None:
        """Swaps the policy's weights (an object reference or a state dict) at a step boundary.

        Raises WorkerLost, and EngineError for weights that do not fit or are not finite.
        """
        await self._until_answered("load_weights", weights, version)

        async def loaded() -> tuple[Any, int]:
            return weights, version

        self._weights = loaded

    @property
    def actor(self) -> Any:
        """The process that now does the work, for who hands it weights by itself: see `sent`."""
        return self._actor

    def sent(self, weights: Callable[[], Awaitable[tuple[Any, int]]]) -> None:
        """The actor has weights that did not come through `load_weights`; a replacement asks `weights` for them."""
        self._weights = weights

    async def pid(self) -> int:
        return int(await self._until_answered("pid"))

    async def replace(self, why: str) -> None:
        """Ends the actor, whatever it is doing, and starts another with the weights last loaded."""
        await self._replace(self._actor, why)

    def stop(self) -> None:
        ray.kill(self._actor)

    async def _until_answered(self, method: str, *arguments: Any) -> Any:
        while True:
            with suppress(WorkerDied):
                return await self._call(method, *arguments)

    async def _call(self, method: str, *arguments: Any) -> Any:
        asked = self._actor
        try:
            result = await result_of(getattr(asked, method).remote(*arguments))
        except PROCESS_DIED as error:
            why = type(error).__name__
            await self._replace(asked, why)
            raise WorkerDied(f"the rollout worker died ({why})") from error
        self._deaths = 0
        return result

    async def _replace(self, dead: Any, why: str) -> None:
        """A new actor that has the weights last loaded; of several calls that found it dead, the first makes it."""
        async with self._replacing:
            while self._actor is dead:
                self._deaths += 1
                if self._deaths >= MAX_DEATHS:
                    self._deaths = 0  # another call, of the next cell perhaps, starts anew
                    raise WorkerLost(
                        f"the rollout worker died {MAX_DEATHS} times in a row, last by {why}; free memory or lower "
                        "the number of rollouts at once"
                    )
                logger.warning("rollout worker died (%s); replacing it", why)
                with suppress(Exception):  # one that merely does not answer must not go on beside the new one
                    ray.kill(dead)
                fresh = self._start()
                try:
                    if self._weights is not None:
                        await result_of(fresh.load_weights.remote(*await self._weights()))
                    self._actor = fresh
                except PROCESS_DIED as error:
                    dead = self._actor = fresh
                    why = type(error).__name__
                except BaseException:  # it must not serve the weights that it started with
                    ray.kill(fresh)
                    raise


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint held beside the trainer."""

    step: int
    state: dict[str, Any]
    rollouts: list[Rollout]
    """Finished, not yet trained"""


@dataclass(frozen=True)
class Transfer:
    """Weights go from GPU to GPU."""

    backend: str
    """vLLM's name: nccl, ipc"""
    ranks: int
    """GPUs of one replica"""


class TrainerActor:
    """The trainer in a process of its own; like the rollout actor it loads in the first call."""

    def __init__(self, checkpoint: str, settings: TrainerSettings, transfer: Transfer | None = None) -> None:
        one_thread()
        self._checkpoint, self._settings, self._transfer = checkpoint, settings, transfer

    @cached_property
    def _trainer(self) -> Trainer:
        torch.manual_seed(0)  # a new process starts with random state, which checkpoints would then hold
        return Trainer(self._checkpoint, self._settings)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._trainer, method)(*arguments)

    @cached_property
    def _sender(self) -> WeightSender:
        assert self._transfer is not None
        return WeightSender(self._transfer.backend, self._trainer.stored_weights, self._transfer.ranks)

    def send_weights(self, actors: Sequence[Any]) -> int:
        """The policy to rollout actors, GPU to GPU; returns its version. Raises WorkerLost where one of them died."""
        try:
            self._sender.send(actors, self._trainer.version)
        except PROCESS_DIED as error:
            raise WorkerLost(f"a replica died while weights were sent ({type(error).__name__})") from error
        return self._trainer.version

    def version(self) -> int:
        return self._trainer.version

    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._trainer.save(Path(folder))

    def checkpoint(self, root: str, step: int, state: dict[str, Any], rollouts: Sequence[Rollout]) -> None:
        with new_checkpoint(Path(root), step, state) as folder:
            self._trainer.save(folder)
            write_rollouts(folder / ROLLOUTS, rollouts)

    def resume(self, root: str) -> Resumed | None:
        folder = latest_checkpoint(Path(root))
        if folder is None:
            return None
        try:
            found = load_checkpoint(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Delete {folder} to go on from the one before it") from error
        self._trainer.load(folder)
        return Resumed(found.step, found.state, read_rollouts(folder / ROLLOUTS))

    def pid(self) -> int:
        return os.getpid()


class TrainerHandle:
    """The driver's handle on the trainer actor: `rl.trainer.Trainer`'s methods as coroutines, and checkpoints.

    Every method raises WorkerLost when the actor has died (its state is in the last checkpoint), and what the trainer
    itself raises: TrainingDiverged, CheckpointError, CheckpointNotFound.
    """

    def __init__(
        self,
        checkpoint: Path,
        settings: TrainerSettings,
        seat: Seat = Seat(),  # noqa: B008
        transfer: Transfer | None = None,
    ) -> None:
        self._transfer = transfer
        self._actor = actor(TrainerActor, seat).remote(str(checkpoint), settings, transfer)

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
        return self._actor.call.remote("weights"), await self.version()

    @property
    def transfers(self) -> bool:
        """Whether `send_weights` is how weights go out."""
        return self._transfer is not None

    async def send_weights(self, workers: Sequence[RolloutWorker]) -> int:
        """The policy to all workers at once, GPU to GPU; returns its version. Raises WorkerLost where that fails."""
        sending = self._actor.send_weights.remote([worker.actor for worker in workers])
        try:
            async with asyncio.timeout(SEND_SECONDS):
                version = int(await self._await(sending))
        except TimeoutError as error:  # a replica that died inside NCCL never answers, and the trainer waits for it
            self.stop()
            raise WorkerLost(f"weights did not reach the replicas within {SEND_SECONDS:g} s") from error
        for worker in workers:
            worker.sent(self.weights)
        return version

    async def load(self, folder: Path) -> None:
        await self._await(self._actor.call.remote("load", folder))

    async def save(self, folder: Path) -> None:
        """Policy, critic, optimisers and RNG into `folder`."""
        await self._await(self._actor.save.remote(str(folder)))

    async def save_policy(self, folder: Path) -> None:
        await self._await(self._actor.call.remote("save_policy", folder))

    async def version(self) -> int:
        """Policy updates made so far."""
        return int(await self._await(self._actor.version.remote()))

    async def checkpoint(self, root: Path, step: int, state: dict[str, Any], rollouts: Sequence[Rollout]) -> None:
        """A checkpoint below `root`, atomically; the last two are kept. `rollouts` wait to be trained."""
        await self._await(self._actor.checkpoint.remote(str(root), step, state, rollouts))

    async def resume(self, root: Path) -> Resumed | None:
        """Restores the newest checkpoint below `root`; None where there is none."""
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
