"""Runs beside each other: what differs in their settings, what came out, and whether the difference is more than luck.

The first run is the one that the others are compared with.
"""

from __future__ import annotations

import json
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compaction.differences import MISSING, flatten
from evaluation.analysis.comparison import (
    Gain,
    Metrics,
    Point,
    Points,
    by_point,
    gain,
    lone_points,
    metrics,
    shared_points,
)
from evaluation.analysis.tables import format_difference, format_interval, format_p, format_score
from evaluation.results import CellResult
from flows.reproduce import read_curves
from flows.runs import RunFolder, find_run
from flows.services import Home
from tasks.errors import CommandError, UserError

LETTERS = string.ascii_uppercase
NAMED_POINTS = 4
"""Points that only one run has, spelled out; the rest is counted"""
REPEATED_PROVENANCE = ("config", "config_digest", "preset", "seeds")
"""What the settings say already"""


@dataclass(frozen=True)
class Side:
    """One of the runs."""

    letter: str
    run: RunFolder
    results: dict[str, Any]

    @cached_property
    def points(self) -> Points:
        return by_point(CellResult.model_validate(cell) for cell in self.results["results"])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Dotted, with the commit and versions it ran with."""
        provenance = {k: v for k, v in self.results["provenance"].items() if k not in REPEATED_PROVENANCE}
        return flatten(self.run.record["experiment"]) | flatten(provenance)

    @property
    def task_source(self) -> dict[str, Any]:
        """What its tasks are drawn from: a task of the same name from another world is another task."""
        return {k: v for k, v in self.settings.items() if k.startswith("world.") or k == "evaluation.split"}


@dataclass(frozen=True)
class Sheet:
    """A table as text, for a terminal or for Markdown."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


@dataclass(frozen=True)
class RunComparison:
    """Everything that is printed."""

    sides: list[Side]
    settings: dict[str, list[Any]]
    """Those that differ: dotted name → value per run"""
    metrics: dict[Point, dict[str, Metrics]]
    """Per point that at least two runs have: run's letter → its metrics"""
    gains: dict[Point, dict[str, Gain]]
    """Over the first run"""
    lone: dict[str, list[Point]]
    """Run's letter → points that it alone has"""
    other_tasks: dict[str, list[str]]
    """Run's letter → settings by which its tasks are others than the first run's"""
    curves: Path | None


def compare_runs(
    home: Home,
    names: Sequence[str],
    *,
    markdown: bool = False,
    json_output: bool = False,
    console: Console | None = None,
) -> None:
    """Print the comparison as tables, Markdown or one JSON object. Raises UserError and CommandError."""
    if markdown and json_output:
        raise UserError("--md and --json are two forms of the same output; choose one")
    compared = compare(home, find_runs(home, names))
    if json_output:
        print(json.dumps(as_json(compared), indent=2, allow_nan=False))
    elif markdown:
        typer.echo(render_markdown(compared))
    else:
        print_comparison(console or Console(), compared)


def find_runs(home: Home, names: Sequence[str]) -> list[RunFolder]:
    """At least two different runs. Raises UserError."""
    if not 2 <= len(names) <= len(LETTERS):
        raise UserError(
            f"{len(names)} given, but a comparison takes 2 to {len(LETTERS)} runs: compactionrl compare A B"
        )
    runs: dict[Path, str] = {}
    for name in names:
        path = find_run(home, name).path
        if path in runs:
            raise UserError(f"{name!r} and {runs[path]!r} are the same run, {path.name}; name two different ones")
        runs[path] = name
    return [find_run(home, str(path)) for path in runs]


