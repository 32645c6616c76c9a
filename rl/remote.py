"""Work in processes of Ray, and its answers: a result, the error raised there, or the news that the process died.

Imports no torch: a driver that only waits for others does not need it.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError, WorkerCrashedError

PROCESS_DIED = (ActorDiedError, ActorUnavailableError, OutOfMemoryError, WorkerCrashedError)


def actor(cls: type) -> Any:
    """`cls` as a Ray actor. It claims no CPU: the flow bounds what runs side by side."""
    return ray.remote(num_cpus=0, max_restarts=0)(cls)


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


def one_thread() -> None:
    """One maths thread per process: processes bring the parallelism, spinning threads take it away."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
