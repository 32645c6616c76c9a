"""One local Prefect server per home, shared by the commands that run on it.

`server.json` names the process (pid and creation time) and its url. Every command that uses the server leaves a
file under `users/`; the last one out stops it. All changes happen under one file lock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock

from flows.local_server import LocalServer, free_port
from tasks.processes import ProcessId, stop_process


class PrefectServer:
    """The server of one home folder `prefect/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "server.json"
        self.users = folder / "users"
        self.lock = FileLock(folder / "server.lock")

    @contextmanager
    def using(self, preferred_port: int = 0) -> Iterator[LocalServer]:
        """Find or start the server and hold it: it may still be starting, see `wait_until_healthy`."""
        mine = self.users / f"{os.getpid()}-{time.monotonic_ns()}.json"
        server = None
        try:
            with self.lock:
                self.users.mkdir(parents=True, exist_ok=True)
                mine.write_text(json.dumps(asdict(ProcessId.current())))
                server = self.running() or self._start(preferred_port)
            yield server
        finally:
            with self.lock:
                mine.unlink(missing_ok=True)
                if server and not self.live_users():  # known from here: somebody may have deleted the whole home
                    self._stop(server)

    def running(self) -> LocalServer | None:
        """The recorded server, if its very process is alive."""
        try:
            server = LocalServer.from_json(json.loads(self.record.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return server if server.running() else None

    def live_users(self) -> list[ProcessId]:
        """Commands that hold the server; files of dead ones are removed."""
        alive = []
        for path in self.users.glob("*.json"):
            try:
                user = ProcessId(**json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):
                user = None
            if user and user.alive():
                alive.append(user)
            else:
                path.unlink(missing_ok=True)
        return alive

    def stop_if_unused(self) -> bool:
        """Stop a server that a killed command left behind. True if one was stopped."""
        with self.lock:
            server = self.running()
            if server is None or self.live_users():
                return False
            self._stop(server)
            return True

    def _start(self, preferred_port: int) -> LocalServer:
        port = free_port(preferred_port)
        server = LocalServer.start(
            "the local Prefect server",
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            f"http://127.0.0.1:{port}/api",
            self.folder / "server.log",
            environment=self._environment(port),
        )
        temporary = self.record.with_suffix(".tmp")
        temporary.write_text(json.dumps(server.to_json(), indent=2))
        temporary.replace(self.record)
        return server

    def _environment(self, port: int) -> dict[str, str]:
        """The user's environment without what would point our server at another database or API."""
        kept = {k: v for k, v in os.environ.items() if not (k.startswith("PREFECT_") and "DATABASE" in k)}
        for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "PREFECT_SERVER_API_BASE_PATH"):
            kept.pop(name, None)
        return kept | {
            "PREFECT_HOME": str(self.folder),
            "PREFECT_UI_API_URL": f"http://127.0.0.1:{port}/api",  # the pages else ask at 4200, whatever the port
            "PREFECT_SERVER_MEMO_STORE_PATH": str(self.folder / "memo_store.toml"),
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        }

    def _stop(self, server: LocalServer) -> None:
        stop_process(server.process)
        self.record.unlink(missing_ok=True)
