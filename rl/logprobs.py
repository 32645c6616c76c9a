"""Log-probabilities of given tokens, without the logits of all of them in memory at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_AT_ONCE = 2**25
"""Tokens times vocabulary; 128 MiB in float32"""


def gathered_logprobs(
    head: Any, hidden: Tensor, targets: Tensor, temperature: float, logits_at_once: int = LOGITS_AT_ONCE
) -> Tensor:
    """[n] log-probability of `targets` [n] from `hidden` [n, width], by a linear `head`; float32 or float64.

    At most `logits_at_once` logits exist at a time, in the backward pass too, so that memory grows with neither the
    tokens nor the vocabulary. Where all fit, nothing is computed twice.
    """
    vocabulary = head.weight.shape[0]
    if len(targets) * vocabulary <= logits_at_once:
        return -F.cross_entropy(_scaled(head(hidden), temperature), targets, reduction="none")
    chunk = max(1, logits_at_once // vocabulary)
    logprobs: Tensor = _Chunked.apply(hidden, head.weight, head.bias, targets, temperature, chunk)
    return logprobs


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """At least float32; fresh, so that it may be changed in place."""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


class _Chunked(torch.autograd.Function):
    """Recomputes each chunk's logits in the backward pass.

    Written out, because autograd over checkpointed chunks would hold several gradients of the head's weight, each as
    large as the weight, where here one takes up all chunks.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> Tensor:
        chosen, normalizers = [], []
        for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = _scaled(F.linear(rows, weight, bias), temperature)
            chosen.append(logits.gather(1, wanted[:, None])[:, 0])
            normalizers.append(logits.logsumexp(1))
        normalizer = torch.cat(normalizers)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer)
        ctx.temperature, ctx.chunk = temperature, chunk
        return torch.cat(chosen) - normalizer

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for start in range(0, len(targets), ctx.chunk):
            at = slice(start, start + ctx.chunk)
            gradient = gradients[0][at] / ctx.temperature
            # d log p(y) / d logits = (one at y) − softmax
            logits = _scaled(F.linear(hidden[at], weight, bias), ctx.temperature)
            of_logits = logits.sub_(normalizer[at, None]).exp_().mul_(-gradient[:, None])
            of_logits[torch.arange(len(gradient), device=hidden.device), targets[at]] += gradient
            of_logits = of_logits.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[at])
            if of_weight is not None:
                of_weight.addmm_(of_logits.T, hidden[at])
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None
