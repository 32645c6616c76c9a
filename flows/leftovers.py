"""What dead commands of a home left behind: processes, a server, containers, Ray's folders, locks.

A child is known by COMPACTIONRL_RUN in its environment (the folder of the run that started it) or by the Ray folder
that its command line names. COMPACTIONRL_HOME says nothing: a user's shell carries it too. Whatever belongs to a live
command, descends from one or is its ancestor is left alone, and so is all of another home.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import psutil
from filelock import FileLock, Timeout

from flows.local_server import LocalServer
from flows.prefect_server import PrefectServer
from flows.runs import RUN_VARIABLE, RunFolder, all_runs
from flows.services import Home
from flows.standing import StandingRecord
from tasks.caching import StageStore
from tasks.cluster import RAY_FOLDERS, owner_of
from tasks.processes import ProcessId, stop_process

CONTAINER_LABEL = "compactionrl.run"
"""Holds what COMPACTIONRL_RUN holds, or the name of the run's folder"""
YOUNG = 600.0
"""Seconds in which a Ray folder that names no owner may still be in the making"""

Kind = Literal["server", "process", "container", "Ray folder", "lock"]


@dataclass(frozen=True)
class Leftover:
    """Something that nobody alive needs."""

    kind: Kind
    name: str
    remove: Callable[[], object] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Process:
    """One entry of the process table."""

    identity: ProcessId
    parent: int
    command: str
    run: str | None
    """COMPACTIONRL_RUN"""

    @property
    def name(self) -> str:
        return f"{self.identity.pid} {self.command if len(self.command) <= 60 else self.command[:59] + '…'}"


class ProcessTable:
    """The processes of this machine at one moment, as far as this user may read them."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self.by_pid = {process.identity.pid: process for process in processes}

    @classmethod
    def read(cls) -> ProcessTable:
        return cls(_processes())

    def ancestors(self, pid: int) -> set[int]:
        found: set[int] = set()
        while (process := self.by_pid.get(pid)) and process.parent not in found:
            pid = process.parent
            found.add(pid)
        return found

    def descendants(self, pid: int) -> set[int]:
        return {other for other in self.by_pid if pid in self.ancestors(other)}

    def naming(self, folder: Path) -> set[int]:
        """Processes whose command line holds the folder."""
        return {pid for pid, process in self.by_pid.items() if f"{folder}/" in process.command + "/"}


def find_leftovers(home: Home, table: ProcessTable) -> list[Leftover]:
    """In the order in which they should go; containers are looked for by `find_containers`."""
    folders = _ray_folders(home)
    return [
        *_unused_servers(home),
        *(
            Leftover("process", process.name, partial(stop_process, process.identity))
            for process in _orphans(home, table, folders)
        ),
        *(Leftover("Ray folder", str(folder), partial(shutil.rmtree, folder)) for folder in folders),
        *_locks(home),
    ]


def nameless_ray_folders(table: ProcessTable) -> list[Path]:
    """Old ones that do not say whose they are and that no process seen here uses: a person has to judge."""
    found = []
    for folder in _all_ray_folders():
        with suppress(OSError):  # gone meanwhile
            old = time.time() - folder.stat().st_mtime > YOUNG
            if old and owner_of(folder) is None and not table.naming(folder):
                found.append(folder)
    return found


def find_containers(home: Home) -> list[Leftover]:
    """Containers of runs whose command is gone. Raises docker's errors, or OSError, where no daemon answers."""
    import docker

    client = docker.from_env(timeout=5)
    runs = {run.name: run for run in all_runs(home)}
    found = []
    for container in client.containers.list(all=True, filters={"label": CONTAINER_LABEL}, ignore_removed=True):
        label = Path(container.labels[CONTAINER_LABEL])
        known = runs.get(label.name)
        ours = label.parent == home.runs if label.is_absolute() else known is not None
        if ours and not (known and known.command_alive()):
            found.append(
                Leftover("container", f"{container.name} of {label.name}", partial(container.remove, force=True))
            )
    return found


