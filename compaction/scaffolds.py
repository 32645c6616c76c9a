"""How a reply becomes a command, and a command's result an observation."""

from __future__ import annotations

import re
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


FENCE = re.compile(
    r"^(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>\w*)[ \t]*\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)
SHELLS = frozenset({"bash", "sh", "shell"})
ADVICE = (
    "Reply with exactly one block:\n\n```bash\nyour command\n```\n\n"
    "It may hold several lines. If the command itself holds a line of ```, open and close the block with ````. "
    "When the task is complete, the block holds nothing but: exit"
)


class BashBlock:
    """Free text and one fenced shell block a turn; a block of nothing but `exit` ends the rollout.

    Works with every model that can chat. Blocks of other languages are prose; one without a language counts as shell
    where no other does.
    """

    def parse(self, reply: str, finish_reason: FinishReason) -> Action:
        if finish_reason == "length":
            return Action("malformed", f"Your reply was cut off: it was too long. Nothing was run.\n{ADVICE}")
        blocks = self._blocks(reply)
        if not blocks:
            opened = re.search(r"^(`{3,}|~{3,})[ \t]*(bash|sh|shell)[ \t]*$", reply, re.MULTILINE)
            why = "it is empty" if not reply.strip() else "there is no command in it"
            if opened:
                why = "its block is not closed"
            return Action("malformed", f"Your reply could not be used: {why}. Nothing was run.\n{ADVICE}")
        if len(blocks) > 1:
            return Action("malformed", f"Your reply holds {len(blocks)} commands. Nothing was run.\n{ADVICE}")
        command = blocks[0].strip("\n")
        if not command.strip():
            return Action("malformed", f"The block in your reply is empty. Nothing was run.\n{ADVICE}")
        return Action("finish") if command.strip() == "exit" else Action("command", command)

    def is_action(self, text: str) -> bool:
        """A text that ends with its one shell block. A summary may quote commands, but goes on behind them."""
        found = list(FENCE.finditer(text))
        return bool(found) and found[-1]["language"] in SHELLS and not text[found[-1].end() :].strip()

    def observation(self, execution: Execution) -> str:
        output = execution.output.rstrip("\n")
        head = f"exit code {execution.exit_code}" + (f" · {execution.note}" if execution.note else "")
        return f"[{head}]\n{output}" if output.strip() else f"[{head}, no output]"

    def _blocks(self, reply: str) -> list[str]:
        found = [(match["language"].lower(), match["body"]) for match in FENCE.finditer(reply.replace("\r\n", "\n"))]
        named = [body for language, body in found if language in SHELLS]
        return named or [body for language, body in found if not language]


SCAFFOLDS: dict[str, type[Scaffold]] = {"bash-block": BashBlock, "shell-line": ShellLine}


def load_scaffold(name: str) -> Scaffold:
    """The scaffold of that name. Raises ValueError naming the known ones."""
    if name not in SCAFFOLDS:
        raise ValueError(f"scaffold {name!r} is unknown; choose one of: {', '.join(sorted(SCAFFOLDS))}")
    return SCAFFOLDS[name]()
