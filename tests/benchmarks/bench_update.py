"""The update: optimized tokens per second, shared rows against separate rows, and where the time goes.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_update

One update is what a PPO step does after its rollouts: values, two critic updates, one policy update, here on 64 seeded
rollouts shaped like the embedded default's (about 190 windows, 19,000 tokens) and a model of its size. Both layouts run
in turn in one process; medians are printed side by side. Exits with 1 where the two layouts disagree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compaction.rollout import Outcome, Rollout, Segment
from compaction.settings import AgentSettings
from rl.advantages import AdvantageSettings, batch_advantages
from rl.rows import Row, gather_segments, rows_of, scatter_segments
from rl.settings import TrainerSettings
from rl.trainer import Trainer
from tests.benchmarks.meters import MODEL, Seconds, model_meter, now, total

ROUNDS = 7
VOCABULARY = 768


def segment(rng: np.random.Generator, ordinal: int, turns: int) -> Segment:
    """An execution segment of turns (3 sampled, 9 observed tokens), or a summary of 9 tokens after 5 of instruction."""
    summary = ordinal % 2 == 1
    mask = [True] * 9 if summary else ([True] * 3 + [False] * 9) * turns
    optimized = np.array(mask, dtype=bool)
    n = len(optimized)
    context = 5 if summary else int(rng.integers(12, 50))
    return Segment(
        "summary" if summary else "execution",
        ordinal,
        rng.integers(0, VOCABULARY, context).astype(np.int32),
        rng.integers(0, VOCABULARY, n).astype(np.int32),
        optimized,
        np.where(optimized, -rng.uniform(0.1, 3.0, n), 0).astype(np.float32),
        np.where(optimized, 0, -1).astype(np.int32),
    )


def rollout(rng: np.random.Generator, name: str) -> Rollout:
    compactions = int(rng.integers(0, 5))
    segments = tuple(segment(rng, i, int(rng.integers(3, 7))) for i in range(2 * compactions + 1))
    return Rollout(name, name, 0, AgentSettings(), segments, Outcome(float(rng.integers(0, 2)), "finished"))


def checkpoint(folder: Path) -> Path:
    """Two layers of width 64, two heads of 32: the embedded model's sizes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


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


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description="The update, shared rows against separate rows.").parse_args(argv)
    torch.set_num_threads(1)
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
                began = now()
                update(trainers[name], rows, rollouts)
                seconds[name].append(now() - began)
        with model_meter(trainers["shared rows"]) as meter:
            began = now()
            update(trainers["shared rows"], layouts["shared rows"], rollouts)
            whole = now() - began

    optimized = sum(row.n_optimized for row in layouts["shared rows"])
    print(f"{len(rollouts)} rollouts, {optimized} optimized tokens; values + 2 critic updates + 1 policy update")
    print(f"{'':15}{'rows':>8}{'forward tokens':>16}{'wall s':>9}{'CPU s':>9}{'optimized tokens/s of CPU':>28}")
    for name, rows in layouts.items():
        wall, cpu = (statistics.median(getattr(s, clock) for s in seconds[name]) for clock in ("wall", "cpu"))
        tokens = sum(len(row.token_ids) for row in rows)
        print(f"{name:15}{len(rows):>8}{tokens:>16}{wall:>9.3f}{cpu:>9.3f}{optimized / cpu:>28.0f}")
    shares = ", ".join(f"{part} {meter.spent[part].cpu / whole.cpu:.0%}" for part in MODEL)
    print(f"share of the update's CPU time inside the model: {total(meter.spent).cpu / whole.cpu:.0%} ({shares})")
    return 0 if same(*first.values()) else 1


def same(a: tuple[np.ndarray, dict[str, float]], b: tuple[np.ndarray, dict[str, float]]) -> bool:
    worst = float(np.abs(a[0] - b[0]).max())
    names = ("train/loss", "train/grad_norm", "critic/loss", "critic/explained_variance")
    agree = worst < 1e-5 and all(np.isclose(a[1][n], b[1][n], rtol=1e-3, atol=1e-5) for n in names)
    print(
        f"first update, shared against separate: advantages differ by at most {worst:.1e}; "
        + ("agree" if agree else "DISAGREE")
    )
    return agree


if __name__ == "__main__":
    sys.exit(main())
