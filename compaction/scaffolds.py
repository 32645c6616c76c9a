"""How a reply becomes a command, and a command's result an observation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from compaction.protocols import Execution, FinishReason


@dataclass(frozen=True)
class Action:
    """A parsed reply. `text` is the command to run, or for `malformed` the advice given as the observation."""

    kind: Literal["command", "finish", "malformed"]
    text: str = ""


class Scaffold(Protocol):
    """Reads replies and writes observations."""

    def parse(self, reply: str, finish_reason: FinishReason) -> Action: ...

    def is_action(self, text: str) -> bool:
        """Whether a text is an attempt to act (a summary must not be one)."""
        ...

    def observation(self, execution: Execution) -> str: ...


class ShellLine:
    """The whole reply is one shell command; `exit` ends the rollout."""

    commands = frozenset({"cat", "ls", "grep", "echo", "exit"})

    def parse(self, reply: str, finish_reason: FinishReason) -> Action:
        command = reply.strip()
        if finish_reason == "length":
            return Action("malformed", " reply cut: too long")
        if not command:
            return Action("malformed", " empty reply: give one command")
        if "\n" in command:
            return Action("malformed", " give one command on one line")
        if command == "exit":
            return Action("finish")
        return Action("command", command)

    def is_action(self, text: str) -> bool:
        words = text.split(maxsplit=1)
        return bool(words) and words[0] in self.commands

    def observation(self, execution: Execution) -> str:
        return execution.output.rstrip("\n")


SCAFFOLDS: dict[str, type[Scaffold]] = {"shell-line": ShellLine}


def load_scaffold(name: str) -> Scaffold:
    """The scaffold of that name. Raises ValueError naming the known ones."""
    if name not in SCAFFOLDS:
        raise ValueError(f"scaffold {name!r} is unknown; choose one of: {', '.join(sorted(SCAFFOLDS))}")
    return SCAFFOLDS[name]()
