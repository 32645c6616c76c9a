"""The asynchronous loop: against the synchronous one on the tiny preset, and against group-wise waiting where
environments are uneven.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_async [--part all|tiny|uneven] [--pairs 3] [--checkpoint FOLDER]

`tiny`: both loops take the same steps with one rollout process and one trainer process; learning rates are 0, so both
sample the same tokens. The asynchronous loop may take at most 1.05 times as long.

`uneven`: a scripted engine, environments that sleep, numbers of turns from a heavy-tailed distribution, 64 in flight, a
trainer that sleeps. The loop may take at most 15 % longer than max(total rollout time / slots, total train time), and
waiting for groups of 8 must take at least 1.5 times as long as it. What is trained must be what was started.
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
from typing import Any

import numpy as np

from compaction.rollout import Rollout
from flows.experiment import load_experiment
from rl.async_ppo import AsyncPPO
from rl.learner import Learner
from rl.ppo import PPO
from rl.remote import one_thread
from rl.requests import RequestStream
from rl.serving import TorchServing
from rl.settings import PPOSettings
from rl.workers import RolloutWorker, TrainerHandle
from tasks.cluster import Cluster
from tasks.wiring import longest_sequence, training_tasks
from tests.benchmarks.bench_step import short_sft
from tests.rl.scripted import HeavyTail, ScriptedServing, SleepingTrainer, scripted_agent
from tests.rl.small import LocalWorker, make_checkpoint

TINY_STEPS = 20
TINY_BAR = 1.05
SLOTS = 64
GROUP = 8
COMMAND_SECONDS = 0.05
BATCHES = 50
TRAIN_SECONDS = 0.5
BOUND_BAR = 1.15
GROUPS_BAR = 1.5


# The tiny preset ----------------------------------------------------------------------------------------------------


async def tiny_loop(checkpoint: Path, max_staleness: int) -> tuple[float, int]:
    """(seconds, sampled tokens) of TINY_STEPS steps after one that loads everything."""
    training = load_experiment("tiny").training("compactionrl", 0)
    ppo = training.ppo.model_copy(update={"steps": TINY_STEPS + 1, "max_staleness": max_staleness})
    settings = training.trainer.model_copy(update={"policy_lr": 0.0, "critic_lr": 0.0})
    tasks = training_tasks(training.world, 1, (ppo.steps + 1) * ppo.batch_size)
    stream = RequestStream(tasks, training.agent, 0, "ppo", ppo.batch_size, ppo.group_size)
    slots = training.loop.slots
    worker = RolloutWorker(TorchServing(checkpoint, slots, longest_sequence(training.agent)), slots=slots)
    trainer = TrainerHandle(checkpoint, settings)
    loop = (AsyncPPO if max_staleness else PPO)(ppo, stream, [worker], Learner(ppo, trainer))
    tokens, began = 0, 0.0
    async for result in loop.run(0):
        if result.step == 0:
            began = time.perf_counter()
        else:
            tokens += int(result.metrics["rollout/tokens"])
    seconds = time.perf_counter() - began
    worker.stop()
    trainer.stop()
    return seconds, tokens


def compare_tiny(checkpoint: Path, pairs: int) -> bool:
    print(f"\ntiny: {TINY_STEPS} steps, one rollout process, one trainer process")
    cluster = Cluster(None, "bench-async", checkpoint)
    ratios = []
    try:
        cluster.ensure()
        for pair in range(1, pairs + 1):
            sync, sync_tokens = asyncio.run(tiny_loop(checkpoint, 0))
            fast, tokens = asyncio.run(tiny_loop(checkpoint, 1))
            ratios.append(fast / sync)
            print(
                f"  pair {pair}: synchronous {sync:6.1f} s, {sync_tokens} tokens   "
                f"asynchronous {fast:6.1f} s, {tokens} tokens   ratio {ratios[-1]:.2f}",
                flush=True,
            )
    finally:
        cluster.close()
    median = statistics.median(ratios)
    print(f"  the asynchronous loop takes {median:.2f} times as long (median); at most {TINY_BAR} is asked for")
    return median <= TINY_BAR


# Uneven environments ------------------------------------------------------------------------------------------------


def uneven_settings() -> PPOSettings:
    return PPOSettings(steps=BATCHES, batch_size=SLOTS, max_staleness=4)


async def uneven_loop(checkpoint: Path, tail: HeavyTail) -> tuple[float, float, list[Rollout]]:
    """(wall seconds, mean of in-flight rollouts' seconds, trained rollouts)."""
    settings = uneven_settings()
    stream = RequestStream(tail.source(COMMAND_SECONDS), scripted_agent(checkpoint), 0, "ppo", SLOTS, 1)
    worker = LocalWorker(ScriptedServing(checkpoint), SLOTS)
    learner: Any = Learner(settings, SleepingTrainer(TRAIN_SECONDS))  # type: ignore[arg-type]
    loop = AsyncPPO(settings, stream, [worker], learner)  # type: ignore[list-item]
    began = time.perf_counter()
    trained = [rollout async for result in loop.run() for rollout in result.rollouts]
    wall = time.perf_counter() - began
    return wall, sum(sum(r.seconds.values()) for r in trained), trained


async def groupwise_loop(checkpoint: Path, tail: HeavyTail) -> float:
    """The same rollouts in groups of GROUP: a group's slots wait for its longest rollout."""
    stream = RequestStream(tail.source(COMMAND_SECONDS), scripted_agent(checkpoint), 0, "ppo", SLOTS, 1)
    worker = LocalWorker(ScriptedServing(checkpoint), SLOTS)
    groups = iter([stream.batch(step)[i : i + GROUP] for step in range(BATCHES) for i in range(0, SLOTS, GROUP)])

    async def lane() -> None:
        for group in groups:
            await asyncio.gather(*(worker.rollout(request) for request in group))

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(SLOTS // GROUP)))
    return time.perf_counter() - began


def compare_uneven(checkpoint: Path, pairs: int) -> bool:
    tail = HeavyTail()
    turns = np.array([tail.turns(i) for i in range(BATCHES * SLOTS)])
    print(
        f"\nuneven: {len(turns)} rollouts, {SLOTS} in flight, turns: median {np.median(turns):.0f}, "
        f"mean {turns.mean():.1f}, most {turns.max()}; {COMMAND_SECONDS} s a command, {TRAIN_SECONDS} s an update"
    )
    overheads, gains = [], []
    for pair in range(1, pairs + 1):
        wall, spent, trained = asyncio.run(uneven_loop(checkpoint, tail))
        waiting = asyncio.run(groupwise_loop(checkpoint, tail))
        bound = max(spent / SLOTS, BATCHES * TRAIN_SECONDS)
        overheads.append(wall / bound)
        gains.append(waiting / wall)
        assert sorted(r.task_id for r in trained) == sorted(f"t{i}" for i in range(len(turns))), "a rollout was lost"
        compactions = np.mean([r.n_compactions for r in trained])
        print(
            f"  pair {pair}: asynchronous {wall:5.1f} s, {overheads[-1]:.2f} × the bound of {bound:.1f} s   "
            f"group-wise {waiting:5.1f} s, {gains[-1]:.2f} ×   all {len(trained)} started rollouts trained, "
            f"{compactions:.2f} compactions each",
            flush=True,
        )
    overhead, gain = statistics.median(overheads), statistics.median(gains)
    print(
        f"  medians: {overhead:.2f} × the bound (at most {BOUND_BAR}), group-wise {gain:.2f} × (at least {GROUPS_BAR})"
    )
    return overhead <= BOUND_BAR and gain >= GROUPS_BAR


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The asynchronous loop, in alternating pairs.")
    parser.add_argument("--part", choices=("all", "tiny", "uneven"), default="all")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of each part")
    parser.add_argument("--checkpoint", type=Path, help="policy of the tiny part; default: a short SFT makes one")
    arguments = parser.parse_args(argv)
    one_thread()
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        if arguments.part != "tiny":
            passed &= compare_uneven(make_checkpoint(Path(folder) / "small"), arguments.pairs)
        if arguments.part != "uneven":
            checkpoint = arguments.checkpoint or short_sft(Path(folder) / "sft", load_experiment("tiny"))
            passed &= compare_tiny(checkpoint, arguments.pairs)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
