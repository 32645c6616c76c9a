"""What happened to rollouts, one JSON object per line: the evidence that none was lost and none trained twice.

    {"time": …, "event": "started",     "rollout": …, "worker": 0, "attempt": 1}
    {"time": …, "event": "finished",    "rollout": …, "reward": 1.0, "compactions": 2}
    {"time": …, "event": "failed",      "rollout": …, "why": …, "again": true}
    {"time": …, "event": "quarantined", "task": …, "why": …}
    {"time": …, "event": "trained",     "step": 3, "rollouts": […]}
    {"time": …, "event": "checkpoint",  "step": 4, "queued": [finished, not yet trained]}
    {"time": …, "event": "resumed",     "step": 4}    steps from here on, and what they trained, are void

The synchronous loop writes `trained`, `checkpoint` and `resumed` only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Emit = Callable[..., None]
"""(event, **fields)"""


def no_events(event: str, **fields: Any) -> None:
    """Nobody keeps them."""


class EventLog:
    """Appends to one file. A killed run's unfinished last line is closed, so that the next event has its own."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        if self._file.seek(0, 2):
            self._file.seek(-1, 2)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def emit(self, event: str, **fields: Any) -> None:
        line = {"time": round(time.time(), 3), "event": event} | fields
        self._file.write(json.dumps(line).encode() + b"\n")  # one write: whole, or cut at the end by a kill

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All whole lines in order; what a kill cut off is left out."""
    events = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events
