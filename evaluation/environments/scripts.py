"""How a script goes into a sandbox's shell and how its output, exit code and session come back.

The script is read from standard input, so that no limit on arguments applies and no process list shows it. Its output,
standard error merged in as a terminal would, comes back on one stream. On the other, the control stream, the shell
reports how the script ended: exit code, working directory, exported variables. They are kept outside the sandbox and
given to the next script. Both reports are framed by a secret word that is new for each script. So the end is known as
soon as the script has ended, even where processes that it left behind hold the streams open.

A script that is killed, or that sets an EXIT trap of its own, reports nothing: the session stays as it was.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from evaluation.environments.output import ClippedOutput

_LOADER = '__s=$(head -c "$1") && eval "unset __s\n$__s"'
_CONTROL_LIMIT = 4_000_000
"""Bytes; a larger environment would not fit a process either"""


@dataclass(frozen=True)
class Session:
    """What one command leaves to the next."""

    folder: str
    exports: str | None = None
    """Shell text that restores every exported variable; None: those of the sandbox itself"""


@dataclass(frozen=True)
class Script:
    """Something for a sandbox's shell."""

    text: str
    session: Session
    seconds: float
    """After these everything that runs in the sandbox is ended"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of the sandbox's own; not for a session that has its exports"""
    user: str | None = None
    """None: the sandbox's default"""
    keep: int = 30_000
    """Bytes kept of the output"""


@dataclass(frozen=True)
class Ran:
    """How a script went."""

    output: str
    exit_code: int
    session: Session | None = None
    """None: it did not tell"""
    note: str = ""
    timed_out: bool = False


class Exchange:
    """One script under way. Not started after the end of both streams means that the sandbox could not run it."""

    def __init__(self, script: Script) -> None:
        self._word = secrets.token_hex(16)
        self._mark = self._word.encode()
        self.payload = self._payload(script).encode("utf-8", "replace")
        self._output = ClippedOutput(script.keep)
        self._held = b""
        self._output_ended = False
        self._control = bytearray()

    def arguments(self, shell: str) -> list[str]:
        return [shell, "-c", _LOADER, shell, str(len(self.payload))]

    def feed_output(self, data: bytes) -> None:
        if self._output_ended:
            return
        data = self._held + data
        end = data.find(self._mark)
        self._output_ended = end >= 0
        if not self._output_ended:
            end = max(len(data) - len(self._mark) + 1, 0)
        self._output.add(data[:end])
        self._held = data[end:]

    def feed_control(self, data: bytes) -> None:
        self._control += data[: _CONTROL_LIMIT - len(self._control)]

    @property
    def started(self) -> bool:
        return self._mark in self._control

    @property
    def ended(self) -> bool:
        """The script told how it ended, and all of its output is here."""
        return self._output_ended and self._control.count(self._mark) >= 4

    def output(self) -> str:
        if not self._output_ended:
            self._output.add(self._held)
            self._held = b""
        return self._output.text()

    def complaint(self) -> str:
        """What came instead of a start."""
        return (self.output() + self._control.decode("utf-8", "replace")).strip()

    def report(self) -> tuple[int, Session] | None:
        """Exit code and session, once `ended`."""
        parts = self._control.decode("utf-8", "replace").split(self._word)
        if len(parts) < 5:
            return None
        code, _, folder = parts[2].partition("\n")
        return int(code), Session(folder.removesuffix("\n"), parts[3])

    def _payload(self, script: Script) -> str:
        w = self._word
        end = (
            "{ __c=$?; set +aex; } 2>/dev/null; "  # hidden from `set -x`
            f'printf %s {w} >&8; {{ printf %s {w}; echo "$__c"; pwd; printf %s {w}; unset __c; export -p; '
            f"printf %s {w}; }} >&9"
        )
        prelude = f"exec 8>&1 9>&2 2>&1 </dev/null; set --; trap {shlex.quote(end)} EXIT; printf %s {w} >&9"
        folder = f"cd -- {shlex.quote(script.session.folder)} || cd /"
        return "\n".join([prelude, folder, script.session.exports or "", script.text, ""])
