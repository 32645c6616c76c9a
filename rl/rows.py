"""Rows: what one forward pass reads, and the way between rows and segments (design "The data, in the order it flows").

An execution segment and the summary that ended its window share one row, because the window is the summary's prefix:
one forward pass instead of two. Advantages stay per segment, so values travel rows → segments → rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compaction.rollout import Rollout, Segment


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence of T token ids and what is to be learned on it.

    Raises ValueError at construction when lengths differ, when a logprob or version stands off an optimized token, when
    segments are out of order, or when the first token is optimized (nothing is read before it).
    """

    rollout_id: str
    token_ids: np.ndarray
    """[T] int32"""
    segment: np.ndarray
    """[T] int32: ordinal of the segment on its optimized tokens, -1 elsewhere"""
    logprobs: np.ndarray
    """[T] float32 of the sampling distribution, 0 where not optimized"""
    versions: np.ndarray
    """[T] int32 weight version that sampled the token, -1 where not optimized"""
    observation: np.ndarray
    """[T] bool: tokens between the actions of an execution segment; only SFT weighs them"""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("segment", "logprobs", "versions", "observation"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"row of {self.rollout_id}: {name} has {len(getattr(self, name))} entries for {length} tokens"
                )
        on = self.optimized
        if length and on[0]:
            raise ValueError(f"row of {self.rollout_id}: the first token is optimized, but nothing stands before it")
        if np.any(self.logprobs[~on] != 0) or np.any(self.versions[~on] != -1):
            raise ValueError(f"row of {self.rollout_id}: logprob or version on a token that is not optimized")
        if not np.all(np.isfinite(self.logprobs)):
            raise ValueError(f"row of {self.rollout_id}: logprobs must be finite")
        if np.any(self.observation & on):
            raise ValueError(f"row of {self.rollout_id}: a token is both an observation and optimized")
        if np.any(np.diff(self.segment[on]) < 0):
            raise ValueError(f"row of {self.rollout_id}: segments are out of order: {self.segment[on].tolist()}")

    @property
    def optimized(self) -> np.ndarray:
        """[T] bool"""
        return self.segment >= 0

    @property
    def n_optimized(self) -> int:
        return int(np.count_nonzero(self.segment >= 0))

    @property
    def ordinals(self) -> np.ndarray:
        """[n_optimized] int32: the segment of each optimized token."""
        return self.segment[self.segment >= 0]


def rows_of(rollout: Rollout, *, train_summaries: bool = True, share_prefix: bool = True) -> list[Row]:
    """The rows of a rollout, in order; windows in which nothing was sampled give none.

    Without `train_summaries` the summaries' tokens are not optimized and left off. Without `share_prefix` a summary
    gets a row of its own: its window again as context, its instruction, its tokens.
    """
    rows = []
    for execution, summary in rollout.windows():
        window = [_context(execution), _sampled(execution, observed=True)]
        tail = [] if summary is None or not train_summaries else [_context(summary), _sampled(summary, observed=False)]
        if share_prefix:
            rows.append(_row(rollout.id, window + tail))
            continue
        rows.append(_row(rollout.id, window))
        if tail:
            rows.append(_row(rollout.id, [_context(execution), _as_context(execution.token_ids), *tail]))
    return [row for row in rows if row.n_optimized]


@dataclass(frozen=True)
class _Piece:
    token_ids: np.ndarray
    segment: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    observation: np.ndarray


def _as_context(token_ids: np.ndarray) -> _Piece:
    n = len(token_ids)
    return _Piece(token_ids, np.full(n, -1), np.zeros(n), np.full(n, -1), np.zeros(n, dtype=bool))


def _context(segment: Segment) -> _Piece:
    return _as_context(segment.context_ids)


def _sampled(segment: Segment, *, observed: bool) -> _Piece:
    ordinals = np.where(segment.optimized, segment.ordinal, -1)
    observation = ~segment.optimized if observed else np.zeros(len(segment.token_ids), dtype=bool)
    return _Piece(segment.token_ids, ordinals, segment.logprobs, segment.versions, observation)


def _row(rollout_id: str, pieces: Sequence[_Piece]) -> Row:
    def joined(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([getattr(piece, name) for piece in pieces]).astype(dtype)

    return Row(
        rollout_id,
        joined("token_ids", np.int32),
        joined("segment", np.int32),
        joined("logprobs", np.float32),
        joined("versions", np.int32),
        joined("observation", bool),
    )


def gather_segments(rows: Sequence[Row], per_row: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Per rollout (in order of first appearance), per segment in order: the [n_s] values of its optimized tokens.

    `per_row[i]` holds one value per optimized token of `rows[i]`. Segments that no row holds get an empty array, so
    that the position in the list is the segment's ordinal. Raises ValueError where a segment is spread over rows.
    """
    found: dict[str, dict[int, np.ndarray]] = {}
    for row, values in zip(rows, per_row, strict=True):
        ordinals = row.ordinals
        if len(values) != len(ordinals):
            raise ValueError(f"row of {row.rollout_id}: {len(values)} values for {len(ordinals)} optimized tokens")
        segments = found.setdefault(row.rollout_id, {})
        for ordinal in np.unique(ordinals):
            if int(ordinal) in segments:
                raise ValueError(
                    f"segment {ordinal} of rollout {row.rollout_id} stands in more than one row of the batch"
                )
            segments[int(ordinal)] = np.asarray(values)[ordinals == ordinal]
    empty = np.zeros(0)
    return {
        rollout_id: [segments.get(i, empty) for i in range(max(segments, default=-1) + 1)]
        for rollout_id, segments in found.items()
    }


def scatter_segments(rows: Sequence[Row], per_rollout: Mapping[str, Sequence[np.ndarray]]) -> list[np.ndarray]:
    """The inverse of `gather_segments`: one [n_optimized] array per row."""
    out = []
    for row in rows:
        segments = per_rollout[row.rollout_id]
        parts = [segments[int(ordinal)] for ordinal in np.unique(row.ordinals)]
        values = np.concatenate(parts) if parts else np.zeros(0)
        if len(values) != row.n_optimized:
            raise ValueError(f"row of {row.rollout_id}: {len(values)} values for {row.n_optimized} optimized tokens")
        out.append(values)
    return out
