"""Cells of several training seeds seen as one: selecting, pairing, pooling.

Pooled values are clustered by (training seed, task): `"0/task-17"` is one unit. Such an interval speaks of the seeds
that ran; with three of them it says little of others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from compaction.settings import Settings
from evaluation.analysis.statistics import Comparison, Interval, bootstrap_interval, compare
from evaluation.grid import Cell
from evaluation.results import CellResult

Quantity = Literal["task_scores", "task_summary_tokens"]


class PresetPoint(Settings):
    """The preset's own point of the sweep: the setting its models were trained in, around which factors are varied."""

    window: int = Field(ge=1, description="C of the preset, in tokens")
    cap: int = Field(ge=0, description="most compactions per rollout of the preset")
    keep_recent: int = Field(ge=0, description="turns kept verbatim of the preset")
    long_window: int | None = Field(default=None, ge=1, description="window of no-compaction-long, in tokens")

    def is_at(self, cell: Cell, *, cap: int | None = None) -> bool:
        """`cell` has the preset's window and keep_recent, and `cap` (the preset's own if None)."""
        cap = self.cap if cap is None else cap
        return (cell.window, cell.cap, cell.keep_recent) == (self.window, cap, self.keep_recent if cap else None)

    def is_long(self, cell: Cell) -> bool:
        """`cell` is the one long window without compaction."""
        return cell.cap == 0 and cell.window == self.long_window


def own_cells(
    cells: Iterable[CellResult], preset: PresetPoint, variant: str, *, greedy: bool = False
) -> list[CellResult]:
    """A variant's cells at the preset's own point, one per seed, in order of seeds."""
    return by_seed(c for c in cells if c.variant == variant and preset.is_at(c.cell) and c.cell.greedy == greedy)


def by_seed(cells: Iterable[CellResult]) -> list[CellResult]:
    """In order of seeds. Raises ValueError for two cells of one variant and seed: the same cell was run twice."""
    ordered = sorted(cells, key=lambda c: (c.variant, c.seed))
    for first, second in itertools.pairwise(ordered):
        if (first.variant, first.seed) == (second.variant, second.seed):
            raise ValueError(f"two results for {first.cell.name}; keep one")
    return ordered


def pooled(cells: Sequence[CellResult], quantity: Quantity = "task_scores") -> dict[str, float]:
    """Per-task values of one variant's cells in one setting, keyed by `seed/task`."""
    return {f"{cell.seed}/{task}": value for cell in by_seed(cells) for task, value in getattr(cell, quantity).items()}


def pooled_mean(cells: Sequence[CellResult], quantity: Quantity = "task_scores") -> float | None:
    """Mean over all (seed, task); None where there is no value."""
    values = pooled(cells, quantity)
    return float(np.mean(list(values.values()))) if values else None


def pooled_interval(cells: Sequence[CellResult], quantity: Quantity = "task_scores") -> Interval | None:
    """Bootstrap interval of `pooled_mean`, clustered by (seed, task)."""
    return bootstrap_interval(list(pooled(cells, quantity).values()))


def compare_cells(a: Sequence[CellResult], b: Sequence[CellResult], quantity: Quantity = "task_scores") -> Comparison:
    """a − b, paired by (seed, task). Where b has one seed only (an untrained base, an endpoint) every seed of a is
    compared with it."""
    repeats = max((cell.repeats for cell in [*a, *b]), default=1)
    return compare(pooled(a, quantity), _partner_values(a, b, quantity), repeats=repeats)


def _partner_values(a: Sequence[CellResult], b: Sequence[CellResult], quantity: Quantity) -> Mapping[str, float]:
    if len(b) != 1:
        return pooled(b, quantity)
    values: dict[str, float] = getattr(b[0], quantity)
    return {f"{cell.seed}/{task}": value for cell in a for task, value in values.items()}
