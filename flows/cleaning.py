"""What a home holds, how large it is, and what of it can go."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from flows.prefect_server import PrefectServer
from flows.runs import all_runs
from flows.services import Home
from tasks.caching import StageStore
from tasks.errors import CommandError


@dataclass(frozen=True)
class Entry:
    """Something that takes space."""

    path: Path
    size: int
    """Bytes"""
    what: str
    removable: bool
    why: str


def clean_home(home: Home, *, everything: bool, dry_run: bool, yes: bool, console: Console | None = None) -> list[Path]:
    """Print sizes, ask, remove. Returns what was removed (with `dry_run`: nothing). A stage or run at work stays."""
    console = console or Console()
    if not home.root.is_dir():
        console.print(f"nothing to clean: {home.root} does not exist")
        return []
    entries = survey(home, everything=everything)
    console.print(_table(entries, home))
    going = [entry for entry in entries if entry.removable]
    total = sum(entry.size for entry in going)
    if not dry_run and going:
        if not yes and not typer.confirm(f"Remove {len(going)} entries, {format_bytes(total)}?", default=False):
            return []
        for entry in going:
            _remove(entry.path)
        console.print(f"removed {len(going)} entries, {format_bytes(total)}")
    elif going:
        console.print(f"would remove {len(going)} entries, {format_bytes(total)}")
    else:
        console.print("nothing to remove")
    if not dry_run and home.prefect.is_dir() and PrefectServer(home.prefect).stop_if_unused():
        console.print("stopped a Prefect server that a killed command had left behind")
    return [] if dry_run else [entry.path for entry in going]


def survey(home: Home, *, everything: bool) -> list[Entry]:
    """Every entry of the home, the removable ones marked."""
    runs = all_runs(home)
    if everything and (busy := [run.name for run in runs if run.is_running()]):
        raise CommandError(f"these runs are still going: {', '.join(busy)}; end them before `clean --all`")
    used = {stage.get("folder") for run in runs for stage in run.record.get("stages", [])}
    return [*_stages(home, used, everything), *_leftovers(home), *_runs(home, everything), *_services(home, everything)]


def _stages(home: Home, used: set[str], everything: bool) -> list[Entry]:
    store = StageStore(home.stages)
    entries = []
    for folder in sorted(home.stages.glob("*/")):
        if folder.name.startswith("."):
            continue
        in_use = folder.name in used
        busy = store.is_busy(folder.name)
        why = "being made now" if busy else "used by a run" if in_use else "used by no run"
        removable = not busy and (everything or not in_use)
        entries.append(Entry(folder, folder_size(folder), "stage", removable, why))
    return entries


def _leftovers(home: Home) -> list[Entry]:
    store = StageStore(home.stages)
    entries = []
    for folder in sorted((home.stages / ".work").glob("*/")):
        busy = store.is_busy(folder.name)
        why = "being made now" if busy else "unfinished; the same command would continue from it"
        entries.append(Entry(folder, folder_size(folder), "unfinished stage", not busy, why))
    return entries


def _runs(home: Home, everything: bool) -> list[Entry]:
    return [
        Entry(run.path, folder_size(run.path), "run", everything, str(run.record.get("status")))
        for run in all_runs(home)
    ]


def _services(home: Home, everything: bool) -> list[Entry]:
    names = {"MLflow data": home.mlflow, "Prefect data": home.prefect, "jobs": home.jobs}
    names["comparisons"] = home.root / "compare"
    in_use = home.prefect.is_dir() and bool(PrefectServer(home.prefect).live_users())
    return [
        Entry(path, folder_size(path), what, everything and not in_use, "in use" if in_use else "kept without --all")
        for what, path in names.items()
        if path.is_dir()
    ]


def folder_size(folder: Path) -> int:
    """Bytes of the files below it; what vanishes meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except OSError:
            continue
    return total


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1_024:
            return f"{size:.0f} {unit}"
        size /= 1_024
    return f"{size:.1f} GiB"


def _table(entries: list[Entry], home: Home) -> Table:
    table = Table(title=str(home.root), title_justify="left")
    for column in ("what", "name", "size", "", ""):
        table.add_column(column, overflow="fold")
    for entry in entries:
        verdict = "[red]remove[/]" if entry.removable else "keep"
        table.add_row(entry.what, entry.path.name, format_bytes(entry.size), verdict, entry.why)
    return table


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise CommandError(f"cannot remove {path}: {error.strerror}") from error
