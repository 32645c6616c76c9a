"""A sweep as heat maps: window × cap, a panel per keep_recent, and one narrow panel for cap 0, where nothing is kept.

Cividis: perceptually uniform, and the same to colour-blind readers. One scale serves every map made of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from evaluation.analysis.drawing import INK, STYLE, svg
from evaluation.analysis.sweep import SweepRow, families
from evaluation.analysis.sweep_tables import format_cost
from evaluation.grid import format_tokens

_STYLE = STYLE | {"axes.grid": False, "axes.spines.left": False, "axes.spines.bottom": False, "hatch.linewidth": 0.8}
_SHADES = 32
"""Matplotlib writes a colour bar of 50 shades or more as a bitmap."""
_MARKS = {"best": " ★", "inside the noise": " ≈", "worse": "", None: ""}


@dataclass(frozen=True)
class HeatMap:
    """The maps of one family, drawn."""

    variant: str
    temperature: float
    inches: float
    """Width"""
    svg: str


def pass_at_1_maps(rows: Sequence[SweepRow]) -> list[HeatMap]:
    """Per family with at least two scored settings: pass@1, ± half its 95% interval, ★ the best, ≈ inside the noise."""
    return _maps(rows, "pass@1", lambda row: row.pass_at_1, _score_text)


def cost_maps(rows: Sequence[SweepRow]) -> list[HeatMap]:
    """Per family whose settings cost something: US dollars per trial."""
    return _maps(rows, "US dollars per trial", lambda row: row.cost_per_trial or None, _cost_text)


Value = Callable[[SweepRow], float | None]


def _maps(rows: Sequence[SweepRow], label: str, value: Value, text: Callable[[SweepRow], str]) -> list[HeatMap]:
    known = [number for row in rows if (number := value(row)) is not None]
    if not known:
        return []
    scale = ScalarMappable(
        Normalize(min(known), max(known) if max(known) > min(known) else min(known) + 1),
        colormaps["cividis"].resampled(_SHADES),
    )
    return [
        _draw(group, label, scale, value, text)
        for group in families(rows).values()
        if sum(value(row) is not None for row in group) > 1
    ]


def _draw(
    rows: Sequence[SweepRow], label: str, scale: ScalarMappable, value: Value, text: Callable[[SweepRow], str]
) -> HeatMap:
    variant, temperature = rows[0].variant, rows[0].temperature
    windows = sorted({row.window for row in rows})
    caps = sorted({row.cap for row in rows if row.cap})
    keeps = sorted({row.keep_recent for row in rows if row.keep_recent is not None})
    panels: list[tuple[str, list[int], int | None]] = [("", [0], None)] if any(row.cap == 0 for row in rows) else []
    panels += [(f"keep {keep}", caps, keep) for keep in keeps]
    widths = [len(columns) for _, columns, _ in panels]
    inches = 1.6 + 0.85 * sum(widths) + 0.15 * len(widths)
    with rc_context(_STYLE):
        figure = Figure(figsize=(inches, 1.1 + 0.62 * len(windows)), layout="constrained")
        axes_row = figure.subplots(1, len(panels), squeeze=False, sharey=True, width_ratios=widths)[0]
        for axes, (name, columns, keep) in zip(axes_row, panels, strict=True):
            _frame(axes, name, columns, windows)
            for row in rows:
                if row.keep_recent == keep:
                    place = (columns.index(row.cap), windows.index(row.window))
                    _square(axes, place, row, scale, value(row), text(row))
        axes_row[0].set_ylabel("context window (tokens)")
        bar = figure.colorbar(scale, ax=list(axes_row), label=label, pad=0.02, aspect=14)
        bar.outline.set_visible(False)
        figure.supxlabel("most compactions per rollout", fontsize=10)
        return HeatMap(variant, temperature, inches, svg(figure, f"{label}, {variant}, temperature {temperature:g}"))


def _frame(axes: Axes, name: str, columns: Sequence[int], windows: Sequence[int]) -> None:
    axes.set_title(name, fontsize=10)
    axes.set_xticks(range(len(columns)), [str(cap) for cap in columns])
    axes.set_yticks(range(len(windows)), [format_tokens(window) for window in windows])
    axes.tick_params(length=0)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(windows) - 0.5)


def _square(
    axes: Axes, place: tuple[int, int], row: SweepRow, scale: ScalarMappable, value: float | None, text: str
) -> None:
    x, y = place
    if value is None:
        axes.add_patch(_box(x, y, facecolor="none", edgecolor=INK, linewidth=0.6, alpha=0.4))
        axes.text(x, y, "no score", ha="center", va="center", fontsize=7.5)
        return
    red, green, blue, _ = scale.to_rgba(np.array([value]))[0]
    text_colour = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
    axes.add_patch(_box(x, y, facecolor=(red, green, blue), linewidth=0))
    if row.coverage < 1:
        axes.add_patch(_box(x, y, facecolor="none", edgecolor=text_colour, hatch="///", alpha=0.35, linewidth=0))
    if row.verdict == "best":
        axes.add_patch(_box(x, y, facecolor="none", edgecolor=INK, linewidth=2.2))
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5, color=text_colour, linespacing=1.35)


def _box(x: int, y: int, **style: Any) -> Rectangle:
    return Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, **style)


def _score_text(row: SweepRow) -> str:
    interval = row.interval
    spread = f"\n±{(interval.high - interval.low) / 2:.2f}" if interval else ""
    return f"{row.pass_at_1 or 0.0:.2f}{_MARKS[row.verdict]}{spread}"


def _cost_text(row: SweepRow) -> str:
    return format_cost(row.cost_per_trial) + _MARKS[row.verdict]
