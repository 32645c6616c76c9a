"""All benchmarks, one after the other in one run: `OMP_NUM_THREADS=1 python -m tests.benchmarks`.

Exits with 1 where one of them fails its bar. Each can be run alone, with options of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks import (
    bench_async,
    bench_engine,
    bench_jobs,
    bench_memory,
    bench_rollouts,
    bench_sandboxes,
    bench_step,
    bench_update,
)

BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {
    "engine": bench_engine.main,
    "rollouts": bench_rollouts.main,
    "update": bench_update.main,
    "memory": bench_memory.main,
    "step": bench_step.main,
    "async": bench_async.main,
    "sandboxes": bench_sandboxes.main,
    "jobs": bench_jobs.main,
}
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "ray")


def machine() -> str:
    """Processor, cores and the versions that the figures depend on."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"{processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}"


def processor() -> str:
    """The processor's name where Linux gives one, else its architecture."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def load() -> str:
    """Processes that wanted a core, on average over 1, 5 and 15 minutes."""
    return "load " + ", ".join(f"{average:.1f}" for average in os.getloadavg())


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Runs all benchmarks.").parse_args()
    print(machine())
    failed = []
    for name, benchmark in BENCHMARKS.items():
        print(f"\n== {name} == ({load()})", flush=True)
        if benchmark([]):
            failed.append(name)
    print(f"\n{load()}; " + (f"below the bar: {', '.join(failed)}" if failed else "all bars met"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
