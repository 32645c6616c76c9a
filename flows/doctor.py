"""Is everything as it should be, and does nobody sit on what dead commands left behind?"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import Literal

import httpx
import psutil
import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.cleaning import folder_size, format_bytes
from flows.leftovers import Leftover, ProcessTable, find_containers, find_leftovers, nameless_ray_folders
from flows.prefect_server import PrefectServer
from flows.runs import end_dead_runs
from flows.services import Home, configured_prefect, prepare_environment, sqlite_uri
from tasks.errors import CommandError

DISTRIBUTION = "compactionrl"
ENOUGH_SPACE = 2 * 2**30
"""Bytes free, below which a run may end with a full disk"""
KEY_PACKAGES = ("torch", "transformers", "ray", "prefect", "mlflow")
"""Named with their versions; all that are required are checked"""
COLOURS = {"ok": "green", "fixed": "cyan", "warning": "yellow", "problem": "red"}

State = Literal["ok", "fixed", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    """One line of the result."""

    name: str
    state: State
    found: str
    next_step: str = ""


def examine_home(home: Home, *, yes: bool, json_output: bool = False, console: Console | None = None) -> int:
    """Check, mend what is safe, and remove leftovers on confirmation. Returns the exit code: 1 if a problem remains."""
    console = console or Console()
    prepare_environment(home)
    checks = [_python(), _packages(), _disk(home), *_mlflow(home), _prefect(home), _runs(home), _users(home)]
    table = ProcessTable.read()
    leftovers, docker = _leftovers(home, table)
    if leftovers and not yes and not json_output and sys.stdin.isatty():
        console.print(_listing(leftovers))
        yes = typer.confirm(f"Remove these {len(leftovers)} leftovers?", default=False)
    checks += [*_removed(leftovers, remove=yes), docker, *_nameless(table), _unfinished(home)]
    healthy = all(check.state != "problem" for check in checks)
    if json_output:
        result = {"status": "ok" if healthy else "problem", "home": str(home.root), "checks": list(map(asdict, checks))}
        print(json.dumps(result, indent=2))
    else:
        console.print(_table(home, checks))
    return 0 if healthy else 1


def _python() -> Check:
    current = sys.version.split()[0]
    try:
        required = metadata(DISTRIBUTION)["Requires-Python"]
    except PackageNotFoundError:
        return Check("Python", "warning", f"{current}; {DISTRIBUTION} is not installed", "make install")
    if SpecifierSet(required).contains(current, prereleases=True):
        return Check("Python", "ok", f"{current} (needs {required})")
    return Check("Python", "problem", f"{current}, but {required} is needed", "make reproduce PYTHON=/path/to/python")


def _packages() -> Check:
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return Check(
            "packages", "warning", f"{DISTRIBUTION} is not installed: nothing to check against", "make install"
        )
    needed = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": ""})]
    wrong = [text for requirement in needed if (text := _wrong_version(requirement))]
    if wrong:
        remedy = f"{sys.executable} -m pip install " + " ".join(
            f"'{r.name}{r.specifier}'" for r in needed if _wrong_version(r)
        )
        return Check("packages", "problem", "; ".join(wrong), remedy)
    named = ", ".join(f"{name} {version(name)}" for name in KEY_PACKAGES)
    return Check("packages", "ok", f"{len(needed)} as required ({named})")


def _wrong_version(requirement: Requirement) -> str | None:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{requirement.name} {installed}, but {requirement.specifier} is needed"


def _disk(home: Home) -> Check:
    folder = next(path for path in (home.root, *home.root.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    found = f"{format_bytes(free)} free at {folder}"
    if free < ENOUGH_SPACE:
        return Check("disk", "warning", found, "compactionrl clean")
    return Check("disk", "ok", found)


def _mlflow(home: Home) -> Iterator[Check]:
    """That it opens, and its runs whose process is gone, which are ended."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(home.mlflow_database)
    if uri == sqlite_uri(home.mlflow_database) and not home.mlflow_database.exists():
        yield Check("MLflow", "ok", "no database yet; the first run makes it")
        return
    if uri.startswith("http") and (failure := _no_answer(f"{uri.rstrip('/')}/health")):
        yield Check("MLflow", "problem", f"{uri} {failure}", "start it, or unset MLFLOW_TRACKING_URI")
        return
    from tasks.tracking import end_dead_runs

    try:
        dead = end_dead_runs(uri)
    except CommandError as error:
        remedy = f"install the MLflow version that made it, or move {home.mlflow_database} away"
        yield Check("MLflow", "problem", str(error), remedy)
        return
    yield Check("MLflow", "ok", f"{uri} opens")
    if dead:
        yield Check("MLflow runs", "fixed", f"ended {len(dead)} whose process is gone: {', '.join(dead)}")
    else:
        yield Check("MLflow runs", "ok", "none is RUNNING without its process")


