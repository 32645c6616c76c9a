"""What a command prints at its end: the plan, or the result table and where everything is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.runs import RunFolder

if TYPE_CHECKING:
    from evaluation.results import CellResult

STATUS_TEXT = {
    "ok": "[green]done[/]",
    "partial": "[yellow]partly done: some cells have no result[/]",
    "failed": "[red]failed[/]",
}


def print_plan(console: Console, plan: Mapping[str, Any]) -> None:
    """`plan` holds `stages` (name, label, cached, why); it may hold texts in `cells` and `warnings`, `model`, and
    `cost`."""
    table = Table("stage", "", "why", title="Plan", title_justify="left")
    for stage in plan["stages"]:
        state = "[green]cached[/]" if stage["cached"] else "[yellow]will run[/]"
        table.add_row(escape(_title(stage)), state, escape(stage["why"]))
    console.print(table)
    if cells := plan.get("cells"):
        console.print(f"{len(cells)} evaluation {'cell' if len(cells) == 1 else 'cells'}")
    if model := plan.get("model"):
        console.print(f"model: {escape(model)}", highlight=False, soft_wrap=True)
    for name, text in plan.get("cost", {}).items():
        console.print(f"{escape(name)}: {escape(str(text))}")
    for warning in plan.get("warnings", ()):
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)


def print_result(console: Console, result: Mapping[str, Any], run: RunFolder) -> None:
    """`result` is what results.json holds, and `open`: how to look at it."""
    console.print(_stage_table(result))
    console.print(_result_table(result))
    for line in answer_lines(result):
        console.print(f"· {escape(line)}", highlight=False)
    places = {"report": run.report, "table": run.path / "sweep.csv", "trials": result.get("jobs"), "folder": run.path}
    lines = {name: str(path) for name, path in places.items() if path and Path(path).exists()}
    lines |= {f"open {name}": command for name, command in result.get("open", {}).items()}
    if result["status"] != "ok":
        lines["log"] = str(run.logs / "run.log")
    lines["resume" if result["status"] != "ok" else "run again"] = str(run.record["command"])
    console.print(STATUS_TEXT[result["status"]])
    print_places(console, result.get("errors", []), lines)


def print_places(console: Console, errors: Sequence[str], places: Mapping[str, str]) -> None:
    """What went wrong, and where everything is."""
    for error in errors:
        console.print(f"  [red]✗[/] {escape(_message(error))}", highlight=False, soft_wrap=True)
    width = max(map(len, places))
    for name, text in places.items():
        console.print(f"  [bold]{name:<{width}}[/]  {escape(text)}", highlight=False, soft_wrap=True)


def _message(error: str) -> str:
    """What a person needs of an error in results.json: a class of ours says nothing that the message does not."""
    return error.removeprefix("UserError: ").removeprefix("CommandError: ")


def _stage_table(result: Mapping[str, Any]) -> Table:
    table = Table("stage", "seconds", "why it ran", title="Stages", title_justify="left")
    for stage in result.get("stages", []):
        seconds = "" if stage["cached"] else f"{stage['seconds']:.0f}"
        table.add_row(escape(_title(stage)), seconds, "cached" if stage["cached"] else escape(stage["why"]))
    return table


def result_rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the result as text: settings against each other, or variants beside the paper's findings."""
    cells = _cells(result)
    if result["sweep"]:
        from evaluation.analysis.sweep import sweep_table
        from evaluation.analysis.sweep_tables import ANSWER_COLUMNS, answer_row

        several = len({cell.variant for cell in cells}) > 1
        texts = [list(answer_row(row))[not several :] for row in sweep_table(cells)]
        return list(ANSWER_COLUMNS)[not several :], texts
    from evaluation.analysis.pooling import PresetPoint
    from evaluation.analysis.tables import RESULT_COLUMNS, format_row, result_table

    rows = result_table(cells, PresetPoint.model_validate(result["preset_point"]))
    return list(RESULT_COLUMNS), [list(format_row(row)) for row in rows]


def answer_lines(result: Mapping[str, Any]) -> list[str]:
    """What a sweep says, in sentences; none for a reproduction."""
    if not result["sweep"]:
        return []
    from evaluation.analysis.sweep import factor_answers, sweep_table
    from evaluation.analysis.sweep_tables import TERMINAL_NOTE, factor_lines, sweep_answers

    cells = _cells(result)
    return [*sweep_answers(sweep_table(cells)), *factor_lines(factor_answers(cells)), TERMINAL_NOTE]


def _cells(result: Mapping[str, Any]) -> list[CellResult]:
    from evaluation.results import CellResult

    return [CellResult.model_validate(cell) for cell in result["results"]]


def _result_table(result: Mapping[str, Any]) -> Table:
    columns, rows = result_rows(result)
    title = "Every setting" if result["sweep"] else "Results, beside the paper's"
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        leading=1,
    )
    for number, column in enumerate(columns):
        table.add_column(column.removesuffix(" [95%]"), no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _title(stage: Mapping[str, Any]) -> str:
    return f"{stage['name']} {stage.get('label') or ''}".strip()
