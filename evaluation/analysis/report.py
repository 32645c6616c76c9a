"""One self-contained HTML page of a run: figures inside, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from evaluation.analysis import plots, tables
from evaluation.analysis.paper import Paper, load_paper
from evaluation.analysis.plots import CurvePoint
from evaluation.analysis.pooling import PresetPoint
from evaluation.analysis.report_sweep import sweep_page
from evaluation.analysis.sweep import SweepRow
from evaluation.analysis.sweep_tables import format_cost
from evaluation.analysis.tables import ResultRow
from evaluation.grid import format_tokens
from evaluation.results import CellResult


@dataclass(frozen=True)
class ReportData:
    """All that the page shows. It can be made from the `--json` object and the training metrics alone."""

    title: str
    preset: PresetPoint
    cells: Sequence[CellResult]
    curves: Sequence[CurvePoint] = ()
    provenance: Mapping[str, object] = field(default_factory=dict)
    """What was run: configuration, seeds, git commit, versions. Plain values stand in a list, nested ones as JSON."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Label to address or path: MLflow, Prefect, the output folder."""
    sweep: bool = False
    """Every combination of window, cap and keep_recent, not one factor at a time around the preset's point."""


@dataclass(frozen=True)
class Chart:
    """A figure and what it shows."""

    title: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class SummaryRow:
    """Summary length of a variant beside the paper's."""

    variant: str
    tokens: str
    change: str
    p: str
    paper: str


