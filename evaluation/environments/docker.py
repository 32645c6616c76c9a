"""Task folders in Docker containers: one container per trial, driven through the daemon's API alone.

The daemon may be remote. Nothing in the container is relied upon but a shell and `head`: its processes are listed and
ended from outside, by the daemon, since an agent may have taken every process slot or replaced every tool.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

import docker
from docker.errors import APIError, DockerException, NotFound
from docker.types import Ulimit
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from compaction.protocols import EnvironmentFailure
from evaluation.environments.docker_images import image_of
from evaluation.environments.docker_leftovers import OWNER_LABEL, reap_once
from evaluation.environments.owners import Owner
from evaluation.environments.sandbox import Sandbox
from evaluation.environments.scripts import Exchange, Ran, Script, Session

log = logging.getLogger(__name__)

RUN_VARIABLE = "COMPACTIONRL_RUN"
RUN_LABEL = "compactionrl.run"
"""Holds what COMPACTIONRL_RUN holds: `compactionrl doctor` finds containers of dead runs by it"""

_CALL_SECONDS = 60.0
"""The longest silence of the daemon within one call"""
_KEEP_ALIVE = ["sh", "-c", "exec sleep 2147483647"]
_OWN_PROCESSES = 2
"""Docker's init and the keep-alive"""
_ENDED = "everything that ran in the sandbox was ended"
_POLL_SECONDS = 0.2
_LATE_SECONDS = 2.0
"""How long a busy daemon may take to hear that a container has ended, and of what"""
_MIB = 1 << 20
_NO_WORKDIR = 43
_KILLED = 137
"""The exit code of what SIGKILL ended, be it for memory or by `kill -9`"""
_PREPARE = """\
mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs /logs/* || exit
[ -d {workdir} ] || exit {no_workdir}
if command -v bash >/dev/null; then echo bash; else echo sh; fi
"""


