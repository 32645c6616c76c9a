"""SFT on rollouts: loss on what the policy said, a little on what it was shown (design "Learning", last point)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field

from compaction.settings import Settings
from rl.batching import micro_batches
from rl.models import token_logprobs
from rl.rows import Row


class SFTStage(Settings):
    """A number of steps at one step size."""

    steps: int = Field(ge=1, description="optimiser steps of this stage")
    tokens_per_step: int = Field(ge=1, description="tokens of whole rows that one step reads, about")


class SFTSettings(Settings):
    """Supervised fine-tuning. Defaults are the tiny preset's."""

    stages: tuple[SFTStage, ...] = Field(
        (SFTStage(steps=300, tokens_per_step=1_500), SFTStage(steps=1_600, tokens_per_step=3_000)),
        min_length=1,
        description="stages in order; each reads its own rows",
    )
    lr: float = Field(4e-3, gt=0, description="peak learning rate; falls to 0 along a cosine over all stages")
    betas: tuple[float, float] = Field((0.9, 0.98), description="AdamW's moment decays")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    clip_grad: float = Field(1.0, gt=0, description="largest gradient norm; longer gradients are scaled down to it")
    context_weight: float = Field(0.1, ge=0, le=1, description="weight of an observation's token beside an action's 1")
    micro_batch_tokens: int = Field(4_096, ge=1, description="most padded tokens in one forward pass")


def sft_weights(row: Row, context_weight: float) -> np.ndarray:
    """[T] float64: 1 on actions and summaries, `context_weight` on observations, 0 on whatever a window started from
    (system, task, resume message, kept turns) and on the summary instruction. The first token weighs 0."""
    weights = np.where(row.optimized, 1.0, context_weight * row.observation)
    weights[:1] = 0.0
    return weights


def run_sft(
    policy: Any, rows: Sequence[Sequence[Row]], settings: SFTSettings, *, seed: int
) -> Iterator[dict[str, float]]:
    """Train `policy` in place; yields the metrics of every step as it is made.

    `rows[i]` are read by stage i, in whole rows, in a seeded order, around and around. `sft/loss` is the mean negative
    log-likelihood over actions and summaries alone. Raises ValueError on a stage without rows.
    """
    if len(rows) != len(settings.stages) or not all(rows):
        raise ValueError(
            f"{len(settings.stages)} stages need one non-empty list of rows each, got {[len(r) for r in rows]} rows"
        )
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )
    total = sum(stage.steps for stage in settings.stages)
    generator = np.random.default_rng(seed)
    step = 0
    for stage, stage_rows in zip(settings.stages, rows, strict=True):
        chunks = _chunks(stage_rows, stage.tokens_per_step, generator)
        for _ in range(stage.steps):
            lr = settings.lr * 0.5 * (1.0 + math.cos(math.pi * step / total))
            for group in optimizer.param_groups:
                group["lr"] = lr
            yield {"sft/learning_rate": lr} | _step(policy, optimizer, next(chunks), settings)
            step += 1


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
    policy: Any, optimizer: torch.optim.Optimizer, rows: Sequence[Row], settings: SFTSettings
) -> dict[str, float]:
    token_weights = [sft_weights(row, settings.context_weight) for row in rows]
    wanted = [weights > 0 for weights in token_weights]
    parameter = next(policy.parameters())
    flat = np.concatenate([weights[mask] for weights, mask in zip(token_weights, wanted, strict=True)])
    weights = torch.from_numpy(flat / max(flat.sum(), 1.0)).to(parameter)
    spoken = torch.from_numpy(flat == 1.0).to(parameter)
    optimizer.zero_grad(set_to_none=True)
    spoken_nll = torch.zeros((), dtype=torch.float64)
    for mb in micro_batches(rows, wanted, settings.micro_batch_tokens, parameter.device):
        nll = -token_logprobs(policy, mb, 1.0)
        (weights[mb.places] * nll).sum().backward()
        spoken_nll += (spoken[mb.places] * nll.detach()).sum().cpu()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.clip_grad)
    optimizer.step()
    return {
        "sft/loss": float(spoken_nll / max(spoken.sum().item(), 1.0)),
        "sft/grad_norm": float(norm),
        "sft/tokens": float(sum(len(row.token_ids) for row in rows)),
    }
