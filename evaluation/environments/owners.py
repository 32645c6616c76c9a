"""Whose a sandbox is: the process that drives it, so that what a killed one leaves behind can be told and removed."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import psutil

_CLOCK_TOLERANCE = 2.0
"""Seconds by which a creation time may move when the system clock is corrected"""


@dataclass(frozen=True)
class Owner:
    """A process for good: a pid alone is used again."""

    host: str
    pid: int
    created: float

    @classmethod
    def current(cls) -> Owner:
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """What `str` gave; None where it is something else."""
        try:
            host, pid, created = text.rsplit("_", 2)
            return cls(host, int(pid), float(created))
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.host}_{self.pid}_{self.created:.2f}"

    def is_dead(self) -> bool:
        """False also where this host cannot tell."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < _CLOCK_TOLERANCE
            return not same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False
