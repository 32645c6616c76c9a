"""A bubblewrap process: what it is told, what it says, and that nothing in its sandbox outlives it."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Literal

from compaction.protocols import EnvironmentFailure
from evaluation.environments.scripts import Exchange

Stop = Literal["", "time", "disk"]

_POLL_SECONDS = 0.2
_DISK_SECONDS = 1.0
_END_SECONDS = 10.0


class BwrapProcess:
    """One command in a sandbox of its own.

    bubblewrap ends as soon as the command has, a moment before the kernel has ended the rest of the sandbox. So the
    sandbox's first process is watched: when it is gone, all are.
    """

    def __init__(self, prelude: Sequence[str], arguments: Sequence[str], source: bytes) -> None:
        """`prelude`: lines of shell that limit what comes after. `source`: the command's standard input.

        Raises EnvironmentFailure.
        """
        information, write_end = os.pipe()
        launcher = "\n".join(["set -e", *prelude, 'exec "$@"'])
        try:
            with tempfile.TemporaryFile() as file:  # not a pipe: nobody must wait for the command to read
                file.write(source)
                file.seek(0)
                self._process = subprocess.Popen(
                    ["sh", "-c", launcher, "sh", "bwrap", "--info-fd", str(write_end), *arguments],
                    stdin=file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={"PATH": os.environ.get("PATH", os.defpath)},
                    cwd="/",
                    pass_fds=[write_end],
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            os.close(information)
            raise EnvironmentFailure(f"cannot start bubblewrap: {error}") from None
        finally:
            os.close(write_end)
        self._first = _open_first(information)

    def exchange(
        self, exchange: Exchange, deadline: float, interrupted: threading.Event, disk_is_full: Callable[[], bool]
    ) -> Stop:
        """Hands a script's streams over until it has ended; says why it has to be stopped before."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        look_at_disk = time.monotonic() + _DISK_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ, exchange.feed_output)
            selector.register(self._process.stderr, selectors.EVENT_READ, exchange.feed_control)
            while selector.get_map() and not exchange.ended:
                for key, _ in selector.select(_POLL_SECONDS):
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        key.data(data)
                    else:
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now > deadline or interrupted.is_set():
                    return "time"
                if now > look_at_disk:
                    if disk_is_full():
                        return "disk"
                    look_at_disk = now + _DISK_SECONDS
        return ""

    def complete(self, seconds: float) -> tuple[int, str]:
        """(exit code, what it printed as errors) of a command that prints little."""
        try:
            _, errors = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            errors = f"not done after {seconds:g} s".encode()
        return self.end(now=self._process.returncode is None), errors.decode("utf-8", "replace").strip()

    def chunks(self) -> Iterator[bytes]:
        """What it prints. It is ended with the iterator."""
        assert self._process.stdout is not None
        try:
            while chunk := self._process.stdout.read(1 << 16):
                yield chunk
        finally:
            self.end(now=True)

    def end(self, *, now: bool) -> int:
        """The exit code, as a shell gives it; afterwards nothing runs in the sandbox. `now`: it is killed."""
        try:
            if self._first is not None and (now or not _is_over(self._first, _END_SECONDS)):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._first, signal.SIGKILL)
                _is_over(self._first, _END_SECONDS)
            if now and self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        finally:
            if self._first is not None:
                os.close(self._first)
                self._first = None
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()
        return code if code >= 0 else 128 - code


def _open_first(information: int) -> int | None:
    """A descriptor of the sandbox's first process, which bubblewrap names; None where it started none."""
    with os.fdopen(information, "rb") as file, suppress(ValueError, LookupError, OSError):
        told = b""
        while b"}" not in told and (piece := file.read1()):
            told += piece
        return os.pidfd_open(json.loads(told)["child-pid"])
    return None


def _is_over(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])
