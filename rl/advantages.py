"""Advantages: GAE over optimized tokens with the cross-segment factor, and the group baseline. NumPy, float64.

Method: the paper's section on cross-segment GAE, in the numbering of the design page "Learning: one order, no leaks".
Observations are already skipped: arrays hold optimized tokens only, so the next value of an action's last token is that
of the next action's first token.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from compaction.rollout import StopReason
from compaction.settings import Settings

OVERLONG: frozenset[StopReason] = frozenset({"max_turns", "context_full"})
"""Stop reasons at a turn or window limit: SUPO gives these rollouts no gradient, but counts them in the group."""


class AdvantageSettings(Settings):
    """How a rollout's reward becomes one advantage per optimized token."""

    estimator: Literal["gae", "group"] = Field("gae", description="critic and GAE, or the group baseline (SUPO, GRPO)")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per optimized token")
    alpha: float = Field(1.5, gt=0, description="α of the length-adaptive λ = 1 − 1/(α·l) (VAPO)")
    lambda_length: Literal["rollout", "segment"] = Field(
        "rollout", description="l: optimized tokens of the whole rollout, or of the token's own segment"
    )
    cross_segment: Literal["discount", "none", "exact"] = Field(
        "discount",
        description="discount: reward at each segment's end times (γλ)^N of the later tokens (the paper); none: "
        "without that factor; exact: reward once at the rollout's end, values bootstrap across segments",
    )
    whiten: bool = Field(False, description="shift and scale the batch's advantages to mean 0 and std 1")

    @model_validator(mode="after")
    def _exact_has_one_lambda(self) -> AdvantageSettings:
        if self.cross_segment == "exact" and self.lambda_length == "segment":
            raise ValueError(
                "cross_segment=exact runs over the whole rollout and has one λ; set lambda_length=rollout, "
                "or cross_segment=discount or none"
            )
        return self


def length_adaptive_lambda(alpha: float, length: int) -> float:
    """λ = 1 − 1/(α·l), clamped to [0, 1); 0 for an empty response (VAPO)."""
    if alpha * length <= 1.0:
        return 0.0
    return min(1.0 - 1.0 / (alpha * length), math.nextafter(1.0, 0.0))


def cross_segment_factor(later_tokens: int, length: int, *, alpha: float, gamma: float = 1.0) -> float:
    """(γλ)^N for N optimized tokens in later segments, as exp(N·(log γ + log1p(−1/(α·l)))).

    The log1p form keeps its precision where λ is one part in 10⁵ below 1. With λ = 0 it is 0, or 1 for N = 0.
    """
    if later_tokens == 0:
        return 1.0
    if alpha * length <= 1.0:
        return 0.0
    return math.exp(later_tokens * (math.log(gamma) + math.log1p(-1.0 / (alpha * length))))


def segment_factors(lengths: Sequence[int], settings: AdvantageSettings) -> np.ndarray:
    """[K] weight with which the later segments' reward reaches each segment's end; 1 everywhere but in `discount`.

    `lengths` are optimized tokens per segment of one rollout, 0 for masked or empty ones.
    """
    if settings.cross_segment != "discount" or settings.estimator != "gae":
        return np.ones(len(lengths))
    total = sum(lengths)
    later = total - np.cumsum(np.asarray(lengths, dtype=np.int64))
    factors = np.ones(len(lengths))
    for s, (n, own) in enumerate(zip(later, lengths, strict=True)):
        length = _lambda_length(own, total, settings)
        factors[s] = cross_segment_factor(int(n), length, alpha=settings.alpha, gamma=settings.gamma)
    return factors


def _lambda_length(own: int, total: int, settings: AdvantageSettings) -> int:
    return total if settings.lambda_length == "rollout" else own


def rollout_advantages(values: Sequence[np.ndarray], reward: float, settings: AdvantageSettings) -> list[np.ndarray]:
    """Per segment the [n_s] float64 advantages of its optimized tokens, by GAE.

    `values[s]` holds V before each optimized token of segment s; it is empty where a segment has no optimized token or
    is a masked summary, which then counts in no length and in no N.
    """
    values = [np.asarray(v, dtype=np.float64) for v in values]
    lengths = [len(v) for v in values]
    total = sum(lengths)
    if settings.cross_segment == "exact":
        decay = settings.gamma * length_adaptive_lambda(settings.alpha, total)
        joined = np.concatenate(values) if values else np.zeros(0)
        whole = _gae(joined, reward, settings.gamma, decay)
        return [np.array(part) for part in np.split(whole, np.cumsum(lengths)[:-1])] if values else []
    out = []
    for v, factor in zip(values, segment_factors(lengths, settings), strict=True):
        decay = settings.gamma * length_adaptive_lambda(settings.alpha, _lambda_length(len(v), total, settings))
        out.append(factor * _gae(v, reward, settings.gamma, decay))
    return out


