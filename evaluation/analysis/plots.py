"""Figures of a run as SVG text for one HTML page.

Lines and text take the page's own colour (`currentColor`), so a figure reads in a light and in a dark page. Variants
differ by colour (Okabe and Ito's set, safe for colour-blind readers) and by marker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from evaluation.analysis.drawing import INK, STYLE, panel, svg
from evaluation.analysis.pooling import PresetPoint, own_cells, pooled, pooled_interval, pooled_mean
from evaluation.analysis.sweep import Factor
from evaluation.analysis.tables import ResultRow, sort_variants, variants_in
from evaluation.grid import format_tokens
from evaluation.results import CellResult

REWARD = "train/reward"
SUMMARY_TOKENS = "rollout/summary_tokens"


@dataclass(frozen=True)
class Look:
    """How a variant is drawn everywhere."""

    colour: str
    marker: str
    """matplotlib's name"""
    glyph: str
    """The same marker as a character, for the page's legend"""


_LOOKS = {
    "zero-shot": Look("#bbbbbb", "x", "✕"),
    "base": Look("#7f7f7f", "o", "●"),
    "compactionrl": Look("#0072b2", "s", "■"),
    "no-summary-loss": Look("#e69f00", "^", "▲"),
    "no-compaction": Look("#009e73", "v", "▼"),
    "no-compaction-long": Look("#56b4e9", "D", "◆"),
    "segment-mean": Look("#cc79a7", "P", "✚"),
    "no-cross-segment": Look("#8c564b", "*", "★"),
    "exact-cross-segment": Look("#b8a800", "p", "⬟"),
    "supo": Look("#332288", "h", "⬢"),
    "grpo": Look("#882255", "d", "⬧"),
    "sao": Look("#44aa99", "<", "◀"),
}
_OTHER_LOOK = Look("#d55e00", "X", "✖")
_DASHES = ("solid", "dashed", "dotted", "dashdot")


@dataclass(frozen=True)
class CurvePoint:
    """Training metrics after one step of one variant and seed, by MLflow's names."""

    variant: str
    seed: int
    step: int
    values: Mapping[str, float | None] = field(default_factory=dict)


def look(variant: str) -> Look:
    """Colour and marker of a variant."""
    return _LOOKS.get(variant, _OTHER_LOOK)


def training_curves(points: Sequence[CurvePoint], metric: str, label: str) -> str | None:
    """`metric` per training step: a thin line per seed, a bold one for their mean over the steps all have.

    None where no point has the metric.
    """
    lines = _lines(points, metric)
    if not lines:
        return None
    with rc_context(STYLE):
        figure, axes = panel(5.6, 3.4)
        for variant, seeds in lines.items():
            style = look(variant)
            for steps in seeds.values():
                axes.plot(list(steps), list(steps.values()), color=style.colour, linewidth=0.8, alpha=0.4)
            common, mean = _mean_line(seeds)
            axes.plot(common, mean, color=style.colour, linewidth=2)
            if common:
                axes.plot(common[-1], mean[-1], color=style.colour, marker=style.marker, markersize=6)
        _step_axis(axes, label)
        return svg(figure, f"{label} by training step")


