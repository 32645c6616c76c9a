"""A bubblewrap process: what it is told, what it says, and that it ends."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

from evaluation.environments.scripts import Exchange

Stop = Literal["", "time", "disk"]

_POLL_SECONDS = 0.2
_DISK_SECONDS = 1.0
_END_SECONDS = 10.0


def exchange_with(
    process: subprocess.Popen[bytes],
    exchange: Exchange,
    deadline: float,
    interrupted: threading.Event,
    disk_is_full: Callable[[], bool],
) -> Stop:
    """Hands a script's streams over until it has ended; says why it had to stop before."""
    assert process.stdout is not None
    assert process.stderr is not None
    look_at_disk = time.monotonic() + _DISK_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, exchange.feed_output)
        selector.register(process.stderr, selectors.EVENT_READ, exchange.feed_control)
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


def end(process: subprocess.Popen[bytes], *, now: bool = False) -> int:
    """The exit code, as a shell gives it. Whoever does not end by itself is killed, and its sandbox with it."""
    try:
        if now:
            _kill(process)
        code = process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(process)
        code = process.wait()
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return code if code >= 0 else 128 - code


def archive_from(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What it prints. It is ended with the iterator."""
    assert process.stdout is not None
    try:
        while chunk := process.stdout.read(1 << 16):
            yield chunk
    finally:
        end(process, now=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """`--die-with-parent` then ends the sandbox's first process, and with that its namespace."""
    os.killpg(process.pid, signal.SIGKILL)
