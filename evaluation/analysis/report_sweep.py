"""The part of a report that answers a sweep's question: which setting is best, and what is inside the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from evaluation.analysis import sweep_tables
from evaluation.analysis.heatmap import HeatMap, cost_maps, pass_at_1_maps
from evaluation.analysis.sweep import SweepRow, factor_answers, sweep_table
from evaluation.results import CellResult

_PASS_CAPTION = (
    "Below each score is half its 95% interval. ★ is the best, ≈ inside the noise. Hatched: some trials have no "
    "reward. Blank: not evaluated. Cap 0 keeps nothing and is drawn once."
)
_COST_CAPTION = "Marks are those of the scores. The lighter, the dearer."


@dataclass(frozen=True)
class MapGroup:
    """Heat maps of one quantity, a variant each, on one scale."""

    title: str
    caption: str
    maps: tuple[tuple[str, float, Markup], ...]
    """(whose, width in CSS pixels at which its text has its own size, SVG)"""


@dataclass(frozen=True)
class SweepPage:
    """All that the template shows of the sweep."""

    rows: tuple[SweepRow, ...]
    answers: tuple[str, ...]
    texts: tuple[tuple[SweepRow, tuple[str, ...]], ...]
    """Rows with their texts, in the order of `columns`"""
    factors: tuple[str, ...]
    groups: tuple[MapGroup, ...]
    columns: tuple[str, ...] = sweep_tables.SWEEP_COLUMNS
    notes: tuple[str, ...] = sweep_tables.SWEEP_NOTES
    factor_note: str = sweep_tables.FACTOR_NOTE


def sweep_page(cells: Sequence[CellResult]) -> SweepPage:
    rows = sweep_table(cells)
    groups = [
        MapGroup("pass@1 by window, cap and keep_recent", _PASS_CAPTION, _named(pass_at_1_maps(rows))),
        MapGroup("Cost by window, cap and keep_recent", _COST_CAPTION, _named(cost_maps(rows))),
    ]
    return SweepPage(
        rows=tuple(rows),
        answers=tuple(sweep_tables.sweep_answers(rows)),
        texts=tuple((row, sweep_tables.format_sweep_row(row)) for row in rows),
        factors=tuple(sweep_tables.factor_lines(factor_answers(cells))),
        groups=tuple(group for group in groups if group.maps),
    )


def _named(maps: Sequence[HeatMap]) -> tuple[tuple[str, float, Markup], ...]:
    return tuple((m.variant + (" · greedy" if m.temperature == 0 else ""), 96 * m.inches, Markup(m.svg)) for m in maps)
