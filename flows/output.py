"""What a command prints at its end: the plan, or the result table and where everything is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.runs import RunFolder

STATUS_TEXT = {
    "ok": "[green]done[/]",
    "partial": "[yellow]partly done: some cells have no result[/]",
    "failed": "[red]failed[/]",
}


def print_plan(console: Console, plan: Mapping[str, Any]) -> None:
    """`plan` holds `stages` (name, label, cached, why) and may hold `cells` (texts) and `cost` (name → text)."""
    table = Table("stage", "", "why", title="Plan", title_justify="left")
    for stage in plan["stages"]:
        state = "[green]cached[/]" if stage["cached"] else "[yellow]will run[/]"
        table.add_row(escape(_title(stage)), state, escape(stage["why"]))
    console.print(table)
    if cells := plan.get("cells"):
        console.print(f"{len(cells)} evaluation cells")
        for cell in cells:
            console.print(f"  {escape(str(cell))}", highlight=False)
    for name, text in plan.get("cost", {}).items():
        console.print(f"{escape(name)}: {escape(str(text))}")


def print_result(console: Console, result: Mapping[str, Any], run: RunFolder) -> None:
    """`result` holds `status`, `stages`, `results` (CellResult), and may hold `preset_point` (PresetPoint), which
    the table beside the paper's findings is made around."""
    console.print(_stage_table(result))
    if result.get("results") and result.get("preset_point"):
        console.print(_result_table(result))
    places = {"report": run.report if run.report.exists() else None, "folder": run.path}
    lines = {name: str(path) for name, path in places.items() if path}
    lines |= {f"open {name}": command for name, command in result.get("open", {}).items()}
    if result["status"] != "ok":
        lines["log"] = str(run.logs / "run.log")
    lines["resume" if result["status"] != "ok" else "run again"] = str(run.record["command"])
    console.print(STATUS_TEXT[result["status"]])
    width = max(map(len, lines))
    for name, text in lines.items():
        console.print(f"  [bold]{name:<{width}}[/]  {escape(text)}", highlight=False, soft_wrap=True)


def _stage_table(result: Mapping[str, Any]) -> Table:
    table = Table("stage", "seconds", "", title="Stages", title_justify="left")
    for stage in result.get("stages", []):
        seconds = "" if stage["cached"] else f"{stage['seconds']:.0f}"
        table.add_row(escape(_title(stage)), seconds, "cached" if stage["cached"] else escape(stage["why"]))
    return table


def result_rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table beside the paper's findings, as text."""
    from evaluation.analysis.pooling import PresetPoint
    from evaluation.analysis.tables import RESULT_COLUMNS, format_row, result_table
    from evaluation.results import CellResult

    cells = [CellResult.model_validate(cell) for cell in result["results"]]
    rows = result_table(cells, PresetPoint.model_validate(result["preset_point"]))
    return list(RESULT_COLUMNS), [list(format_row(row)) for row in rows]


def _result_table(result: Mapping[str, Any]) -> Table:
    columns, rows = result_rows(result)
    table = Table(title="Results, beside the paper's", title_justify="left", padding=(0, 0, 0, 1))
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _title(stage: Mapping[str, Any]) -> str:
    return f"{stage['name']} {stage.get('label') or ''}".strip()