def _gae(values: np.ndarray, reward: float, gamma: float, decay: float) -> np.ndarray:
    """GAE of one stretch: reward at its last token, V = 0 after it. `decay` is γλ."""
    if len(values) == 0:
        return np.zeros(0)
    deltas = gamma * np.append(values[1:], 0.0) - values
    deltas[-1] += reward
    advantages = []
    running = 0.0
    for delta in reversed(deltas.tolist()):
        running = delta + decay * running
        advantages.append(running)
    return np.array(advantages[::-1])


def group_advantages(rewards: Sequence[float]) -> np.ndarray:
    """[G] (R − mean) / population std over one group's rollouts (each counted once); zeros where all are equal."""
    r = np.asarray(rewards, dtype=np.float64)
    if len(r) == 0 or np.ptp(r) == 0:
        return np.zeros(len(r))
    return (r - r.mean()) / r.std()


def batch_advantages(
    values: Sequence[Sequence[np.ndarray]],
    rewards: Sequence[float],
    settings: AdvantageSettings,
    *,
    groups: Sequence[Hashable] | None = None,
) -> list[list[np.ndarray]]:
    """Advantages per rollout, per segment, [n_s] float64, for a whole batch.

    `values` as in `rollout_advantages`, one entry per rollout; the group estimator reads only their lengths and needs
    `groups` (the task of each rollout).
    """
    if settings.estimator == "gae":
        out = [rollout_advantages(v, r, settings) for v, r in zip(values, rewards, strict=True)]
    else:
        if groups is None:
            raise ValueError("estimator=group needs the group of each rollout")
        scores = _group_scores(rewards, groups)
        out = [[np.full(len(v), a) for v in segments] for segments, a in zip(values, scores, strict=True)]
    return _whitened(out) if settings.whiten else out


def _group_scores(rewards: Sequence[float], groups: Sequence[Hashable]) -> np.ndarray:
    members: dict[Hashable, list[int]] = {}
    for i, (_, group) in enumerate(zip(rewards, groups, strict=True)):
        members.setdefault(group, []).append(i)
    scores = np.zeros(len(rewards))
    for indices in members.values():
        scores[indices] = group_advantages([rewards[i] for i in indices])
    return scores


def _whitened(advantages: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    every = [a for segments in advantages for a in segments]
    flat = np.concatenate(every) if every else np.zeros(0)
    if len(flat) == 0 or np.ptp(flat) == 0:
        return [[np.zeros(len(a)) for a in segments] for segments in advantages]
    mean, std = flat.mean(), flat.std()
    return [[(a - mean) / (std + 1e-8) for a in segments] for segments in advantages]


def advantage_metrics(advantages: Sequence[Sequence[np.ndarray]], settings: AdvantageSettings) -> dict[str, float]:
    """What to log of a batch's advantages; a name is left out where nothing can be said (no summary in the batch).

    `train/discount_factor_summary` and `…_execution` are means of the cross-segment factor over segments that hold
    tokens, `train/discount_factor_min` its smallest; below 1e-3 a segment learns next to nothing.
    """
    kinds: dict[str, list[tuple[float, np.ndarray]]] = {"execution": [], "summary": []}
    for segments in advantages:
        factors = segment_factors([len(a) for a in segments], settings)
        for ordinal, (a, factor) in enumerate(zip(segments, factors, strict=True)):
            if len(a):
                kinds["summary" if ordinal % 2 else "execution"].append((float(factor), a))
    out: dict[str, float] = {}
    for kind, found in kinds.items():
        if found:
            out[f"train/discount_factor_{kind}"] = float(np.mean([factor for factor, _ in found]))
            out[f"train/advantage_abs_{kind}"] = float(np.mean(np.abs(np.concatenate([a for _, a in found]))))
    if any(kinds.values()):
        out["train/discount_factor_min"] = min(factor for found in kinds.values() for factor, _ in found)
    return out
