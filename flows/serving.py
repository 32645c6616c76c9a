"""The process that runs deployments: `python -m flows.serving PRESET CRON LIMIT`, started by `compactionrl serve`.

It registers `reproduce` and `sweep` with the Prefect server at PREFECT_API_URL and runs what is asked for there.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

from prefect.runner import Runner
from prefect.types.entrypoint import EntrypointType

from flows.deployments import reproduce, sweep
from flows.up import READY, SERVED


async def serve(preset: str, cron: str | None, limit: int) -> None:
    """Until SIGTERM: then runs in progress end as Cancelled, and schedules pause until the next time."""
    runner = Runner(name="compactionrl", limit=limit, query_seconds=2)
    for flow in (reproduce, sweep):
        await runner.aadd_deployment(
            await flow.ato_deployment(
                SERVED,
                cron=cron if flow is reproduce else None,
                parameters={"preset": preset},
                description=(flow.description or "").partition("\n")[0],
                tags=["compactionrl"],
                entrypoint_type=EntrypointType.MODULE_PATH,
            )
        )
    serving = asyncio.create_task(runner.start())
    stop = asyncio.Event()
    await asyncio.sleep(0)  # the runner takes SIGTERM for itself, with a handler that blocks the loop it needs
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(READY, flush=True)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        await runner.astop()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(serving, timeout=30)
    serving.result()


if __name__ == "__main__":
    _, preset, cron, limit = sys.argv
    asyncio.run(serve(preset, cron or None, int(limit)))
