"""Which processes a command of a home has left."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def processes_of(home: Path) -> list[psutil.Process]:
    """Living processes with this home in their environment, apart from this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("COMPACTIONRL_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]
