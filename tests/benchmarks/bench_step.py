"""Share of a synchronous PPO step inside the model: engine, forward, backward, optimiser. The bar is 70 %.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_step [--checkpoint FOLDER] [--steps 5]

The steps are the tiny preset's (batch 64, window 128) on a local Ray cluster, through the handles that training uses;
only the two actors carry timers. Without a checkpoint a short SFT makes one first: a policy with random weights would
make rollouts unlike any that training sees. Exits with 1 below the bar.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from flows.experiment import Experiment, load_experiment
from rl import workers
from rl.learner import Learner
from rl.ppo import PPO
from rl.remote import one_thread
from rl.requests import RequestStream
from rl.serving import TorchServing
from rl.workers import RolloutWorker, TrainerHandle
from tasks.cluster import Cluster
from tasks.ppo import Training
from tasks.warmstart import WarmstartSettings, warmstart
from tasks.wiring import longest_sequence, training_tasks
from tests.benchmarks.metered_actors import MeteredRolloutActor, MeteredTrainerActor
from tests.benchmarks.meters import MODEL, Seconds, now, total

BAR = 0.70
WARM_UP = 1
SFT_PART = 6
"""The policy gets one part in so many of the preset's SFT: enough to act and to compact"""


@dataclass(frozen=True)
class Readings:
    """All clocks at one moment."""

    driver: Seconds
    worker: dict[str, Seconds]
    trainer: dict[str, Seconds]

    def since(self, earlier: Readings) -> Readings:
        def difference(later: dict[str, Seconds], before: dict[str, Seconds]) -> dict[str, Seconds]:
            return {part: seconds - before.get(part, Seconds()) for part, seconds in later.items()}

        return Readings(
            self.driver - earlier.driver,
            difference(self.worker, earlier.worker),
            difference(self.trainer, earlier.trainer),
        )


async def read(worker: RolloutWorker, trainer: TrainerHandle) -> Readings:
    of_worker = await worker._actor.spent.remote()
    of_trainer = await trainer._actor.spent.remote()
    return Readings(now(), of_worker, of_trainer)


def split(step: Readings) -> dict[str, Seconds]:
    """Seconds of a step by part. The three processes take turns, so wall seconds add up to the step's.

    CPU seconds are those of driver, worker and trainer; what they spend outside their calls is Ray's.
    """
    inside = {"engine": step.worker["engine"]} | {part: step.trainer[part] for part in MODEL}
    trainer_model = total({part: step.trainer[part] for part in MODEL})
    parts = inside | {
        "agent loop, environments": step.worker["calls"] - step.worker["engine"],
        "trainer around the model": step.trainer["calls"] - trainer_model,
    }
    cpu = step.driver.cpu + step.worker["process"].cpu + step.trainer["process"].cpu
    return parts | {"driver and Ray": Seconds(step.driver.wall, cpu) - total(parts)}


async def measure(training: Training, checkpoint: Path, steps: int) -> tuple[list[Readings], list[dict[str, float]]]:
    """Clocks of `steps` PPO steps after the warm-up, and their metrics."""
    ppo = training.ppo.model_copy(update={"steps": WARM_UP + steps})
    tasks = training_tasks(training.world, 1, ppo.steps * ppo.batch_size)
    with (
        patch.object(workers, "RolloutActor", MeteredRolloutActor),
        patch.object(workers, "TrainerActor", MeteredTrainerActor),
    ):
        slots = training.loop.slots
        worker = RolloutWorker(TorchServing(checkpoint, slots, longest_sequence(training.agent)), slots=slots)
        trainer = TrainerHandle(checkpoint, training.trainer)
    stream = RequestStream(tasks, training.agent, training.seed, "ppo", ppo.batch_size, ppo.group_size)
    loop = PPO(ppo, stream, [worker], Learner(ppo, trainer))
    for step in range(WARM_UP):
        await loop.step(step)
    readings, metrics = [], []
    for step in range(WARM_UP, ppo.steps):
        before = await read(worker, trainer)
        metrics.append((await loop.step(step)).metrics)
        readings.append((await read(worker, trainer)).since(before))
    worker.stop()
    trainer.stop()
    return readings, metrics


def short_sft(folder: Path, experiment: Experiment) -> Path:
    """A checkpoint from the preset's SFT, cut to a part of its rollouts and steps."""
    settings = shortened(experiment.sft)
    print(f"SFT of {sum(stage.steps for stage in settings.sft.stages)} steps ...", flush=True)
    began = now()
    losses = [metrics["sft/loss"] for _, metrics in warmstart(folder, settings, experiment.world, experiment.agent, 0)]
    print(f"SFT: loss {losses[0]:.2f} to {losses[-1]:.2f} in {now() - began}")
    return folder / "checkpoint"


def shortened(settings: WarmstartSettings) -> WarmstartSettings:
    stages = tuple(stage.model_copy(update={"steps": stage.steps // SFT_PART}) for stage in settings.sft.stages)
    data = tuple(part.model_copy(update={"rollouts": part.rollouts // SFT_PART}) for part in settings.data)
    return settings.model_copy(update={"data": data, "sft": settings.sft.model_copy(update={"stages": stages})})


def report(readings: list[Readings], metrics: list[dict[str, float]]) -> float:
    """Prints the table; returns the share inside the model, in CPU seconds."""
    steps = [split(reading) for reading in readings]
    names = ("rollout/tokens", "rollout/turns", "rollout/compactions", "train/optimized_tokens", "train/reward")
    means = {name: sum(m[name] for m in metrics) / len(metrics) for name in names}
    print(f"means of {len(steps)} steps: " + ", ".join(f"{name} {value:.4g}" for name, value in means.items()))
    parts = {name: sum((step[name] for step in steps), Seconds()) for name in steps[0]}
    inside = total({name: parts[name] for name in ("engine", *MODEL)})
    whole = total(parts)
    print(f"{'part of a step':28}{'wall s':>8}{'share':>7}{'CPU s':>9}{'share':>7}")
    for name, spent in (parts | {"inside the model": inside, "step": whole}).items():
        wall, cpu = spent.wall / len(steps), spent.cpu / len(steps)
        print(f"{name:28}{wall:8.3f}{spent.wall / whole.wall:7.0%}{cpu:9.3f}{spent.cpu / whole.cpu:7.0%}")
    print("inside the model, step by step (CPU): " + ", ".join(f"{share(step):.0%}" for step in steps))
    return share(parts)


def share(parts: dict[str, Seconds]) -> float:
    return total({name: parts[name] for name in ("engine", *MODEL)}).cpu / total(parts).cpu


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Share of a synchronous PPO step inside the model.")
    parser.add_argument("--checkpoint", type=Path, help="policy to start from; default: a short SFT makes one")
    parser.add_argument("--steps", type=int, default=5, help="steps to measure")
    arguments = parser.parse_args(argv)
    one_thread()
    experiment = load_experiment("tiny")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = arguments.checkpoint or short_sft(Path(folder), experiment)
        cluster = Cluster(None, "bench-step", Path(folder))
        try:
            cluster.ensure()
            readings, metrics = asyncio.run(
                measure(experiment.training("compactionrl", 0), checkpoint, arguments.steps)
            )
        finally:
            cluster.close()
    print(f"load {os.getloadavg()[0]:.1f}")
    inside = report(readings, metrics)
    print(f"share inside the model: {inside:.0%} of the step's CPU seconds; at least {BAR:.0%} is asked for")
    return 0 if inside >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
