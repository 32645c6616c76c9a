"""Commands as processes of their own, and what they leave behind."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

COMMAND = "import flows.up; flows.up.PREFECT_PORT = flows.up.MLFLOW_PORT = 0; from flows.cli import main; main()"
"""The command. What it serves is at any port: two that come up at once would both find the preferred ones free."""
PATIENCE = 1_800.0
"""Seconds that a command may take on a busy machine; one that hangs is no better found sooner"""


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
