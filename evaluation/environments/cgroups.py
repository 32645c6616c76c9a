"""Limits on a sandbox as a whole, in the kernel's control groups, where this user may make some."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_UNIFIED = "unified"
_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD = 100_000
_REMOVAL_TRIES = 100


class ControlGroups:
    """The groups of one sandbox: one with cgroup v2, one per controller with v1, none where it is not allowed."""

    def __init__(self, name: str, memory: int, processes: int, cpus: float) -> None:
        self.folders: list[Path] = []
        self._limited: set[str] = set()
        quota = int(cpus * _PERIOD)
        values: dict[str, dict[str, int | str]] = {
            "memory": {
                "memory.max": memory,
                "memory.swap.max": 0,
                "memory.limit_in_bytes": memory,
                "memory.memsw.limit_in_bytes": memory,
            },
            "pids": {"pids.max": processes},
            "cpu": {"cpu.max": f"{quota} {_PERIOD}", "cpu.cfs_period_us": _PERIOD, "cpu.cfs_quota_us": quota},
        }
        for parent in _parents().values():
            with suppress(OSError):  # not for this user
                (parent / name).mkdir()
                self.folders.append(parent / name)
        for controller, files in values.items():
            for folder in self.folders:
                self._set(controller, folder, files)

    def limit(self, controller: str) -> bool:
        """Whether `memory`, `pids` or `cpu` is limited here."""
        return controller in self._limited

    def remove(self) -> None:
        """Once nothing runs in them any more."""
        _remove(self.folders)
        self.folders = []

    def _set(self, controller: str, folder: Path, files: dict[str, int | str]) -> None:
        """What this version of control groups knows of it."""
        for file, value in files.items():
            with suppress(OSError):
                if (folder / file).exists():
                    (folder / file).write_text(str(value))
                    self._limited.add(controller)


def remove_groups(name: str) -> None:
    """Those that a `ControlGroups` of this name made, in a process that is gone."""
    _remove([parent / name for parent in _parents().values()])


def _parents() -> dict[str, Path]:
    """Where groups are made, by controller: beside this process's own, whose limits hold for them too."""
    if (_ROOT / "cgroup.controllers").exists():
        return {_UNIFIED: _ROOT}
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = {name: path for line in lines for name, path in [line.split(":", 2)[1:]]}
        found = {name: _ROOT / name / own.get(name, "/").lstrip("/") for name in _CONTROLLERS}
        return {name: folder if folder.is_dir() else _ROOT / name for name, folder in found.items()}
    return {}


def _remove(folders: list[Path]) -> None:
    """The kernel may need a moment to see that nothing runs in them."""
    for folder in folders:
        for _ in range(_REMOVAL_TRIES):
            try:
                folder.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.02)
