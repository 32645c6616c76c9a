"""Servers that commands start on this machine: a free port, a process of its own, a log, a health check."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from tasks.errors import CommandError
from tasks.processes import ProcessId

STARTUP_SECONDS = 300.0
"""A cold start takes 10–20 s on an idle machine; a loaded one is given more."""


@dataclass(frozen=True)
class LocalServer:
    """A server that was started here; it may still be coming up."""

    name: str
    url: str
    process: ProcessId
    log: Path
    health: str = "health"
    """Path below the url that answers 200; of a process without url, the line of its log that says it is ready"""

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        url: str,
        log: Path,
        *,
        environment: Mapping[str, str],
        health: str = "health",
    ) -> LocalServer:
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,  # no prefect.toml or pyproject.toml of the user's is picked up
                start_new_session=True,  # a Ctrl-C in the terminal must not take it before those that use it
            )
        return cls(name, url, ProcessId.of(process.pid), log, health)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LocalServer:
        return cls(**{**content, "process": ProcessId(**content["process"]), "log": Path(content["log"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"log": str(self.log)}

    def running(self) -> bool:
        return self.process.host == socket.gethostname() and self.process.alive()

    def healthy(self) -> bool:
        if not self.url:
            return self.health in self.log.read_text(errors="replace").splitlines()
        try:
            # verify=False: loading certificates takes 20 ms a call, and loopback HTTP needs none
            answer = httpx.get(f"{self.url}/{self.health}", timeout=5.0, trust_env=False, verify=False)
            return answer.status_code == 200
        except httpx.HTTPError:
            return False

    def wait_until_healthy(self) -> None:
        """Raises CommandError with the end of the server's log if it dies or never answers."""
        deadline = time.monotonic() + STARTUP_SECONDS
        while not self.healthy():
            if not self.process.alive():
                raise CommandError(f"{self.name} ended at once; its log {self.log} says:\n{tail(self.log)}")
            if time.monotonic() > deadline:
                raise CommandError(
                    f"{self.name} did not answer within {STARTUP_SECONDS:.0f} s; "
                    f"its log {self.log} says:\n{tail(self.log)}"
                )
            time.sleep(0.1)


def free_port(preferred: int = 0) -> int:
    """The preferred port where nobody listens on it, else a free one."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as the servers do: closed a second ago is free
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise CommandError("no free port on 127.0.0.1")


def tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"
