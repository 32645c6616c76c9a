"""Losses as weighted sums: every token's weight is counted over the whole global batch before anything is split.

So loss and gradients do not depend on micro-batches, their order, or the number of ranks (design "Learning").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from rl.rows import Row
from rl.settings import CriticLoss, LossSettings

# exp of it is still finite in float32: a ratio this large is clipped or dropped, and never becomes inf * 0 = NaN.
_LARGEST_LOG_RATIO = 60.0


def token_weights(
    rows: Sequence[Row], settings: LossSettings, included: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Per row the [n_optimized] float64 weights of its tokens in the batch's mean.

    token: 1/|M|. segment: 1/(segments · tokens of the segment), over segments that hold an included token.
    `included[i]` is a [n_optimized] bool mask (staleness bound, overlong rollouts); what is excluded weighs 0 and is
    in no count. |M| of an empty batch counts as 1.
    """
    if included is None:
        included = [np.ones(row.n_optimized, dtype=bool) for row in rows]
    if settings.mean == "token":
        total = max(1, sum(int(mask.sum()) for mask in included))
        return [mask / total for mask in included]
    counts = [
        np.bincount(row.ordinals[mask], minlength=int(row.segment.max(initial=0)) + 1)
        for row, mask in zip(rows, included, strict=True)
    ]
    segments = max(1, sum(int(np.count_nonzero(count)) for count in counts))
    return [
        mask / (segments * np.maximum(1, count[row.ordinals]))
        for row, mask, count in zip(rows, included, counts, strict=True)
    ]


@dataclass(frozen=True)
class PolicyLoss:
    """Weighted sums over tokens: adding them over micro-batches gives the batch's."""

    loss: torch.Tensor
    """Scalar with gradient"""
    clip_fraction: torch.Tensor
    """Weighted share of tokens without gradient because of the clip"""
    kl_to_sampler: torch.Tensor
    """Weighted mean of ρ − 1 − log ρ: an estimate of KL(sampler ‖ policy) that is never negative"""


def policy_loss(
    new_logprobs: torch.Tensor,
    sampled_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    settings: LossSettings,
) -> PolicyLoss:
    """The clipped policy loss on [n] tokens, against the policy that sampled them (not a recomputed old one).

    ppo: −Σ w·min(ρA, clip(ρ, 1−ε_low, 1+ε_high)·A). double_sided: −Σ w·sg(ρ)·A·log π over tokens with ρ strictly inside
    (1−ε_low, 1+ε_high), whatever the sign of A (SAO). Tokens of weight 0 give exactly 0, whatever their numbers.
    """
    counted = weights != 0
    advantages = torch.where(counted, advantages, 0.0)
    log_ratio = torch.where(counted, new_logprobs - sampled_logprobs, 0.0)
    log_ratio = log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()
    low, high = 1.0 - settings.eps_low, 1.0 + settings.eps_high
    if settings.clip == "ppo":
        gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        clipped = torch.where(advantages > 0, ratio > high, (ratio < low) & (advantages < 0))
    else:
        clipped = (ratio <= low) | (ratio >= high)
        constant = torch.where(clipped, 0.0, ratio).detach()
        gain = constant * advantages * torch.where(counted, new_logprobs, 0.0)
    with torch.no_grad():
        clip_fraction = (weights * clipped).sum()
        kl = (weights * (ratio - 1.0 - log_ratio)).sum()
    return PolicyLoss(-(weights * gain).sum(), clip_fraction, kl)


def critic_loss(
    predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, kind: CriticLoss
) -> torch.Tensor:
    """Weighted sum over [n] tokens. bce: predictions are logits of R in [0, 1]; mse: half the squared error of V."""
    if kind == "bce":
        each = F.binary_cross_entropy_with_logits(predictions, targets, reduction="none")
    else:
        each = 0.5 * (predictions - targets) ** 2
    return (weights * each).sum()


def predicted_values(predictions: torch.Tensor, kind: CriticLoss) -> torch.Tensor:
    """[n] V from the value head's outputs: their sigmoid for bce, themselves for mse."""
    return predictions.sigmoid() if kind == "bce" else predictions
