"""Runs beside each other: the settings they were all evaluated in, and what one gains over another on common tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.analysis.pooling import compare_cells, pooled_interval, pooled_mean
from evaluation.analysis.statistics import Comparison, Interval
from evaluation.analysis.tables import sort_variants
from evaluation.grid import format_tokens
from evaluation.results import CellResult


@dataclass(frozen=True)
class Point:
    """A variant in one setting, whatever its training seeds."""

    variant: str
    window: int
    cap: int
    keep_recent: int | None
    temperature: float

    @classmethod
    def of(cls, cell: CellResult) -> Point:
        return cls(cell.variant, cell.window, cell.cap, cell.keep_recent, cell.temperature)

    @property
    def setting(self) -> str:
        """For people: `window 64k · cap 3 · keep 2`; the temperature unless it is 1."""
        keep = "" if self.keep_recent is None else f" · keep {self.keep_recent}"
        named = {0.0: " · greedy", 1.0: ""}.get(self.temperature, f" · temperature {self.temperature:g}")
        return f"window {format_tokens(self.window)} · cap {self.cap}{keep}{named}"


Points = dict[Point, list[CellResult]]
"""Cells of one run by point, one per seed"""


@dataclass(frozen=True)
class Metrics:
    """One run at one point, pooled over its seeds as in the report."""

    seeds: tuple[int, ...]
    evaluations: tuple[str, ...]
    """MLflow runs that made the trials: equal ones mean that two runs reuse one evaluation"""
    scored: int
    trials: int
    pass_at_1: float | None
    interval: Interval | None
    summary_tokens: float | None
    """Mean over tasks of the task's mean summary length"""
    compactions: float


@dataclass(frozen=True)
class Gain:
    """What a run gains over another at one point, paired by seed and task."""

    comparison: Comparison
    seeds: tuple[int, ...]
    """Training seeds that were paired"""
    tasks: int
    """Common tasks, each counted once however many seeds"""
    same_trials: bool
    """Both runs reuse one evaluation: there is nothing to test"""


def by_point(cells: Iterable[CellResult]) -> Points:
    """Cells of one run by point."""
    points: Points = defaultdict(list)
    for cell in cells:
        points[Point.of(cell)].append(cell)
    return dict(points)


def in_order(points: Iterable[Point]) -> list[Point]:
    """Variants in the house's order, sampled before greedy, then by window, cap and kept turns."""
    points = set(points)
    variants = sort_variants({point.variant for point in points})
    return sorted(
        points,
        key=lambda p: (variants.index(p.variant), p.temperature == 0, p.window, p.cap, p.keep_recent or 0),
    )


def shared_points(runs: Sequence[Points]) -> list[Point]:
    """Points that at least two of the runs have."""
    return in_order(point for point in set().union(*runs) if sum(point in run for run in runs) > 1)


def lone_points(runs: Mapping[str, Points]) -> dict[str, list[Point]]:
    """Run → points that it alone has; runs without any are left out."""
    shared = set(shared_points(list(runs.values())))
    alone = {name: in_order(points.keys() - shared) for name, points in runs.items()}
    return {name: points for name, points in alone.items() if points}


def metrics(cells: Sequence[CellResult]) -> Metrics:
    """Of one run's cells at one point."""
    return Metrics(
        seeds=tuple(sorted(cell.seed for cell in cells)),
        evaluations=_evaluations(cells),
        scored=sum(cell.scored for cell in cells),
        trials=sum(cell.n_trials for cell in cells),
        pass_at_1=pooled_mean(cells),
        interval=pooled_interval(cells),
        summary_tokens=pooled_mean(cells, "task_summary_tokens"),
        compactions=float(np.mean([cell.compactions_per_rollout for cell in cells])),
    )


def gain(run: Sequence[CellResult], reference: Sequence[CellResult]) -> Gain:
    """run − reference. Each seed is paired with itself where they have seeds in common; else every seed of the run
    with the one of the reference, task by task."""
    common = {cell.seed for cell in run} & {cell.seed for cell in reference}
    if common:
        run = [cell for cell in run if cell.seed in common]
        reference = [cell for cell in reference if cell.seed in common]
    comparison = compare_cells(run, reference)
    evaluations = _evaluations(run)
    return Gain(
        comparison=comparison,
        seeds=tuple(sorted(cell.seed for cell in run)) if comparison.n_tasks else (),
        tasks=len(_tasks(run) & _tasks(reference)) if comparison.n_tasks else 0,
        same_trials=bool(evaluations) and evaluations == _evaluations(reference),
    )


def _evaluations(cells: Sequence[CellResult]) -> tuple[str, ...]:
    """Empty where one was not recorded."""
    made_by = sorted(cell.mlflow_run_id or "" for cell in cells)
    return tuple(made_by) if all(made_by) else ()


def _tasks(cells: Sequence[CellResult]) -> set[str]:
    return {task for cell in cells for task in cell.task_scores}
