"""Asking a server how long a chat is by its own tokenizer and template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from compaction.engines.endpoint_errors import Failure
from compaction.engines.endpoint_http import Connection
from compaction.engines.endpoint_info import Server
from compaction.engines.endpoint_settings import EndpointSettings
from compaction.protocols import ChatMessage, Tools

_T = TypeVar("_T")


async def count_on_server(
    connection: Connection,
    settings: EndpointSettings,
    server: Server,
    messages: Sequence[ChatMessage],
    generation_prompt: int,
    tools: Tools = (),
) -> int | Failure | None:
    """Tokens of these messages without what opens a reply (`generation_prompt` tokens); None from a server that has
    no tokenizer to ask. Raises EngineError for a key that cannot be sent."""
    chat = {"messages": list(messages), **({"tools": list(tools)} if tools else {})}
    if server == "vllm":
        body = {"model": settings.model, **chat, "add_generation_prompt": False}
        answer = await connection.fetch("POST", f"{settings.server_root}/tokenize", body)
        return _field(answer, "count", int)
    if server == "llama.cpp":
        answer = await connection.fetch("POST", f"{settings.server_root}/apply-template", chat)
        prompt = _field(answer, "prompt", str)
        if isinstance(prompt, Failure):
            return prompt
        body = {"content": prompt, "add_special": True, "parse_special": True}
        tokens = _field(await connection.fetch("POST", f"{settings.server_root}/tokenize", body), "tokens", list)
        return tokens if isinstance(tokens, Failure) else max(0, len(tokens) - generation_prompt)
    return None


def _field(answer: object, name: str, kind: type[_T]) -> _T | Failure:
    if isinstance(answer, Failure):
        return answer
    value = answer.get(name) if isinstance(answer, dict) else None
    return value if isinstance(value, kind) else Failure("server_error", f"the tokenizer's answer has no {name}")
