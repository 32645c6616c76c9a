"""A job of real size opened again: how long until it knows that nothing is left to do.

    python -m tests.benchmarks.bench_jobs [--trials 2000]

`load` reads the results of finished trials, `resume` is the whole of opening the job again: settings, results, progress
and the job's result written anew. Bar: a resume of 2,000 trials in 2 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from compaction.agent import run_rollout
from compaction.engines.scripted import ScriptedEngine
from compaction.rendering import ChatTemplateRenderer
from compaction.rollout import Rollout
from evaluation.grid import Cell
from evaluation.job import Job, JobOutcome, Trial
from tests.compaction.parts import FilesTask, make_tokenizer, replies, small_settings

TRIALS = 2_000
REPEATS = 4
BAR = 2.0
RUNS = 3
CELL = Cell("scripted", 0, 160, 2, 1)


def make_job(folder: Path, trials: int) -> Job:
    chosen = [
        Trial(CELL.trial_key("set", f"task-{n // REPEATS}", n % REPEATS), FilesTask(id=f"task-{n // REPEATS}"), 0, "c")
        for n in range(trials)
    ]
    return Job(folder, {"agent": small_settings().model_dump(mode="json")}, chosen, concurrency=64, attempts=1)


def run(job: Job) -> tuple[JobOutcome, int]:
    """(what came out, trials that were attempted)."""
    renderer = ChatTemplateRenderer(make_tokenizer())
    attempted = 0

    async def attempt(trial: Trial, evidence: Path) -> Rollout:
        nonlocal attempted
        attempted += 1
        engine = ScriptedEngine(replies(["echo 42 > answer"]), renderer)
        return await run_rollout(trial.task, engine, renderer, small_settings(), seed=0, rollout_id=evidence.name)

    return asyncio.run(job.run(attempt, lambda progress: None)), attempted


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Loading and resuming a finished job.")
    parser.add_argument("--trials", type=int, default=TRIALS)
    trials = parser.parse_args(argv).trials
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        first, attempted = run(make_job(Path(place), trials))
        print(f"{trials:,} trials run and kept: {time.perf_counter() - began:.1f} s")
        assert first.complete
        assert attempted == trials
        loads, resumes = [], []
        for _ in range(RUNS):
            job = make_job(Path(place), trials)
            began = time.perf_counter()
            assert len(job.finished()) == trials
            loads.append(time.perf_counter() - began)
            began = time.perf_counter()
            again, attempted = run(job)
            resumes.append(time.perf_counter() - began)
            assert again == first
            assert attempted == 0
    load, resume = statistics.median(loads), statistics.median(resumes)
    print(f"load {load:.2f} s, resume {resume:.2f} s (medians of {RUNS})")
    return 0 if resume <= BAR * trials / TRIALS else 1


if __name__ == "__main__":
    sys.exit(main())
