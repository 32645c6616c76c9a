"""What the `tasks` commands do."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from evaluation.baselines import Checked, check_tasks
from evaluation.settings import DatasetSettings, SandboxKind, SandboxSettings
from evaluation.tasksets.datasets import SHIPPED, Dataset, ensure_images, export_dataset
from evaluation.tasksets.harbor_export import export_trail
from evaluation.tasksets.trail import Split
from flows.experiment import load_experiment
from tasks.errors import UserError
from tasks.real_tasks import open_dataset
from tasks.stages import explained


def _open(where: str, *, kind: SandboxKind = "docker", limit: int | None = None) -> Dataset:
    return open_dataset(DatasetSettings(path=where, limit=limit, sandbox=SandboxSettings(kind=kind)))


def show_tasks(console: Console, where: str) -> None:
    """A table of the tasks. Raises UserError for a folder that is no dataset."""
    dataset = _open(where)
    table = Table("task", "agent's time", "memory", "network", "notes", title=f"{dataset.name}", title_justify="left")
    for task in dataset.tasks:
        folder = task.folder
        seconds = "–" if folder.agent_timeout is None else f"{folder.agent_timeout:g} s"
        memory = "–" if folder.memory_mb is None else f"{folder.memory_mb:,} MiB"
        table.add_row(escape(task.id), seconds, memory, folder.network, escape("; ".join(folder.notes)))
    console.print(table)
    console.print(f"{len(dataset.tasks)} tasks · digest {dataset.digest[:16]}", highlight=False)


def check_set(
    console: Console, where: str, *, env: SandboxKind, limit: int | None, concurrency: int, json_output: bool
) -> bool:
    """True if every task's own solution passes and doing nothing fails. Raises UserError."""
    dataset = _open(where, kind=env, limit=limit)
    with explained("tasks"):
        if env == "docker":
            ensure_images(dataset)
        checked = asyncio.run(_check(dataset, concurrency, quiet=json_output))
    if json_output:
        print(json.dumps({"dataset": dataset.name, "env": env, "tasks": [_as_json(c) for c in checked]}, indent=2))
    else:
        console.print(_table(dataset, checked))
        console.print(f"{sum(c.sound for c in checked)} of {len(checked)} tasks are sound", highlight=False)
    return all(c.sound for c in checked)


async def _check(dataset: Dataset, concurrency: int, *, quiet: bool) -> list[Checked]:
    finished: asyncio.Queue[Checked] = asyncio.Queue()
    checking = asyncio.create_task(check_tasks(dataset.tasks, concurrency=concurrency, on_checked=finished.put_nowait))
    for _ in track(dataset.tasks, description="checking", console=Console(stderr=True), disable=quiet):
        await finished.get()
    return await checking


def _table(dataset: Dataset, checked: list[Checked]) -> Table:
    table = Table("task", "own solution", "doing nothing", "", title=dataset.name, title_justify="left")
    for one in checked:
        mark = "[green]✓[/]" if one.sound else "[red]✗[/]"
        table.add_row(escape(one.task), escape(_reward(one.solution)), escape(_reward(one.nothing)), mark)
    return table


def _reward(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _as_json(checked: Checked) -> dict[str, Any]:
    return asdict(checked) | {"sound": checked.sound}


def export_set(name: str, folder: str, *, split: Split, n: int, preset: str) -> Path:
    """Writes the set and returns its folder. Raises UserError."""
    target = Path(folder).expanduser()
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target} is not empty; name a new folder")
    if name == "trail":
        return export_trail(target, load_experiment(preset).world, split, n)
    if name not in SHIPPED:
        raise UserError(f"no shipped set {name!r}; choose trail or one of: {', '.join(sorted(SHIPPED))}")
    return export_dataset(name, target)
