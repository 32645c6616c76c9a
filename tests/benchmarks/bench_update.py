"""The update: optimized tokens per second, shared rows against separate rows, where the time goes, and TRL's beside it.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_update [--part all|layouts|trainers]
        [--trl PYTHON] [--modes MODE ...] [--checkpoint FOLDER] [--rollouts 4]

`layouts`: one update is what a PPO step does after its rollouts: values, two critic updates, one policy update, here on
64 seeded rollouts shaped like the embedded default's (about 190 windows, 19,000 tokens) and a model of its size. Both
layouts run in turn in one process; medians are printed side by side. Exits with 1 where the two layouts disagree.

`trainers`: one policy step beside TRL's, where --trl names an interpreter that has it; see trl_trainers.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from compaction.rollout import Outcome, Rollout, Segment
from compaction.settings import AgentSettings
from rl.advantages import AdvantageSettings, batch_advantages
from rl.rows import Row, gather_segments, rows_of, scatter_segments
from rl.settings import TrainerSettings
from rl.trainer import Trainer
from tests.benchmarks.meters import MODEL, Seconds, conditions, median, model_meter, now, timed, total
from tests.benchmarks.models import llama_checkpoint
from tests.benchmarks.trl_trainers import TRL_MODES, compare_trainers

ROUNDS = 7
VOCABULARY = 768


def segment(rng: np.random.Generator, ordinal: int, turns: int, scale: int) -> Segment:
    """An execution segment of turns (3 sampled, 9 observed tokens), or a summary of 9 tokens after 5 of instruction;
    all `scale` times as long."""
    summary = ordinal % 2 == 1
    mask = [True] * 9 if summary else ([True] * 3 + [False] * 9) * turns
    optimized = np.repeat(np.array(mask, dtype=bool), scale)
    n = len(optimized)
    context = scale * (5 if summary else int(rng.integers(12, 50)))
    return Segment(
        "summary" if summary else "execution",
        ordinal,
        rng.integers(0, VOCABULARY, context).astype(np.int32),
        rng.integers(0, VOCABULARY, n).astype(np.int32),
        optimized,
        np.where(optimized, -rng.uniform(0.1, 3.0, n), 0).astype(np.float32),
        np.where(optimized, 0, -1).astype(np.int32),
    )


def rollout(rng: np.random.Generator, name: str, scale: int = 1) -> Rollout:
    compactions = int(rng.integers(0, 5))
    segments = tuple(segment(rng, i, int(rng.integers(3, 7)), scale) for i in range(2 * compactions + 1))
    return Rollout(name, name, 0, AgentSettings(), segments, Outcome(float(rng.integers(0, 2)), "finished"))


def checkpoint(folder: Path) -> Path:
    """The embedded model's sizes."""
    return llama_checkpoint(folder, vocabulary=VOCABULARY, width=64, layers=2, heads=2, feed_forward=160)


def update(trainer: Trainer, rows: list[Row], rollouts: list[Rollout]) -> tuple[np.ndarray, dict[str, float]]:
    """What a PPO step does after its rollouts: (advantages in order of segments, metrics)."""
    values = gather_segments(rows, trainer.values(rows))
    rewards = {r.id: float(r.outcome.reward or 0.0) for r in rollouts}
    settings = AdvantageSettings()
    advantages = batch_advantages(list(values.values()), [rewards[name] for name in values], settings)
    per_row = scatter_segments(rows, dict(zip(values, advantages, strict=True)))
    metrics = trainer.update_critic(rows, [np.full(row.n_optimized, rewards[row.rollout_id]) for row in rows])
    metrics |= trainer.update_policy(rows, per_row)
    return np.concatenate([a for segments in advantages for a in segments]), metrics


def compare_layouts() -> bool:
    rng = np.random.default_rng(0)
    rollouts = [rollout(rng, f"r{i}") for i in range(64)]
    layouts = {
        name: [row for r in rollouts for row in rows_of(r, share_prefix=share)]
        for name, share in (("shared rows", True), ("separate rows", False))
    }
    seconds: dict[str, list[Seconds]] = {name: [] for name in layouts}
    first: dict[str, tuple[np.ndarray, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = checkpoint(Path(folder))
        trainers = {name: Trainer(source, TrainerSettings(policy_lr=1e-3, critic_lr=1e-3)) for name in layouts}
        for trainer in trainers.values():
            trainer.critic.head.weight.data.fill_(0.05)
        for name, rows in layouts.items():
            first[name] = update(trainers[name], rows, rollouts)
        for _ in range(ROUNDS):
            for name, rows in layouts.items():
                seconds[name].append(timed(partial(update, trainers[name], rows, rollouts)))
        with model_meter(trainers["shared rows"]) as meter:
            began = now()
            update(trainers["shared rows"], layouts["shared rows"], rollouts)
            whole = now() - began

    optimized = sum(row.n_optimized for row in layouts["shared rows"])
    print(f"{len(rollouts)} rollouts, {optimized} optimized tokens; values + 2 critic updates + 1 policy update")
    print(f"{'':15}{'rows':>8}{'forward tokens':>16}{'wall s':>9}{'CPU s':>9}{'optimized tokens/s of CPU':>28}")
    for name, rows in layouts.items():
        middle = median(seconds[name])
        tokens = sum(len(row.token_ids) for row in rows)
        print(
            f"{name:15}{len(rows):>8}{tokens:>16}{middle.wall:>9.3f}{middle.cpu:>9.3f}{optimized / middle.cpu:>28.0f}"
        )
    shares = ", ".join(f"{part} {meter.spent[part].cpu / whole.cpu:.0%}" for part in MODEL)
    print(f"share of the update's CPU time inside the model: {total(meter.spent).cpu / whole.cpu:.0%} ({shares})")
    return same(*first.values())


def same(a: tuple[np.ndarray, dict[str, float]], b: tuple[np.ndarray, dict[str, float]]) -> bool:
    worst = float(np.abs(a[0] - b[0]).max())
    names = ("train/loss", "train/grad_norm", "critic/loss", "critic/explained_variance")
    agree = worst < 1e-5 and all(np.isclose(a[1][n], b[1][n], rtol=1e-3, atol=1e-5) for n in names)
    print(
        f"first update, shared against separate: advantages differ by at most {worst:.1e}; "
        + ("agree" if agree else "DISAGREE")
    )
    return agree


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The update: layouts of rows, and other trainers.")
    parser.add_argument("--part", choices=("all", "layouts", "trainers"), default="all")
    parser.add_argument("--trl", help="Python interpreter of an environment with TRL")
    parser.add_argument("--modes", nargs="+", choices=TRL_MODES, default=TRL_MODES, help="TRL's, a process each")
    parser.add_argument("--checkpoint", type=Path, help="model of the trainers, in its own dtype; default: a small one")
    parser.add_argument("--rollouts", type=int, default=4, help="rollouts in one step of the trainers")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(conditions())
    passed = arguments.part == "trainers" or compare_layouts()
    if arguments.part != "layouts":
        rng = np.random.default_rng(0)
        rows = [row for i in range(arguments.rollouts) for row in rows_of(rollout(rng, f"r{i}", scale=2))]
        passed &= compare_trainers(rows, arguments.checkpoint, arguments.trl, arguments.modes)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