def write_report(path: Path, data: ReportData) -> Path:
    """Writes the page and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_report(data), encoding="utf-8")
    return path


def render_report(data: ReportData) -> str:
    """The page as HTML text. The same data gives the same text."""
    rows = tables.result_table(data.cells, data.preset)
    sweep = sweep_page(data.cells) if data.sweep else None
    if sweep:  # a model of the user's own has no place beside the paper's
        rows = [row for row in rows if row.variant in tables.VARIANT_ORDER]
    environment = Environment(
        loader=PackageLoader("evaluation.analysis", "."),
        autoescape=select_autoescape(["html", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        data=data,
        sweep=sweep,
        leads=sweep.answers if sweep else [_lead(rows, data)],
        columns=tables.RESULT_COLUMNS,
        rows=[(row, plots.look(row.variant), tables.format_row(row)) for row in rows],
        looks=[(variant, plots.look(variant)) for variant in tables.variants_in(data.cells)],
        charts=_charts(data, rows),
        summaries=_summary_rows(rows, load_paper()),
        cell_columns=_CELL_COLUMNS,
        cell_rows=[_cell_row(cell) for cell in _in_order(data.cells)],
        findings=load_paper().findings,
        cautions=_cautions(sweep.rows if sweep else rows, data),
        plain=[(name, value) for name, value in data.provenance.items() if not isinstance(value, dict | list | tuple)],
        nested=[
            (name, json.dumps(value, indent=2, default=str))
            for name, value in data.provenance.items()
            if isinstance(value, dict | list | tuple)
        ],
    )


def _lead(rows: Sequence[ResultRow], data: ReportData) -> str:
    own = {row.variant: row for row in rows if not row.long}
    trained, base = own.get("compactionrl"), own.get("base")
    point = f"a window of {format_tokens(data.preset.window)} tokens with up to {data.preset.cap} compactions"
    if not trained or not base or trained.pass_at_1 is None or base.pass_at_1 is None or not trained.gain:
        return f"Evaluated in {point}."
    return (
        f"In {point}, compactionrl solves {trained.pass_at_1:.1%} of the tasks and base {base.pass_at_1:.1%}: "
        f"{tables.format_difference(trained.gain)} on the {trained.gain.n_tasks:,} pairs of seed and task that both "
        f"have a score for."
    )


def _charts(data: ReportData, rows: Sequence[ResultRow]) -> list[tuple[str, list[Chart]]]:
    sweep = [
        _chart(
            f"Sweep: {title}",
            "Means over seeds with 95% intervals; the shaded value is the preset's, where the other factors stay.",
            plots.sweep_figure(data.cells, data.preset, factor),
        )
        for factor, title in _FACTORS
    ]
    bars = _chart(
        "pass@1 by variant",
        "Means over seeds with 95% intervals.",
        plots.pass_at_1_bars(rows),
    )
    split = _chart(
        "Compacted or not",
        "Filled: trials that compacted or tried to. Hollow: the others. The two groups hold different tasks.",
        plots.compacted_split(rows),
    )
    curves = [
        _chart(
            title,
            "Thin: one seed each. Bold: their mean.",
            plots.training_curves(data.curves, metric, label),
        )
        for title, metric, label in CURVES
    ]
    sections = [("Results at the preset's own point", [bars, split]), ("Training", curves)]
    if not data.sweep:
        sections.append(("Sweeps", sweep))
    return [(title, [c for c in charts if c]) for title, charts in sections if any(charts)]


def _chart(title: str, caption: str, svg: str | None) -> Chart | None:
    return Chart(title, caption, Markup(svg)) if svg else None


_FACTORS: tuple[tuple[plots.Factor, str], ...] = (
    ("window", "context window"),
    ("cap", "compactions allowed"),
    ("keep_recent", "recent turns kept"),
)
CURVES = (
    ("Reward in training", plots.REWARD, "mean reward of the batch"),
    ("Summary length in training", plots.SUMMARY_TOKENS, "tokens per summary"),
)


def _summary_rows(rows: Sequence[ResultRow], paper: Paper) -> list[SummaryRow]:
    lengths = {length.variant: length for length in paper.summary_lengths}
    result = []
    for row in rows:
        if row.long or row.summary_tokens is None:
            continue
        length = lengths.get(row.variant)
        result.append(
            SummaryRow(
                variant=row.variant,
                tokens=f"{row.summary_tokens:,.1f}",
                change=tables.format_difference(row.summary_change, digits=1),
                p=tables.format_p(row.summary_change.p if row.summary_change else None),
                paper="–" if length is None else f"{length.start:,.0f} → {length.end:,.0f}",
            )
        )
    return result


_CELL_COLUMNS = (
    "variant",
    "seed",
    "window",
    "cap",
    "keep",
    "temp.",
    "pass@1 [95%]",
    "± std (repeats)",
    "compacted",
    "not compacted",
    "compactions",
    "summary tokens",
    "turns",
    "commands (again)",
    "prompt tokens (cached)",
    "sampled tokens",
    "cost, $",
    "scored / trials",
    "stopped as",
)


def _cell_row(cell: CellResult) -> tuple[str, ...]:
    return (
        cell.variant,
        str(cell.seed),
        format_tokens(cell.window),
        str(cell.cap),
        "–" if cell.keep_recent is None else str(cell.keep_recent),
        f"{cell.temperature:g}",
        f"{tables.format_score(cell.pass_at_1)} {tables.format_interval(cell.interval)}".strip(),
        f"{tables.format_score(cell.pass_at_1_std)} ({cell.repeats})",
        tables.format_score(cell.pass_at_1_compacted),
        tables.format_score(cell.pass_at_1_uncompacted),
        f"{cell.compactions_per_rollout:.2f}",
        "–" if cell.summary_tokens is None else f"{cell.summary_tokens:,.1f}",
        f"{cell.turns:.1f}",
        f"{cell.commands:.1f} ({cell.repeated_commands:.1f})",
        f"{cell.prompt_tokens:,.0f} ({cell.cached_tokens:,.0f})",
        f"{cell.generated_tokens:,.0f}",
        format_cost(cell.cost),
        f"{cell.scored:,} / {cell.n_trials:,}" + ("" if cell.coverage == 1 else f" ({cell.coverage:.1%})"),
        ", ".join(f"{name} {count:,}" for name, count in sorted(cell.stop_reasons.items(), key=lambda i: -i[1])),
    )


def _in_order(cells: Sequence[CellResult]) -> list[CellResult]:
    order = {variant: i for i, variant in enumerate(tables.variants_in(cells))}
    return sorted(
        cells,
        key=lambda c: (order[c.variant], c.temperature == 0, c.window, c.cap, c.keep_recent or 0, c.seed),
    )


def _cautions(rows: Sequence[ResultRow | SweepRow], data: ReportData) -> list[str]:
    cautions = []
    errored = sum(cell.errored for cell in data.cells)
    if errored:
        n_trials = sum(cell.n_trials for cell in data.cells)
        cautions.append(
            f"{errored:,} of {n_trials:,} trials have no reward because something outside the agent failed. They are "
            "in no score; if they failed on hard tasks, the scores are too high."
        )
    if any(row.seeds == 1 and row.variant in tables.VARIANT_ORDER for row in rows):
        cautions.append(
            "Some variants ran with one training seed: nothing here says how much another seed would differ."
        )
    if any(row.interval and row.interval.low == row.interval.high for row in rows):
        cautions.append(
            "An interval of no width means that every task had the same score; it says nothing about tasks not seen."
        )
    return cautions
