"""What a flow is handed besides its experiment."""

from __future__ import annotations

from dataclasses import dataclass

from flows.runs import RunFolder
from flows.services import Home, Services
from tasks.progress import ProgressSink


@dataclass(frozen=True)
class RunOptions:
    """How to run, not what: nothing here changes a result."""

    home: Home
    progress: ProgressSink
    force: bool = False
    """Run every stage again"""
    dry_run: bool = False
    """Return the plan only; `services` and `run` are None then"""
    services: Services | None = None
    run: RunFolder | None = None
    preset: str = "tiny"
    flags: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    """Preset, options and `--set` as they were given: with them Prefect shows a run, and starts it again"""