def _processes() -> Iterator[Process]:
    host = socket.gethostname()
    for process in psutil.process_iter(["pid", "ppid", "create_time", "cmdline", "environ", "status"]):
        info = process.info
        if info["create_time"] is None or info["status"] == psutil.STATUS_ZOMBIE:
            continue
        yield Process(
            ProcessId(host, info["pid"], info["create_time"]),
            info["ppid"] or 0,
            " ".join(info["cmdline"] or ()),
            (info["environ"] or {}).get(RUN_VARIABLE),
        )


def _orphans(home: Home, table: ProcessTable, folders: list[Path]) -> list[Process]:
    runs = {str(run.path): run for run in all_runs(home)}
    spared = _spared(home, table, runs.values())
    of_ray = {pid for folder in folders for pid in table.naming(folder)}
    return [
        process
        for pid, process in sorted(table.by_pid.items())
        if pid not in spared and (pid in of_ray or _is_of_a_dead_run(home, process, runs))
    ]


def _is_of_a_dead_run(home: Home, process: Process, runs: dict[str, RunFolder]) -> bool:
    if process.run is None or Path(process.run).parent != home.runs:
        return False
    run = runs.get(process.run)
    return run is None or not run.command_alive()


def _spared(home: Home, table: ProcessTable, runs: Iterable[RunFolder]) -> set[int]:
    """This process, live commands of the home, its Prefect server, and the families of all."""
    users, server = _prefect(home)
    alive = {os.getpid(), *(user.pid for user in users), *((server.process.pid,) if server else ())}
    alive |= {run.record["process"]["pid"] for run in runs if run.command_alive()}
    return alive.union(*(table.ancestors(pid) | table.descendants(pid) for pid in alive))


def _unused_servers(home: Home) -> list[Leftover]:
    """The Prefect server that no command holds, and servers of an `up` that was killed.

    A copied home's records name the servers of the original: ours keep their log below this home.
    """
    found = []
    users, prefect = _prefect(home)
    if prefect and not users and prefect.log.is_relative_to(home.root):
        found.append(Leftover("server", f"Prefect at {prefect.url}", PrefectServer(home.prefect).stop_if_unused))
    for server in StandingRecord(home.root).left_over():
        if server.log.is_relative_to(home.root):
            found.append(Leftover("server", f"{server.name} at {server.url}", partial(stop_process, server.process)))
    return found


def _prefect(home: Home) -> tuple[list[ProcessId], LocalServer | None]:
    """Live commands that hold the home's Prefect server, and the server."""
    if not home.prefect.is_dir():
        return [], None
    server = PrefectServer(home.prefect)
    with server.lock:
        return server.live_users(), server.running()


def _ray_folders(home: Home) -> list[Path]:
    """Of commands of this home that are gone."""
    found = []
    for folder in _all_ray_folders():
        if owner := owner_of(folder):
            process, logs = owner
            here = process.host == socket.gethostname() and logs.is_relative_to(home.root)
            if here and not process.alive():
                found.append(folder)
    return found


def _all_ray_folders() -> list[Path]:
    return sorted(folder for folder in RAY_FOLDERS.parent.glob(RAY_FOLDERS.name) if folder.is_dir())


def _locks(home: Home) -> list[Leftover]:
    """Lock files that no process holds and whose stage is neither finished nor begun."""
    store = StageStore(home.stages)
    return [
        Leftover("lock", path.name, partial(_remove_lock, path))
        for path in sorted((home.stages / ".locks").glob("*.lock"))
        if not any((folder / path.stem).exists() for folder in (home.stages, home.stages / ".work"))
        and not store.is_busy(path.stem)
    ]


def _remove_lock(path: Path) -> None:
    """Under the lock itself: whoever waits for it sees that its file is gone and makes a new one."""
    with suppress(Timeout), FileLock(path, timeout=0):
        path.unlink(missing_ok=True)
