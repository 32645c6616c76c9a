"""One local Prefect server per home, shared by the commands that run on it.

`server.json` names the process (pid and creation time) and its url. Every command that uses the server leaves a
file under `users/`; the last one out stops it. All changes happen under one file lock.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from filelock import FileLock

from tasks.errors import CommandError
from tasks.processes import ProcessId, stop_process

STARTUP_SECONDS = 300.0
"""A cold start takes 10–20 s on an idle machine; a loaded one is given more."""


@dataclass(frozen=True)
class RunningServer:
    """A server that was started here; it may still be coming up."""

    url: str
    process: ProcessId
    log: Path

    def healthy(self) -> bool:
        try:
            # verify=False: loading certificates takes 20 ms a call, and loopback HTTP needs none
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False, verify=False).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_until_healthy(self) -> None:
        """Raises CommandError with the end of the server's log if it dies or never answers."""
        deadline = time.monotonic() + STARTUP_SECONDS
        while not self.healthy():
            if not self.process.alive():
                raise CommandError(
                    f"the local Prefect server ended at once; its log {self.log} says:\n{_tail(self.log)}"
                )
            if time.monotonic() > deadline:
                raise CommandError(
                    f"the local Prefect server did not answer within {STARTUP_SECONDS:.0f} s; "
                    f"its log {self.log} says:\n{_tail(self.log)}"
                )
            time.sleep(0.1)


class PrefectServer:
    """The server of one home folder `prefect/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "server.json"
        self.users = folder / "users"
        self.lock = FileLock(folder / "server.lock")

    @contextmanager
    def using(self) -> Iterator[RunningServer]:
        """Find or start the server and hold it: it may still be starting, see `wait_until_healthy`."""
        mine = self.users / f"{os.getpid()}-{time.monotonic_ns()}.json"
        server = None
        try:
            with self.lock:
                self.users.mkdir(parents=True, exist_ok=True)
                mine.write_text(json.dumps(asdict(ProcessId.current())))
                server = self.running() or self._start()
            yield server
        finally:
            with self.lock:
                mine.unlink(missing_ok=True)
                if server and not self.live_users():  # known from here: somebody may have deleted the whole home
                    self._stop(server)

    def running(self) -> RunningServer | None:
        """The recorded server, if its very process is alive."""
        try:
            raw = json.loads(self.record.read_text())
            server = RunningServer(raw["url"], ProcessId(**raw["process"]), Path(raw["log"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return server if server.process.host == socket.gethostname() and server.process.alive() else None

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

    def _start(self) -> RunningServer:
        port = _free_port()
        log = self.folder / "server.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,  # no prefect.toml or pyproject.toml of the user's is picked up
                start_new_session=True,  # a Ctrl-C in the terminal must not take it before the flow has ended
            )
        server = RunningServer(f"http://127.0.0.1:{port}/api", ProcessId.of(process.pid), log)
        content = {"url": server.url, "process": asdict(server.process), "log": str(log)}
        temporary = self.record.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=2))
        temporary.replace(self.record)
        return server

    def _environment(self) -> dict[str, str]:
        """The user's environment without what would point our server at another database or API."""
        kept = {k: v for k, v in os.environ.items() if not (k.startswith("PREFECT_") and "DATABASE" in k)}
        for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "PREFECT_SERVER_API_BASE_PATH"):
            kept.pop(name, None)
        return kept | {
            "PREFECT_HOME": str(self.folder),
            "PREFECT_SERVER_MEMO_STORE_PATH": str(self.folder / "memo_store.toml"),
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        }

    def _stop(self, server: RunningServer) -> None:
        stop_process(server.process)
        self.record.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"
