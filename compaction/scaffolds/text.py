"""Scaffolds that read the action from the reply's text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from compaction.protocols import Execution, FinishReason, ToolCall, Tools
from compaction.scaffolds.scaffold import Action
from compaction.thinking import UNCLOSED


class ShellLine:
    """The whole reply is one shell command; `exit` ends the rollout."""

    act = "Reply with one shell command on one line, and nothing else."
    finish = "When the task is complete, reply with exit."
    tools: Tools = ()
    commands = frozenset({"cat", "ls", "grep", "echo", "exit"})

    def parse(self, said: str | None, finish_reason: FinishReason, tool_calls: Sequence[ToolCall] = ()) -> Action:
        if said is None:
            return Action("malformed", UNCLOSED)
        command = said.strip()
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

    act = (
        "In each reply, think briefly, then\ngive exactly one command in a fenced block, and wait for its output:\n\n"
        "```bash\nyour command\n```\n\nThe block may hold several lines."
    )
    finish = "When the task is complete, reply with a block that holds\nnothing but exit."
    tools: Tools = ()

    def parse(self, said: str | None, finish_reason: FinishReason, tool_calls: Sequence[ToolCall] = ()) -> Action:
        if said is None:
            return Action("malformed", UNCLOSED)
        if finish_reason == "length":
            return Action("malformed", f"Your reply was cut off: it was too long. Nothing was run.\n{ADVICE}")
        blocks = self._blocks(said)
        if not blocks:
            opened = re.search(r"^(`{3,}|~{3,})[ \t]*(bash|sh|shell)[ \t]*$", said, re.MULTILINE)
            why = "it is empty" if not said.strip() else "there is no command in it"
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
        return shell_observation(execution)

    def _blocks(self, reply: str) -> list[str]:
        found = [(match["language"].lower(), match["body"]) for match in FENCE.finditer(reply.replace("\r\n", "\n"))]
        named = [body for language, body in found if language in SHELLS]
        return named or [body for language, body in found if not language]


def shell_observation(execution: Execution) -> str:
    """Exit code, what else is to be known, and the output."""
    output = execution.output.rstrip("\n")
    head = f"exit code {execution.exit_code}" + (f" · {execution.note}" if execution.note else "")
    return f"[{head}]\n{output}" if output.strip() else f"[{head}, no output]"