def _prefect(home: Home) -> Check:
    if found := configured_prefect():
        url, origin = found
        if failure := _no_answer(f"{url.rstrip('/')}/health"):
            return Check("Prefect", "problem", f"{url} (from {origin}) {failure}", f"start it, or unset {origin}")
        return Check("Prefect", "ok", f"{url} answers (from {origin})")
    server = PrefectServer(home.prefect).running()
    if server is None:
        return Check("Prefect", "ok", "no server is running; a command starts one")
    if not server.healthy():
        return Check("Prefect", "warning", f"{server.url} does not answer; it may be starting", f"see {server.log}")
    return Check("Prefect", "ok", f"{server.url} answers (local server)")


def _no_answer(url: str) -> str | None:
    """Why nothing answers there; any answer will do."""
    try:
        httpx.get(url, timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"does not answer ({type(error).__name__})"
    return None


def _runs(home: Home) -> Check:
    if dead := end_dead_runs(home):
        return Check(
            "runs", "fixed", f"marked killed: {', '.join(run.name for run in dead)}", str(dead[-1].record["command"])
        )
    return Check("runs", "ok", "none is `running` without its command")


def _users(home: Home) -> Check:
    """Commands that hold the Prefect server; what dead ones left goes."""
    if not home.prefect.is_dir():
        return Check("server users", "ok", "none")
    server = PrefectServer(home.prefect)
    with server.lock:
        written = len(list(server.users.glob("*.json")))
        alive = len(server.live_users())
    if stale := written - alive:
        return Check("server users", "fixed", f"removed {stale} of dead commands; {alive} alive")
    return Check("server users", "ok", f"{alive} alive")


def _leftovers(home: Home, table: ProcessTable) -> tuple[list[Leftover], Check]:
    """All of them, and whether Docker could be asked."""
    found = find_leftovers(home, table)
    from docker.errors import DockerException

    try:
        containers = find_containers(home)
    except (DockerException, OSError):
        return found, Check("containers", "ok", "not checked: no Docker daemon answers")
    if containers:
        return [*found, *containers], Check("Docker", "ok", "answers")
    return found, Check("containers", "ok", "none of a dead run")


def _removed(leftovers: list[Leftover], *, remove: bool) -> Iterator[Check]:
    """One line per kind."""
    kinds: dict[str, list[Leftover]] = defaultdict(list)
    for leftover in leftovers:
        kinds[leftover.kind].append(leftover)
    for kind, group in kinds.items():
        names = f"{len(group)} left over: {'; '.join(leftover.name for leftover in group)}"
        if not remove:
            yield Check(kind, "problem", names, "compactionrl doctor --yes")
        elif failures := [failure for leftover in group if (failure := _remove(leftover))]:
            yield Check(kind, "problem", "; ".join(failures), "end or remove them by hand")
        else:
            yield Check(kind, "fixed", names.replace("left over", "removed", 1))
    if not leftovers:
        yield Check("leftovers", "ok", "no process, server, Ray folder or lock of a dead command")


def _remove(leftover: Leftover) -> str | None:
    """Why it is still there."""
    from docker.errors import DockerException

    try:
        leftover.remove()
    except (OSError, psutil.Error, DockerException) as error:
        return f"{leftover.name}: {error}"
    return None


def _nameless(table: ProcessTable) -> Iterator[Check]:
    if folders := nameless_ray_folders(table):
        names = " ".join(map(str, folders))
        found = f"{len(folders)} that no process here uses and that do not say whose they are"
        yield Check("Ray folders", "warning", found, f"if nobody needs them: rm -r {names}")


def _unfinished(home: Home) -> Check:
    """Work that killed runs began: a checkpoint in it saves time, so it is only told of."""
    folders = list((home.stages / ".work").glob("*/"))
    if not folders:
        return Check("unfinished stages", "ok", "none")
    size = format_bytes(sum(map(folder_size, folders)))
    found = f"{len(folders)}, {size}; their commands go on from them"
    return Check("unfinished stages", "ok", found, "compactionrl clean removes them")


def _listing(leftovers: list[Leftover]) -> Table:
    table = Table("what", "name", title="Left over by dead commands", title_justify="left")
    for leftover in leftovers:
        table.add_row(leftover.kind, escape(leftover.name))
    return table


def _table(home: Home, checks: list[Check]) -> Table:
    table = Table(title=escape(str(home.root)), title_justify="left")
    for column in ("check", "", "found", "next step"):
        table.add_column(column, overflow="fold")
    for check in checks:
        state = f"[{COLOURS[check.state]}]{check.state}[/]"
        table.add_row(check.name, state, escape(check.found), escape(check.next_step))
    return table
