"""SFT on rollouts: loss on what the policy said, a little on what it was shown (design "Learning", last point)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rl.batching import MicroBatch, micro_batches
from rl.master_weights import guarded_optimizer
from rl.models import checkpoint_layers, token_logprobs
from rl.optimization import GuardedOptimizer
from rl.packing import enable_packing
from rl.rows import Row
from rl.settings import SFTSettings


def sft_weights(row: Row, context_weight: float) -> np.ndarray:
    """[T] float64: 1 on actions and summaries, `context_weight` on observations, 0 on whatever a window started from
    (system, task, resume message, kept turns) and on the summary instruction. The first token weighs 0."""
    weights = np.where(row.optimized, 1.0, context_weight * row.observation)
    weights[:1] = 0.0
    return weights


def sft_optimizer(policy: Any, settings: SFTSettings) -> GuardedOptimizer:
    """The optimiser of one fine-tuning run."""
    return guarded_optimizer(
        policy,
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        max_skipped=settings.max_skipped,
    )


def run_sft(
    policy: Any,
    rows: Sequence[Sequence[Row]],
    settings: SFTSettings,
    *,
    seed: int,
    optimizer: GuardedOptimizer | None = None,
    first_step: int = 0,
) -> Iterator[dict[str, float]]:
    """Train `policy` in place; yields the metrics of every step as it is made.

    `rows[i]` are read by stage i, in whole rows, in a seeded order, around and around. `sft/loss` is the mean negative
    log-likelihood over actions and summaries alone. With the policy and the optimiser that `first_step` steps left, it
    goes on behind them, bit for bit. Raises ValueError on a stage without rows, and TrainingDiverged.
    """
    if len(rows) != len(settings.stages) or not all(rows):
        raise ValueError(
            f"{len(settings.stages)} stages need one non-empty list of rows each, got {[len(r) for r in rows]} rows"
        )
    optimizer = optimizer or sft_optimizer(policy, settings)
    packed = settings.packed and enable_packing(policy, policy.get_decoder())
    if settings.gradient_checkpointing:
        checkpoint_layers(policy)
    total = sum(stage.steps for stage in settings.stages)
    generator = np.random.default_rng(seed)
    step = 0
    for stage, stage_rows in zip(settings.stages, rows, strict=True):
        chunks = _chunks(stage_rows, stage.tokens_per_step, generator)
        for _ in range(stage.steps):
            chunk = next(chunks)
            if step >= first_step:
                lr = settings.lr * lr_factor(step / total, settings.warmup)
                optimizer.set_lr(lr)
                yield {"sft/learning_rate": lr} | _step(policy, optimizer, chunk, settings, packed)
            step += 1


def lr_factor(progress: float, warmup: float) -> float:
    """Rises linearly from 0 to 1 over the first `warmup` of all steps, then falls to 0 along a cosine."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (progress - warmup) / (1.0 - warmup)))


def _chunks(rows: Sequence[Row], tokens: int, generator: np.random.Generator) -> Iterator[list[Row]]:
    """Whole rows until a step's tokens are reached, every row once per epoch."""
    chunk: list[Row] = []
    read = 0
    while True:
        for i in generator.permutation(len(rows)):
            chunk.append(rows[i])
            read += len(rows[i].token_ids)
            if read >= tokens:
                yield chunk
                chunk, read = [], 0


def _step(
    policy: Any, optimizer: GuardedOptimizer, rows: Sequence[Row], settings: SFTSettings, packed: bool
) -> dict[str, float]:
    per_row = [sft_weights(row, settings.context_weight) for row in rows]
    wanted = [weights > 0 for weights in per_row]
    flat = np.concatenate([weights[mask] for weights, mask in zip(per_row, wanted, strict=True)])
    parameter = next(policy.parameters())
    precision = torch.promote_types(parameter.dtype, torch.float32)
    weights = torch.from_numpy(flat / max(flat.sum(), 1.0)).to(parameter.device, precision)
    nll = torch.zeros_like(weights)

    def loss_of(batch: MicroBatch) -> torch.Tensor:
        each = -token_logprobs(policy, batch, 1.0, settings.logits_at_once)
        nll[batch.places] = each.detach().to(nll)
        return (weights[batch.places] * each).sum()

    batches = micro_batches(rows, wanted, settings.micro_batch_tokens, parameter.device, packed=packed)
    _, norm = optimizer.step(batches, loss_of)
    spoken = np.concatenate([row.optimized[mask] for row, mask in zip(rows, wanted, strict=True)])
    return {
        "sft/loss": float(nll.cpu().numpy()[spoken].mean()),
        "sft/grad_norm": norm,
        "sft/tokens": float(sum(len(row.token_ids) for row in rows)),
        "sft/skipped_steps": float(optimizer.skipped),
        "sft/trainable_parameters": float(optimizer.trainable),
    }