def compare(home: Home, runs: Sequence[RunFolder]) -> RunComparison:
    """Reads the runs and draws their curves into the home's folder `compare`. Raises CommandError."""
    sides = [Side(letter, run, run.read_results()) for letter, run in zip(LETTERS, runs, strict=False)]
    first = sides[0]
    points = shared_points([side.points for side in sides])
    others = {side.letter: _changed([first.task_source, side.task_source]) for side in sides[1:]}
    return RunComparison(
        sides=sides,
        settings=_changed([side.settings for side in sides]),
        metrics={
            point: {side.letter: metrics(side.points[point]) for side in sides if point in side.points}
            for point in points
        },
        gains={
            point: {
                side.letter: gain(side.points[point], first.points[point])
                for side in sides[1:]
                if point in side.points and not others[side.letter]
            }
            for point in points
            if point in first.points
        },
        lone=lone_points({side.letter: side.points for side in sides}),
        other_tasks={letter: list(changed) for letter, changed in others.items() if changed},
        curves=_draw_curves(home, sides),
    )


def _changed(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = sorted(set().union(*settings))
    values = {name: [each.get(name, MISSING) for each in settings] for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def _draw_curves(home: Home, sides: Sequence[Side]) -> Path | None:
    from evaluation.analysis.plots import write_run_curves
    from evaluation.analysis.report import CURVES

    runs = {f"{s.letter}  {s.run.name}": read_curves(s.results["stages"], home.stages) for s in sides}
    if not any(runs.values()):
        return None
    folder = home.root / "compare" / time.strftime("%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return write_run_curves(folder / "curves.png", runs, [(metric, label) for _, metric, label in CURVES])
    except OSError as error:
        raise CommandError(f"cannot write the curves to {folder}: {error.strerror}; free or unlock it") from error


def print_comparison(console: Console, compared: RunComparison) -> None:
    for sheet in _sheets(compared):
        table = Table(
            title=escape(sheet.title), title_justify="left", caption=escape(sheet.note), caption_justify="left"
        )
        for column in sheet.columns:
            table.add_column(escape(column), overflow="fold")
        for row in sheet.rows:
            table.add_row(*map(escape, row))
        console.print(table)
    for line in _lines(compared):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def render_markdown(compared: RunComparison) -> str:
    parts = []
    for sheet in _sheets(compared):
        rows = [sheet.columns, ("---",) * len(sheet.columns), *sheet.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)
        parts += [f"## {sheet.title}", body, *([sheet.note] if sheet.note else [])]
    parts += _lines(compared)
    return "\n\n".join(parts)


def as_json(compared: RunComparison) -> dict[str, Any]:
    """One object; runs are named by their letters everywhere but in `runs`."""
    return {
        "runs": [
            {
                "letter": side.letter,
                "name": side.run.name,
                "path": str(side.run.path),
                "status": side.results["status"],
                "mlflow_run_id": side.results["mlflow_run_id"],
                "command": side.run.record["command"],
            }
            for side in compared.sides
        ],
        "settings": {
            name: {
                side.letter: value for side, value in zip(compared.sides, values, strict=True) if value is not MISSING
            }
            for name, values in compared.settings.items()
        },
        "points": [
            asdict(point)
            | {
                "metrics": {letter: asdict(values) for letter, values in by_run.items()},
                "gains": {letter: asdict(found) for letter, found in compared.gains.get(point, {}).items()},
            }
            for point, by_run in compared.metrics.items()
        ],
        "only_in": {letter: [asdict(point) for point in points] for letter, points in compared.lone.items()},
        "other_tasks": compared.other_tasks,
        "curves": str(compared.curves) if compared.curves else None,
    }


def _sheets(compared: RunComparison) -> list[Sheet]:
    runs = [
        (side.letter, side.run.name, side.results["status"], str(side.run.record["command"])) for side in compared.sides
    ]
    sheets = [Sheet("Runs", ("", "run", "status", "command"), runs)]
    if compared.settings:
        rows = [(name, *map(_value, values)) for name, values in compared.settings.items()]
        sheets.append(Sheet("Changed settings", ("setting", *(s.letter for s in compared.sides)), rows))
    if compared.metrics:
        sheets.append(_metrics_sheet(compared))
    if any(not found.same_trials for by_run in compared.gains.values() for found in by_run.values()):
        sheets.append(_gains_sheet(compared))
    return sheets


def _metrics_sheet(compared: RunComparison) -> Sheet:
    columns = ("variant", "evaluated at", "run", "seeds", "pass@1 [95%]", "summary tokens", "compactions")
    rows = [
        (
            *(_heading(point) if number == 0 else ("", "")),
            letter,
            _numbers(values.seeds),
            f"{format_score(values.pass_at_1)} {format_interval(values.interval)}".strip() + _coverage(values),
            "–" if values.summary_tokens is None else f"{values.summary_tokens:,.1f}",
            f"{values.compactions:.2f}",
        )
        for point, by_run in compared.metrics.items()
        for number, (letter, values) in enumerate(_joined(by_run).items())
    ]
    return Sheet("Results in the settings they share", columns, rows)


def _joined(by_run: Mapping[str, Metrics]) -> dict[str, Metrics]:
    """Runs that reuse the same trials share a row: `A, C`."""
    letters: dict[tuple[str, ...], list[str]] = {}
    for letter, values in by_run.items():
        letters.setdefault(values.evaluations or (letter,), []).append(letter)
    return {", ".join(group): by_run[group[0]] for group in letters.values()}


def _gains_sheet(compared: RunComparison) -> Sheet:
    first = compared.sides[0].letter
    columns = ("variant", "evaluated at", "run", "gain [95%]", "p", "test", "common tasks")
    rows = [
        (*_heading(point), f"{letter} − {first}", *_gain_row(found))
        for point, by_run in compared.gains.items()
        for letter, found in by_run.items()
        if not found.same_trials
    ]
    note = "Paired by seed and task. Each p stands for its row alone: it is not corrected for the number of rows."
    return Sheet(f"Gain in pass@1 over {first} on common tasks", columns, rows, note)


def _gain_row(found: Gain) -> tuple[str, str, str, str]:
    tasks = f"{found.tasks:,}" + (f" × {len(found.seeds)} seeds" if len(found.seeds) > 1 else "")
    if found.comparison.n_only_one:
        tasks += f" ({found.comparison.n_only_one:,} more in one run only)"
    return format_difference(found.comparison), format_p(found.comparison.p), found.comparison.test or "–", tasks


def _lines(compared: RunComparison) -> list[str]:
    """What no table says."""
    first = compared.sides[0].letter
    lines = []
    if not compared.settings:
        lines.append("No setting differs, nor commit or version.")
    if not compared.metrics:
        lines.append("The runs share no setting that both were evaluated in: nothing to compare but their curves.")
    for side in compared.sides[1:]:
        gains = [by_run[side.letter] for by_run in compared.gains.values() if side.letter in by_run]
        if reused := sum(found.same_trials for found in gains):
            lines.append(
                f"{side.letter} reuses {first}'s trials in {reused:,} of {len(gains):,}: nothing to test there."
            )
    for letter, settings in compared.other_tasks.items():
        lines.append(f"{letter} was evaluated on other tasks than {first} ({', '.join(settings)}): no paired test.")
    if compared.lone:
        lines.append("; ".join(f"only {letter} has {_named(points)}" for letter, points in compared.lone.items()))
    if compared.curves:
        lines.append(f"training curves: {compared.curves}")
    else:
        lines.append("no training curves: no training stage of these runs is there")
    return lines


def _named(points: Sequence[Point]) -> str:
    names = [" · ".join(_heading(point)) for point in points[:NAMED_POINTS]]
    more = f" and {len(points) - NAMED_POINTS:,} more" if len(points) > NAMED_POINTS else ""
    return ", ".join(names) + more


def _heading(point: Point) -> tuple[str, str]:
    return point.variant, point.setting


def _coverage(values: Metrics) -> str:
    return "" if values.scored == values.trials else f" ({values.scored / values.trials:.1%} scored)"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _value(value: Any) -> str:
    """As it is written in `--set`."""
    if isinstance(value, list):
        return ",".join(map(_value, value)) or "(none)"
    return value if isinstance(value, str) else json.dumps(value)
