"""The headline table: one row per variant at the preset's own point, beside what the paper finds."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from evaluation.analysis.paper import load_paper
from evaluation.analysis.pooling import (
    PresetPoint,
    by_seed,
    compare_cells,
    own_cells,
    pooled_interval,
    pooled_mean,
)
from evaluation.analysis.statistics import Comparison, Interval, mean_std
from evaluation.grid import format_tokens
from evaluation.results import CellResult

VARIANT_ORDER = (
    "zero-shot",
    "base",
    "compactionrl",
    "no-summary-loss",
    "no-compaction",
    "no-compaction-long",
    "segment-mean",
    "no-cross-segment",
    "exact-cross-segment",
    "supo",
    "grpo",
    "sao",
)

RESULT_COLUMNS = (
    "variant",
    "evaluated at",
    "pass@1 [95%]",
    "gain over base [95%]",
    "p",
    "summary tokens",
    "compactions",
    "paper's gain, points",
)


@dataclass(frozen=True)
class ResultRow:
    """A variant in one setting, all training seeds together. Scores in [0, 1]; None where there is nothing to say."""

    variant: str
    setting: str
    """Window and cap, for people."""
    long: bool
    """The one long window without compaction, not the preset's own point."""
    seeds: int
    coverage: float
    """Share of trials that have a reward."""
    pass_at_1: float | None
    interval: Interval | None
    seed_std: float | None
    """Sample standard deviation of the seeds' pass@1; None for one seed."""
    gain: Comparison | None
    """Over base in the same setting, paired by task; None for base itself and where base was not evaluated there."""
    summary_tokens: float | None
    """Mean over tasks of the task's mean summary length."""
    summary_change: Comparison | None
    """Summary length against base's, paired on the tasks where both compacted."""
    compactions: float
    pass_at_1_compacted: float | None
    pass_at_1_uncompacted: float | None
    paper: str
    """The paper's gain over base in points at 30B / 106B; empty where it has none."""


def variants_in(cells: Sequence[CellResult]) -> list[str]:
    """Variants that occur, in the order in which every table and figure shows them."""
    return sort_variants({cell.variant for cell in cells})


def sort_variants(names: Set[str]) -> list[str]:
    """The house's variants in its order, others after them by name."""
    known = [name for name in VARIANT_ORDER if name in names]
    return known + sorted(names - set(known))


def result_table(cells: Sequence[CellResult], preset: PresetPoint) -> list[ResultRow]:
    """One row per variant at the preset's own point, and one for those evaluated in the long window."""
    rows = []
    for long in (False, True):
        base = _setting(cells, preset, "base", long)
        for variant in variants_in(cells):
            group = _setting(cells, preset, variant, long)
            if group:
                rows.append(_row(group, [] if variant == "base" else base, long))
    return rows


def headline_metrics(cells: Sequence[CellResult], preset: PresetPoint) -> dict[str, float | None]:
    """The table as metrics of a whole run: `pass_at_1/VARIANT` and `gain/VARIANT` (over base) at the preset's point,
    `pass_at_1_long/…` and `gain_long/…` in the long window. Empty for a sweep that leaves both out.

    A model's name becomes one that MLflow takes: word characters, dots and dashes.
    """
    metrics: dict[str, float | None] = {}
    for row in result_table(cells, preset):
        suffix = "_long" if row.long else ""
        name = re.sub(r"[^\w.-]+", "_", row.variant, flags=re.ASCII).strip("._")[:200]
        metrics[f"pass_at_1{suffix}/{name}"] = row.pass_at_1
        metrics[f"gain{suffix}/{name}"] = row.gain.difference if row.gain else None
    return metrics


def format_row(row: ResultRow) -> tuple[str, ...]:
    """The row as text, in the order of RESULT_COLUMNS."""
    return (
        row.variant + ("" if row.coverage == 1 else f" ({row.coverage:.1%} scored)"),
        row.setting,
        f"{format_score(row.pass_at_1)} {format_interval(row.interval)}".strip(),
        format_difference(row.gain),
        format_p(row.gain.p if row.gain else None),
        "–" if row.summary_tokens is None else f"{row.summary_tokens:,.1f}",
        f"{row.compactions:.2f}",
        row.paper or "–",
    )


def format_score(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def format_interval(interval: Interval | None, digits: int = 3) -> str:
    return "" if interval is None else f"[{interval.low:.{digits}f}, {interval.high:.{digits}f}]".replace("-", "−")


def format_difference(comparison: Comparison | None, digits: int = 3) -> str:
    """Signed difference with its interval; a dash where there is none."""
    if comparison is None or comparison.difference is None:
        return "–"
    difference = f"{comparison.difference:+.{digits}f}".replace("-", "−")
    return f"{difference} {format_interval(comparison.interval, digits)}".strip()


def format_p(p: float | None) -> str:
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _setting(cells: Sequence[CellResult], preset: PresetPoint, variant: str, long: bool) -> list[CellResult]:
    if not long:
        return own_cells(cells, preset, variant)
    return by_seed(c for c in cells if c.variant == variant and preset.is_long(c.cell) and not c.cell.greedy)


def _row(group: list[CellResult], base: list[CellResult], long: bool) -> ResultRow:
    first = group[0]
    seed_scores = [cell.pass_at_1 for cell in group if cell.pass_at_1 is not None]
    return ResultRow(
        variant=first.variant,
        setting=f"{format_tokens(first.window)} × {first.cap + 1}",
        long=long,
        seeds=len(group),
        coverage=sum(cell.scored for cell in group) / sum(cell.n_trials for cell in group),
        pass_at_1=pooled_mean(group),
        interval=pooled_interval(group),
        seed_std=mean_std(seed_scores)[1],
        gain=compare_cells(group, base) if base else None,
        summary_tokens=pooled_mean(group, "task_summary_tokens"),
        summary_change=compare_cells(group, base, "task_summary_tokens") if base else None,
        compactions=float(np.mean([cell.compactions_per_rollout for cell in group])),
        pass_at_1_compacted=_mean_of([cell.pass_at_1_compacted for cell in group]),
        pass_at_1_uncompacted=_mean_of([cell.pass_at_1_uncompacted for cell in group]),
        paper=load_paper().direction(first.variant, long=long),
    )


def _mean_of(values: Sequence[float | None]) -> float | None:
    return mean_std([value for value in values if value is not None])[0]
