"""What `compactionrl up` keeps running on a home, as the home's other commands find it: `up.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from compaction.files import write_durably
from flows.local_server import LocalServer
from tasks.processes import ProcessId, stop_process


@dataclass(frozen=True)
class Standing:
    """The services of one `compactionrl up`."""

    process: ProcessId
    """The command itself"""
    prefect: str
    """The page of the Prefect server"""
    mlflow: str
    ray_dashboard: str | None = None
    ray_address: str | None = None
    servers: tuple[LocalServer, ...] = ()
    """Processes it started besides the shared Prefect server"""
    ready: bool = False

    @property
    def links(self) -> dict[str, str]:
        links = {"Prefect": self.prefect, "MLflow": self.mlflow}
        return links | ({"Ray": self.ray_dashboard} if self.ray_dashboard else {})


class StandingRecord:
    """`up.json` of one home, and the lock that an `up` holds while it lives."""

    def __init__(self, home: Path) -> None:
        self.path = home / "up.json"
        self.lock = FileLock(home / "up.lock")

    def read(self) -> Standing | None:
        """The services of an `up` that is alive and has started them."""
        standing = self._recorded()
        return standing if standing and standing.ready and standing.process.alive() else None

    def write(self, standing: Standing) -> None:
        content: dict[str, Any] = asdict(standing) | {"servers": [server.to_json() for server in standing.servers]}
        write_durably(self.path, json.dumps(content, indent=2))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def left_over(self) -> list[LocalServer]:
        """Servers of an `up` that was killed."""
        standing = self._recorded()
        if standing is None or standing.process.alive():
            return []
        return [server for server in standing.servers if server.running()]

    def stop_left_over(self) -> list[str]:
        """End what an `up` that was killed left behind. Returns the names of the servers."""
        left = self.left_over()
        for server in left:
            stop_process(server.process)
        standing = self._recorded()
        if standing and not standing.process.alive():
            self.remove()
        return [server.name for server in left]

    def _recorded(self) -> Standing | None:
        try:
            raw = json.loads(self.path.read_text())
            servers = tuple(LocalServer.from_json(server) for server in raw.pop("servers"))
            return Standing(**{**raw, "process": ProcessId(**raw["process"])}, servers=servers)
        except (OSError, ValueError, KeyError, TypeError):
            return None
