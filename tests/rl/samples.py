"""Rollouts with random contents, shaped as the agent loop makes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compaction.rollout import Outcome, Rollout, Segment
from compaction.settings import AgentSettings
from rl.rows import Row, rows_of

VOCABULARY = 61


def random_segment(
    rng: np.random.Generator, ordinal: int, actions: Sequence[int], *, context: int = 6, observation: int = 3
) -> Segment:
    """Actions of the given lengths; an observation follows each one of an execution segment."""
    summary = ordinal % 2 == 1
    mask: list[bool] = []
    for length in actions:
        mask += [True] * length
        if not summary:
            mask += [False] * observation
    optimized = np.array(mask, dtype=bool)
    n = len(optimized)
    return Segment(
        "summary" if summary else "execution",
        ordinal,
        rng.integers(0, VOCABULARY, 2 if summary else context).astype(np.int32),
        rng.integers(0, VOCABULARY, n).astype(np.int32),
        optimized,
        np.where(optimized, -rng.uniform(0.5, 6.0, n), 0).astype(np.float32),
        np.where(optimized, 0, -1).astype(np.int32),
    )


def random_rollout(
    rng: np.random.Generator, actions: Sequence[Sequence[int]], *, reward: float = 1.0, rollout_id: str = "r0"
) -> Rollout:
    """One segment per entry of `actions`: the lengths of its actions (a summary has one)."""
    segments = tuple(random_segment(rng, i, lengths) for i, lengths in enumerate(actions))
    return Rollout(rollout_id, "task", 0, AgentSettings(), segments, Outcome(reward, "finished"))


def random_batch(seed: int = 0, n: int = 6) -> list[Rollout]:
    """Rollouts with 0 to 2 compactions, one of them ending in an empty window."""
    rng = np.random.default_rng(seed)
    batch = []
    for i in range(n):
        actions: list[list[int]] = []
        for window in range(1 + i % 3):
            if window:
                actions.append([int(rng.integers(2, 6))])
            actions.append([int(k) for k in rng.integers(1, 6, rng.integers(1, 4))])
        if i == n - 1:
            actions += [[3], []]
        batch.append(random_rollout(rng, actions, reward=float(i % 2), rollout_id=f"r{i}"))
    return batch


def random_rows(seed: int = 0, n: int = 6) -> list[Row]:
    return [row for rollout in random_batch(seed, n) for row in rows_of(rollout)]
