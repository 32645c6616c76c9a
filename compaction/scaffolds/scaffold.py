"""What every scaffold offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from compaction.protocols import Execution, FinishReason, ToolCall, Tools


@dataclass(frozen=True)
class Call:
    """One function call of a reply: the commands that it runs, or its answer where nothing is run."""

    id: str
    name: str
    arguments: dict[str, Any]
    commands: tuple[str, ...] = ()
    answer: str | None = None


@dataclass(frozen=True)
class Action:
    """A parsed reply.

    `text` is the command to run, or for `malformed` the advice given as the observation. A reply of `calls` has no
    text: each call is answered by itself.
    """

    kind: Literal["command", "finish", "malformed", "calls"]
    text: str = ""
    calls: tuple[Call, ...] = ()


class Scaffold(Protocol):
    """Reads the replies of one rollout and writes its observations."""

    act: str
    """Stands for {act} in a prompt pack's system prompt: how to act"""
    finish: str
    """Stands for {finish} there: how to end"""
    tools: Tools
    """Functions that the model may call; none where it acts by its text alone"""

    def parse(self, said: str | None, finish_reason: FinishReason, tool_calls: Sequence[ToolCall] = ()) -> Action:
        """The action of the next reply. `said` stands behind the thinking, and is None where that never ended;
        `tool_calls` are those that an endpoint gives beside the text."""
        ...

    def is_action(self, text: str) -> bool:
        """Whether a text is an attempt to act (a summary must not be one)."""
        ...

    def observation(self, execution: Execution) -> str: ...
