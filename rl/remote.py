"""Work in processes of Ray, and its answers: a result, the error raised there, or the news that the process died.

Imports no torch: a driver that only waits for others does not need it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError, WorkerCrashedError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl.errors import NotEnoughGpus

WATCH_SECONDS = 5.0
"""Between two looks at how far a call is"""

logger = logging.getLogger(__name__)
PROCESS_DIED = (ActorDiedError, ActorUnavailableError, OutOfMemoryError, WorkerCrashedError)


@dataclass(frozen=True)
class Seat:
    """Where an actor runs: its part of a placement group. Without one it claims no GPU."""

    group: Any = None
    place: int = 0
    gpus: float = 0.0

    def options(self) -> dict[str, Any]:
        """What Ray is told of it."""
        if self.group is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.place)
        return {"num_gpus": self.gpus, "scheduling_strategy": strategy}


def actor(cls: type, seat: Seat = Seat()) -> Any:
    """`cls` as a Ray actor. It claims no CPU: the flow bounds what runs side by side."""
    return ray.remote(num_cpus=0, max_restarts=0, **seat.options())(cls)


def cluster_gpus() -> float:
    return float(ray.cluster_resources().get("GPU", 0.0))


@asynccontextmanager
async def seated(gpus: Sequence[float]) -> AsyncIterator[list[Seat]]:
    """Seats for actors that work together, with that many GPUs each: all are free at once, or the wait goes on.

    In a cluster without GPUs nobody claims any. Raises NotEnoughGpus where the cluster could never hold them.
    """
    there, needed = cluster_gpus(), sum(gpus)
    if there == 0 or needed == 0:
        yield [Seat() for _ in gpus]
        return
    if needed > there:
        raise NotEnoughGpus(
            f"{needed:g} GPUs are needed ({' + '.join(f'{n:g}' for n in gpus)}), the cluster has {there:g}: lower "
            "loop.workers, loop.trainer_gpus or loop.vllm.gpu_share"
        )
    claimed = [number for number, n in enumerate(gpus) if n > 0]
    group = placement_group([{"GPU": gpus[number]} for number in claimed], strategy="PACK")
    try:
        await group.ready()
        yield [Seat(group, claimed.index(number), n) if number in claimed else Seat() for number, n in enumerate(gpus)]
    finally:
        remove_placement_group(group)


async def result_of(reference: Any) -> Any:
    """The result behind a reference.

    What the remote code raised is raised as it was, with its own message; Ray would put the remote traceback into the
    message, which stays readable as the error's cause. Raises one of PROCESS_DIED where the process is gone.
    """
    try:
        return await reference
    except RayTaskError as error:
        cause: Any = error
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        raise cause from error


@asynccontextmanager
async def watched(ask: Callable[[], Any], tell: Callable[[Any], None] | None) -> AsyncIterator[None]:
    """Inside, `tell` gets every few seconds what the call that `ask` makes answers, unless that is None; nothing while
    its process is dead. No `tell`: nobody wants to know."""

    async def watch(tell: Callable[[Any], None]) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                if (said := await result_of(ask())) is not None:
                    tell(said)
            except PROCESS_DIED:
                continue
            except Exception as error:
                logger.warning("no more progress of this call (%s: %s)", type(error).__name__, error)
                return

    watching = None if tell is None else asyncio.create_task(watch(tell))
    try:
        yield
    finally:
        if watching is not None:
            watching.cancel()


def one_thread() -> None:
    """One maths thread per process: processes bring the parallelism, spinning threads take it away."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
