"""The checks of `python -m tests.gpu`: each prints what it measured and raises Failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compaction.protocols import GenerateRequest
from rl.engines.torch_engine import TorchEngine
from rl.models import load_policy
from rl.rows import Row
from rl.settings import SFTSettings, SFTStage, TrainerSettings
from rl.sft import run_sft
from rl.trainer import Trainer
from tests.gpu.cases import Case, random_rows

SAME_IN_BFLOAT16 = 0.05
"""Largest mean difference of logprobs between two ways through a model in bfloat16"""
SAME_IN_FLOAT32 = 1e-3
GIB = 2**30


class Failed(Exception):
    """What was measured is not what must be."""


def trainer(case: Case, checkpoint: Path, device: torch.device, **settings: Any) -> Trainer:
    values = {"micro_batch_tokens": case.micro_batch_tokens, "dtype": "bfloat16", "packed": True} | settings
    return Trainer(checkpoint, TrainerSettings(**values), device=device.type)


def packed_rows_equal_padded_rows(case: Case, checkpoint: Path, device: torch.device) -> None:
    rows = random_rows(case)
    for dtype, tolerance in (("bfloat16", SAME_IN_BFLOAT16), ("float32", SAME_IN_FLOAT32)):
        packed, padded = (
            np.concatenate(trainer(case, checkpoint, device, dtype=dtype, packed=p).logprobs(rows))
            for p in (True, False)
        )
        expect_same(f"logprobs in {dtype}, packed against padded", packed, padded, tolerance)


def the_loss_falls_in_bfloat16_on_packed_rows(case: Case, checkpoint: Path, device: torch.device) -> None:
    rows = [row for row in random_rows(case) if len(row.token_ids) < case.micro_batch_tokens][:8]
    tokens = sum(len(row.token_ids) for row in rows)
    policy = load_policy(checkpoint, torch.bfloat16).to(device)
    settings = SFTSettings(
        stages=(SFTStage(steps=case.steps, tokens_per_step=tokens),),
        lr=case.lr,
        warmup=0.25,
        packed=True,
        gradient_checkpointing=True,
        micro_batch_tokens=case.micro_batch_tokens,
    )
    losses = [metrics["sft/loss"] for metrics in run_sft(policy, [rows], settings, seed=0)]
    print("loss by step: " + " ".join(f"{loss:.3f}" for loss in losses))
    expect(losses[-1] < 0.9 * losses[0], "the loss does not fall by a tenth")


def a_ppo_update_moves_the_policy_towards_its_advantages(case: Case, checkpoint: Path, device: torch.device) -> None:
    t = trainer(case, checkpoint, device, policy_lr=1e-4, gradient_checkpointing=True)
    rows = random_rows(case)[: case.rows // 2]
    before = t.logprobs(rows)
    rows = [with_logprobs(row, values) for row, values in zip(rows, before, strict=True)]
    metrics = t.update_critic(rows, [np.ones(row.n_optimized) for row in rows])
    metrics |= t.update_policy(rows, [np.ones(row.n_optimized) for row in rows])
    change = float(np.mean(np.concatenate(t.logprobs(rows)) - np.concatenate(before)))
    print(f"KL before the step {metrics['train/kl_to_sampler']:.1e}, mean change of logprobs {change:+.4f}")
    expect(abs(metrics["train/kl_to_sampler"]) < 1e-3, "the policy that sampled is not the policy that is trained")
    expect(change > 0, "tokens of positive advantage did not become more likely")


def the_torch_engine_samples_from_the_trainers_distribution(case: Case, checkpoint: Path, device: torch.device) -> None:
    for dtype, tolerance in (("bfloat16", SAME_IN_BFLOAT16), ("float32", SAME_IN_FLOAT32)):
        policy = load_policy(checkpoint, getattr(torch, dtype)).to(device)
        rows, sampled = sampled_rows(case, policy)
        got = trainer(case, checkpoint, device, dtype=dtype).logprobs(rows)
        expect_same(f"logprobs in {dtype}, engine against trainer", sampled, np.concatenate(got), tolerance)


def memory_and_speed_of_an_update(case: Case, checkpoint: Path, device: torch.device) -> None:
    """One critic and one policy update; memory counts weights and optimisers."""
    rows = random_rows(case)
    advantages = [np.sin(np.arange(row.n_optimized)) for row in rows]
    targets = [np.full(row.n_optimized, float(i % 2)) for i, row in enumerate(rows)]
    tokens = sum(len(row.token_ids) for row in rows)
    print(f"{len(rows)} rows, {tokens} tokens, micro-batches of {case.micro_batch_tokens}, {case.speed_dtype}")
    print(f"{'rows':10}{'activations':>14}{'seconds':>10}{'tokens/s':>11}{'peak GiB':>10}")
    for packed in (True, False):
        for again in (True, False):
            settings = {"dtype": case.speed_dtype, "packed": packed, "gradient_checkpointing": again}
            t = trainer(case, checkpoint, device, critic_updates=1, **settings)
            seconds, peak = timed(device, case.timed_updates, lambda t=t: update(t, rows, targets, advantages))
            kind, kept = "packed" if packed else "padded", "recomputed" if again else "kept"
            print(f"{kind:10}{kept:>14}{seconds:>10.2f}{tokens / seconds:>11.0f}{peak:>10}", flush=True)
            del t


CHECKS: tuple[Callable[[Case, Path, torch.device], None], ...] = (
    packed_rows_equal_padded_rows,
    the_loss_falls_in_bfloat16_on_packed_rows,
    a_ppo_update_moves_the_policy_towards_its_advantages,
    the_torch_engine_samples_from_the_trainers_distribution,
    memory_and_speed_of_an_update,
)


def update(t: Trainer, rows: list[Row], targets: list[np.ndarray], advantages: list[np.ndarray]) -> None:
    t.update_critic(rows, targets)
    t.update_policy(rows, advantages)


def timed(device: torch.device, times: int, work: Callable[[], None]) -> tuple[float, str]:
    """(median seconds, peak GiB) of `work`, which is run once before."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    work()
    seconds = []
    for _ in range(times):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = f"{torch.cuda.max_memory_allocated() / GIB:.2f}" if on_gpu else "-"
    return float(np.median(seconds)), peak


