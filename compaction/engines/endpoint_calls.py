"""Function calls in a chat completion, whole or put together from the pieces of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from compaction.protocols import ToolCall


@dataclass
class _Gathered:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class CallBuilder:
    """Gathers `tool_calls`. What is no call is passed over: the reply then has one fewer, and the agent is told."""

    _calls: dict[object, _Gathered] = field(default_factory=dict)
    """By position, or by id from servers that send each call whole and number none"""

    def add(self, pieces: Any) -> None:
        for piece in pieces if isinstance(pieces, list) else []:
            function = piece.get("function") if isinstance(piece, dict) else None
            if isinstance(function, dict):
                self._add(piece, function)

    def _add(self, piece: dict[str, Any], function: dict[str, Any]) -> None:
        key = piece.get("index")
        if not isinstance(key, int):
            key = piece.get("id") or f"call {len(self._calls)}"
        call = self._calls.setdefault(str(key), _Gathered())
        call.id = call.id or str(piece.get("id") or "")
        call.name = call.name or str(function.get("name") or "")
        arguments = function.get("arguments")
        if arguments is not None:  # an object from some servers, where others send its JSON
            call.arguments += arguments if isinstance(arguments, str) else json.dumps(arguments)

    def build(self) -> tuple[ToolCall, ...]:
        """The calls in order, each with an id: its answer names it."""
        return tuple(
            ToolCall(call.id or f"call_{number}", call.name, call.arguments)
            for number, call in enumerate(self._calls.values(), 1)
        )
