"""Which process is meant: a pid alone is reused, a pid with its creation time is not."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass

import psutil

CLOCK_TOLERANCE = 2.0
"""Seconds by which a creation time may move when the system clock is corrected."""


@dataclass(frozen=True)
class ProcessId:
    """One process on one host, for good."""

    host: str
    pid: int
    created: float
    """Seconds since the epoch"""

    @classmethod
    def current(cls) -> ProcessId:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Raises psutil.NoSuchProcess if it is gone."""
        return cls(socket.gethostname(), pid, psutil.Process(pid).create_time())

    def alive(self) -> bool:
        """Only meaningful on its own host; a zombie counts as gone."""
        try:
            process = psutil.Process(self.pid)
            return (
                abs(process.create_time() - self.created) < CLOCK_TOLERANCE and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            return False


def stop_process(identity: ProcessId, *, patience: float = 10.0, head_only: bool = False) -> None:
    """End a process and its children: first asked, after `patience` seconds killed. Does nothing if it is gone.

    `head_only`: only the process itself is asked; it ends its children in its own way.
    """
    if not identity.alive():
        return
    try:
        process = psutil.Process(identity.pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return
    for member in [process] if head_only else family:
        _signal(member, "terminate")
    _, stubborn = psutil.wait_procs(family, timeout=patience)
    for member in stubborn:
        _signal(member, "kill")
    psutil.wait_procs(stubborn, timeout=patience)


def _signal(process: psutil.Process, how: str) -> None:
    with suppress(psutil.Error):
        getattr(process, how)()