def write_run_curves(
    path: Path, runs: Mapping[str, Sequence[CurvePoint]], metrics: Sequence[tuple[str, str]]
) -> Path | None:
    """Curves of several runs as one PNG, a panel per (metric, label): a colour per variant, a dash per run.

    Lines are means over seeds. The first run's are broad and pale, so that equal curves show too. None, and no file,
    where no run has any of the metrics.
    """
    by_label = {label: [_lines(points, metric) for points in runs.values()] for metric, label in metrics}
    panels = {label: lines for label, lines in by_label.items() if any(lines)}
    if not panels:
        return None
    drawn = {variant for lines in panels.values() for by_variant in lines for variant in by_variant}
    with rc_context(STYLE):
        figure = Figure(figsize=(5.6 * len(panels), 4.2), layout="constrained")
        for axes, (label, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            for number, by_variant in enumerate(lines):
                for variant, seeds in by_variant.items():
                    steps, means = _mean_line(seeds)
                    marker = "o" if len(steps) == 1 else ""  # a line of one point is nothing to see
                    axes.plot(steps, means, color=look(variant).colour, marker=marker, **_run_style(number))
            _step_axis(axes, label)
        handles = [Line2D([], [], color=look(variant).colour, label=variant) for variant in sort_variants(drawn)]
        handles += [Line2D([], [], color=INK, label=run, **_run_style(number)) for number, run in enumerate(runs)]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
        figure.savefig(path, dpi=150, transparent=False, facecolor="white")
    return path


def sweep_figure(cells: Sequence[CellResult], preset: PresetPoint, factor: Factor) -> str | None:
    """pass@1 over one factor with 95% intervals, the others at the preset's point; one line per variant.

    None where no variant was evaluated at two values of the factor.
    """
    series = _sweep_series(cells, preset, factor)
    values = sorted({value for by_value in series.values() for value in by_value})
    if len(values) < 2:
        return None
    with rc_context(STYLE):
        figure, axes = panel(4.4, 3.4)
        offsets = _dodge(len(series))
        for offset, (variant, by_value) in zip(offsets, series.items(), strict=True):
            style = look(variant)
            x = [values.index(value) + offset for value in sorted(by_value)]
            groups = [by_value[value] for value in sorted(by_value)]
            y = [pooled_mean(group) or 0.0 for group in groups]
            axes.errorbar(
                x, y, yerr=_error_bars(groups), color=style.colour, marker=style.marker, markersize=5, linewidth=1.5
            )
        axes.set_xticks(range(len(values)), [_tick(factor, value) for value in values])
        axes.set_xlabel(_FACTOR_LABELS[factor])
        _score_axis(axes)
        _mark_preset(axes, values, getattr(preset, factor))
        return svg(figure, f"pass@1 by {_FACTOR_LABELS[factor]}")


def pass_at_1_bars(rows: Sequence[ResultRow]) -> str | None:
    """pass@1 per row with its 95% interval."""
    rows = [row for row in rows if row.pass_at_1 is not None]
    if not rows:
        return None
    with rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure, axes = panel(5.6, 0.9 + 0.46 * len(rows))
        for y, row in enumerate(reversed(rows)):
            score = row.pass_at_1 or 0.0
            axes.barh(y, score, height=0.62, color=look(row.variant).colour, alpha=0.85)
            if row.interval:
                error = [[max(0.0, score - row.interval.low)], [max(0.0, row.interval.high - score)]]
                axes.errorbar(score, y, xerr=error, color=INK, linewidth=1.3, capsize=3)
        _row_axis(axes, list(reversed(rows)))
        return svg(figure, "pass@1 by variant")


def compacted_split(rows: Sequence[ResultRow]) -> str | None:
    """pass@1 of the trials that compacted (filled) and of those that did not (hollow), per row.

    None where no row has both.
    """
    splits = [
        (row, row.pass_at_1_compacted, row.pass_at_1_uncompacted)
        for row in reversed(rows)
        if row.pass_at_1_compacted is not None and row.pass_at_1_uncompacted is not None
    ]
    if not splits:
        return None
    with rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure, axes = panel(5.6, 0.9 + 0.46 * len(splits))
        for y, (row, compacted, other) in enumerate(splits):
            colour = look(row.variant).colour
            axes.plot([compacted, other], [y, y], color=colour, linewidth=1.5, alpha=0.6)
            axes.plot(compacted, y, "o", color=colour, markersize=8, clip_on=False)
            axes.plot(other, y, "o", color=colour, markersize=8, fillstyle="none", clip_on=False)
        _row_axis(axes, [row for row, _, _ in splits])
        return svg(figure, "pass@1 of compacted and other trials")


_FACTOR_LABELS: dict[Factor, str] = {
    "window": "context window (tokens)",
    "cap": "most compactions per rollout",
    "keep_recent": "recent turns kept",
}


def _lines(points: Sequence[CurvePoint], metric: str) -> dict[str, dict[int, dict[int, float]]]:
    """variant → seed → step → value, steps in order."""
    lines: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for point in sorted(points, key=lambda p: (p.variant, p.seed, p.step)):
        value = point.values.get(metric)
        if value is not None:
            lines[point.variant][point.seed][point.step] = value
    return {variant: dict(seeds) for variant, seeds in lines.items()}


def _mean_line(seeds: Mapping[int, Mapping[int, float]]) -> tuple[list[int], list[float]]:
    """Steps that all seeds have, and the mean over seeds at each."""
    common = sorted(set.intersection(*(set(steps) for steps in seeds.values())))
    return common, [float(np.mean([steps[step] for steps in seeds.values()])) for step in common]


def _run_style(number: int) -> dict[str, Any]:
    """How the lines of the first, second, … run differ."""
    broad = {"linewidth": 3.5, "alpha": 0.4} if number == 0 else {"linewidth": 1.6}
    return broad | {"linestyle": _DASHES[number % len(_DASHES)]}


def _sweep_series(
    cells: Sequence[CellResult], preset: PresetPoint, factor: Factor
) -> dict[str, dict[int, list[CellResult]]]:
    """variant → value of the factor → its cells, one per seed; cells without any score are left out."""
    series: dict[str, dict[int, list[CellResult]]] = {}
    for variant in variants_in(cells):
        own = [c for c in cells if c.variant == variant and not c.cell.greedy]
        by_value = {
            value: group
            for value in sorted({getattr(c, factor) for c in own} - {None})
            if pooled(group := own_cells(own, _moved(preset, factor, value), variant))
        }
        if len(by_value) > 1:
            series[variant] = by_value
    return series


def _moved(preset: PresetPoint, factor: Factor, value: int) -> PresetPoint:
    return PresetPoint(**{**dict(preset), factor: value})


def _error_bars(groups: Sequence[list[CellResult]]) -> np.ndarray:
    bars = []
    for group in groups:
        mean, interval = pooled_mean(group), pooled_interval(group)
        if mean is None or interval is None:
            bars.append((0.0, 0.0))
        else:
            bars.append((max(0.0, mean - interval.low), max(0.0, interval.high - mean)))
    return np.array(bars).T


def _bar_label(row: ResultRow) -> str:
    return f"{row.variant}\n({row.setting})" if row.long else row.variant


def _tick(factor: Factor, value: int) -> str:
    return format_tokens(value) if factor == "window" else str(value)


def _dodge(n: int) -> np.ndarray:
    return np.linspace(-0.05, 0.05, n) * (n - 1) if n > 1 else np.zeros(1)


def _row_axis(axes: Axes, rows: Sequence[ResultRow]) -> None:
    """Rows from the bottom up against pass@1 from 0 to 1."""
    axes.set_yticks(range(len(rows)), [_bar_label(row) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1)
    axes.set_xlabel("pass@1")


def _step_axis(axes: Axes, label: str) -> None:
    axes.set_xlabel("training step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _score_axis(axes: Axes) -> None:
    axes.set_ylabel("pass@1")
    axes.set_ylim(bottom=0)


def _mark_preset(axes: Axes, values: Sequence[int], own: int) -> None:
    if own in values:
        axes.axvspan(values.index(own) - 0.4, values.index(own) + 0.4, color=INK, alpha=0.05, linewidth=0)