class DockerEnvironment(Sandbox):
    """One container. A process that the agent leaves in the background must write to a file: Docker closes the output
    two seconds after the command that started it. Disk use is limited per file only: Docker has no quota that works
    on every disk, so `storage_mb` has no effect."""

    _client: Any = None
    _container: Any = None

    def open(self) -> None:
        with _connecting():
            self._client = docker.from_env(timeout=_CALL_SECONDS)
            reap_once(self._client)
        with _talking("environment_start"):
            image = image_of(self._client, self.folder, lambda: self.interrupted.is_set())
            if self.interrupted.is_set():
                raise EnvironmentFailure("given up before the container was made", "environment_start")
            self._container = self._create(image)
            self._container.start()
            self.workdir = self.folder.workdir or image.attrs["Config"].get("WorkingDir") or "/"
            self._prepare()

    def run(self, script: Script) -> Ran:
        with _talking():
            exchange = self._exchange(script)
            if exchange.started or exchange.timed_out:
                return self._outcome(script, exchange)
            if self._stays_up():  # no process slot left
                self._restart()
            else:
                self._revive()
            ran = self._outcome(script, self._exchange(script))
            return replace(ran, note=ran.note or f"before it, {_ENDED}")

    def put(self, archive: bytes) -> None:
        with _talking():
            self._container.put_archive("/", archive)

    def get(self, path: str) -> Iterator[bytes]:
        with _talking():
            try:
                chunks, _ = self._container.get_archive(path)
            except NotFound:
                raise FileNotFoundError(path) from None
            return _failing_as_ours(chunks)

    def end_processes(self) -> None:
        with _talking():
            for _ in range(3):  # the shell of the last command may still be on its way out
                if self._only_own_processes():
                    return
                time.sleep(0.02)
            self._restart()

    def remove(self) -> None:
        if self._client is None:
            return
        try:
            if self._container is not None:
                with _talking(), suppress(NotFound):
                    self._container.remove(force=True, v=True)
        finally:
            self._client.close()

    def _create(self, image: Any) -> Any:
        settings, folder = self.settings, self.folder
        memory = (folder.memory_mb or settings.memory_mb) * _MIB
        file_size = settings.file_mb * _MIB
        isolated = settings.network == "none" or folder.network == "no-network"
        return self._client.containers.create(
            image.id,
            entrypoint=_KEEP_ALIVE,
            command=[],
            name=f"compactionrl-{re.sub(r'[^a-zA-Z0-9_.-]', '-', folder.name)[:60]}-{secrets.token_hex(4)}",
            labels={RUN_LABEL: os.environ.get(RUN_VARIABLE, ""), OWNER_LABEL: str(Owner.current())},
            environment=folder.env,
            init=True,
            network_mode="none" if isolated else "bridge",
            mem_limit=memory,
            memswap_limit=memory,
            cpu_period=100_000,  # not nano_cpus: the daemon refuses more of those than it has CPUs
            cpu_quota=int((folder.cpus or settings.cpus) * 100_000),
            pids_limit=settings.pids,
            ulimits=[Ulimit(name="fsize", soft=file_size, hard=file_size)],
            cap_drop=["NET_RAW", "MKNOD"],
            security_opt=["no-new-privileges:true"],
            healthcheck={"test": ["NONE"]},
        )

    def _prepare(self) -> None:
        """Makes /logs, checks the working directory, finds the shell."""
        text = _PREPARE.format(workdir=shlex.quote(self.workdir), no_workdir=_NO_WORKDIR)
        ran = self.run(Script(text, Session("/"), _CALL_SECONDS, user="root"))
        if ran.exit_code == _NO_WORKDIR:
            raise EnvironmentFailure(
                f"task {self.folder.name}: its workdir {self.workdir} does not exist in the image", "environment_start"
            )
        self.shell = ran.output.strip()
        if ran.exit_code or self.shell not in ("bash", "sh"):
            raise EnvironmentFailure(
                f"task {self.folder.name}: its container runs no shell command: {ran.output.strip()} {ran.note}",
                "environment_start",
            )

    def _exchange(self, script: Script) -> _Exec:
        exchange = _Exec(self._client.api, self._container.id, script, self.shell)
        exchange.go_on(time.monotonic() + script.seconds, self.interrupted)
        return exchange

    def _outcome(self, script: Script, run: _Exec) -> Ran:
        report = run.report()
        if report is not None:
            code, session = report
            return Ran(run.output(), code, session, self._note(code))
        if run.timed_out:
            self._restart()
            note = f"stopped after {script.seconds:g} s; {_ENDED}"
            return Ran(run.output(), _KILLED, note=note, timed_out=True)
        if not self._stays_up():
            self._revive()
            return Ran(run.output(), _KILLED, note=_ENDED)
        if not run.started:
            return Ran(run.complaint(), 126, note="the sandbox's shell could not run it")
        code = run.exit_code()
        return Ran(run.output(), code, note=self._note(code))

    def _note(self, code: int) -> str:
        memory = self.folder.memory_mb or self.settings.memory_mb
        return f"killed, perhaps for more than {memory:,} MiB of memory" if code == _KILLED else ""

    def _only_own_processes(self) -> bool:
        try:
            return len(self._container.top()["Processes"]) <= _OWN_PROCESSES
        except APIError:  # the daemon's machine has no `ps`, or the container is down
            return False

    def _is_running(self) -> bool:
        self._container.reload()
        return bool(self._container.attrs["State"]["Running"])

    def _stays_up(self) -> bool:
        """Whether the container runs, and not because a busy daemon has yet to hear of its end: to restart it before
        that would hide that memory took it down."""
        deadline = time.monotonic() + _LATE_SECONDS
        while self._is_running():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.05)
        return False

    def _restart(self) -> None:
        """The one way to end every process that nothing inside can resist. Files stay."""
        self._container.restart(timeout=0)

    def _revive(self) -> None:
        """After a command that took the container down. Raises EnvironmentFailure where memory did."""
        state = self._container.attrs["State"]
        if self._memory_ended_it(state):
            memory = self.folder.memory_mb or self.settings.memory_mb
            raise EnvironmentFailure(
                f"task {self.folder.name}: the container was killed for more than {memory:,} MiB of memory "
                "(memory_mb in task.toml)",
                "sandbox_oom",
            )
        log.info("task %s: its container ended with %s and is started again", self.folder.name, state["ExitCode"])
        self._container.start()

    def _memory_ended_it(self, state: dict[str, Any]) -> bool:
        """A busy daemon may hear of the end before it hears of its cause, which then stands in its events alone."""
        if state["OOMKilled"] or state["ExitCode"] != _KILLED:
            return bool(state["OOMKilled"])
        ended, now = (datetime.fromisoformat(t) for t in (state["FinishedAt"], self._client.info()["SystemTime"]))
        events = self._client.events(
            since=int(ended.timestamp()) - 1,  # whole seconds; what came before the end stands in the state
            until=int(now.timestamp() + _LATE_SECONDS),
            filters={"container": self._container.id, "event": "oom"},
        )
        found = next(events, None) is not None
        with suppress(DockerException):  # which some ways to a daemon cannot
            events.close()
        return found


