"""Sandboxes of task folders: whole trials, many at once, and memory under a flood of output.

    python -m tests.benchmarks.bench_sandboxes [--kinds docker local] [--trials 7]

A trial is start, ten commands, grading, stop; the image is built before. `many` is 16 trials, 4 at a time. `flood` is
one command that prints 200 MB: the driver's peak memory over what it held before. Bars, in seconds: a trial 3 with
Docker and 0.3 without, 16 trials 15; MiB: 16.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from evaluation.environments.bubblewrap import LocalEnvironment
from evaluation.environments.docker import DockerEnvironment
from evaluation.environments.sandbox import Sandbox
from evaluation.settings import SandboxSettings
from tests.docker_engine import DEFAULT_HOST, task_folder

COMMANDS = 10
MANY = 16
AT_ONCE = 4
TRIAL_BARS = {"docker": 3.0, "local": 0.3}
MANY_BAR = 15.0
FLOOD_BAR = 16.0
KINDS: dict[str, type[Sandbox]] = {"docker": DockerEnvironment, "local": LocalEnvironment}
FILES = {
    "environment/Dockerfile": "FROM local/debian\nWORKDIR /app\n",
    "tests/test.sh": f"[ $(cat n) = {COMMANDS} ] && echo 1 >/logs/verifier/reward.txt\n",
}


async def trial(make: Callable[[], Sandbox]) -> dict[str, float]:
    """Seconds by part. Raises AssertionError where the reward is not 1."""
    sandbox = make()
    spent: dict[str, float] = {}
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        spent[name] = time.perf_counter() - began
        began = time.perf_counter()

    try:
        await sandbox.start()
        lap("start")
        for number in range(1, COMMANDS + 1):
            await sandbox.execute(f"echo {number} >n")
        lap("commands")
        assert await sandbox.grade() == 1
        lap("grade")
    finally:
        await sandbox.stop()
    lap("stop")
    return spent


async def many(make: Callable[[], Sandbox]) -> float:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with slots:
            await trial(make)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(MANY)))
    return time.perf_counter() - began


async def flood(make: Callable[[], Sandbox]) -> tuple[float, float]:
    """(seconds, MiB) of a command that prints 200 MB."""
    sandbox = make()
    try:
        await sandbox.start()
        await sandbox.execute("head -c 1000000 /dev/zero")
        before, began = peak_mib(), time.perf_counter()
        execution = await sandbox.execute("head -c 200000000 /dev/zero | tr '\\0' x")
        assert "199,970,000 bytes cut" in execution.output, execution.output[-200:]
        return time.perf_counter() - began, peak_mib() - before
    finally:
        await sandbox.stop()


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(kind: str, trials: int, place: Path) -> bool:
    folder = task_folder(place, FILES)

    def make() -> Sandbox:
        return KINDS[kind](folder, SandboxSettings(), None)

    asyncio.run(trial(make))
    laps = [asyncio.run(trial(make)) for _ in range(trials)]
    parts = {name: statistics.median(lap[name] for lap in laps) for name in laps[0]}
    whole = statistics.median(sum(lap.values()) for lap in laps)
    seconds = asyncio.run(many(make))
    flood_seconds, flood_mib = asyncio.run(flood(make))
    shown = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
    print(f"{kind}: trial {whole:.2f} s (medians of {trials}: {shown})")
    print(f"{kind}: {MANY} trials, {AT_ONCE} at a time: {seconds:.1f} s")
    print(f"{kind}: 200 MB of output: {flood_seconds:.2f} s, {flood_mib:.1f} MiB more memory")
    return whole <= TRIAL_BARS[kind] and seconds <= MANY_BAR and flood_mib <= FLOOD_BAR


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Trials in Docker and bubblewrap sandboxes.")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--trials", type=int, default=7, help="trials that the medians are of")
    options = parser.parse_args(argv)
    os.environ.setdefault("DOCKER_HOST", DEFAULT_HOST)
    with tempfile.TemporaryDirectory() as place:
        met = [measure(kind, options.trials, Path(place)) for kind in options.kinds]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