def sampled_rows(case: Case, policy: Any) -> tuple[list[Row], np.ndarray]:
    """Four replies of the engine as rows, and the logprobs that it gave."""
    new = case.shortest
    engine = TorchEngine(policy, slots=4, max_length=3 * new)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, case.vocabulary, int(n)).astype(np.int32) for n in np.linspace(new // 2, 2 * new, 4)]

    async def all_replies() -> list[Any]:
        requests = [GenerateRequest(f"r{i}", prompt, new, 1.0, i) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    replies = asyncio.run(all_replies())
    rows = []
    for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        on = np.arange(len(prompt) + len(reply.token_ids)) >= len(prompt)
        ids = np.concatenate([prompt, reply.token_ids])
        blank = Row(f"r{i}", ids, np.where(on, 0, -1), np.zeros(len(on)), np.where(on, 0, -1), np.zeros(len(on), bool))
        rows.append(with_logprobs(blank, reply.logprobs))
    return rows, np.concatenate([reply.logprobs for reply in replies])


def with_logprobs(row: Row, values: np.ndarray) -> Row:
    logprobs = np.zeros(len(row.token_ids), np.float32)
    logprobs[row.optimized] = values
    return replace(row, logprobs=logprobs)


def expect_same(what: str, a: np.ndarray, b: np.ndarray, tolerance: float) -> None:
    mean, most = float(np.abs(a - b).mean()), float(np.abs(a - b).max())
    print(f"{what}: mean difference {mean:.1e}, largest {most:.1e}")
    expect(mean <= tolerance, f"{what} differ by {mean:.1e} on average, over {tolerance:g}")


def expect(condition: bool, why: str) -> None:
    if not condition:
        raise Failed(why)