class _Exec(Exchange):
    """An exchange with a container."""

    timed_out = False

    def __init__(self, api: Any, container: str, script: Script, shell: str) -> None:
        super().__init__(script)
        self._api = api
        self._container = container
        self._arguments = self.arguments(shell)
        if script.session.exports is not None:
            self._arguments = ["env", "-i", *self._arguments]
        self._script = script
        self._id: str | None = None

    def go_on(self, deadline: float, interrupted: threading.Event) -> None:
        """Until the script has ended, its time is up, or nobody waits for it any more."""
        try:
            stream = self._begin()
        except NotFound:
            raise
        except APIError as error:  # such as a container that has just ended
            self.feed_output(str(error.explanation).encode())
            return
        # Below docker-py's file, which would give up for good at its first timeout. Nothing is lost in its buffer: no
        # byte comes before the script was sent.
        connection = getattr(stream, "_sock", stream)
        try:
            connection.settimeout(_CALL_SECONDS)
            with suppress(BrokenPipeError, ConnectionResetError):  # it could not start; it says why
                connection.sendall(self.payload)
            connection.settimeout(_POLL_SECONDS)
            frames = _Frames(self)
            while not self.ended:
                if time.monotonic() > deadline or interrupted.is_set():
                    self.timed_out = True
                    return
                with suppress(TimeoutError):
                    data = connection.recv(1 << 16)
                    if not data:
                        return
                    frames.feed(data)
        finally:
            connection.close()
            stream.close()

    def _begin(self) -> Any:
        self._id = self._api.exec_create(
            self._container,
            self._arguments,
            stdin=True,
            user=self._script.user or "",
            environment=dict(self._script.environment),
            workdir="/",
        )["Id"]
        return self._api.exec_start(self._id, socket=True)

    def exit_code(self) -> int:
        """Of a script that did not report."""
        for _ in range(100):
            code = self._api.exec_inspect(self._id)["ExitCode"]
            if code is not None:
                return int(code)
            time.sleep(0.02)
        return _KILLED


class _Frames:
    """Takes the daemon's mix of both streams apart."""

    _HEADER = struct.Struct(">BxxxL")

    def __init__(self, exchange: Exchange) -> None:
        self._sinks = {1: exchange.feed_output, 2: exchange.feed_control}
        self._stream = 0
        self._left = 0
        self._data = b""

    def feed(self, data: bytes) -> None:
        data = self._data + data
        at = 0
        while at < len(data):
            if not self._left:
                if len(data) - at < self._HEADER.size:
                    break
                self._stream, self._left = self._HEADER.unpack_from(data, at)
                at += self._HEADER.size
            piece = data[at : at + self._left]
            self._sinks.get(self._stream, self._sinks[1])(piece)
            at += len(piece)
            self._left -= len(piece)
        self._data = data[at:]


@contextmanager
def _connecting() -> Iterator[None]:
    try:
        yield
    except (DockerException, RequestException, OSError) as error:
        raise EnvironmentFailure(
            f"no Docker daemon answers: {error}; is Docker running? "
            f"DOCKER_HOST={os.environ.get('DOCKER_HOST', '')}; `--env local` needs no Docker",
            "environment_start",
        ) from None


@contextmanager
def _talking(error_class: str | None = None) -> Iterator[None]:
    """Errors of the daemon, and of the way to it, as EnvironmentFailure."""
    try:
        yield
    except (DockerException, RequestException, HTTPError, ConnectionError, TimeoutError) as error:
        raise EnvironmentFailure(f"Docker: {error}", error_class) from error


def _failing_as_ours(chunks: Iterable[bytes]) -> Iterator[bytes]:
    with _talking():
        yield from chunks
