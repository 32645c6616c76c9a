"""Before a job: does the endpoint answer, know the model, take the key, and is its context long enough?"""

from __future__ import annotations

import difflib
import logging
from typing import Any
from urllib.parse import urlsplit

from compaction.engines.endpoint_errors import EndpointRefused, Failure
from compaction.engines.endpoint_http import Connection
from compaction.engines.endpoint_info import EndpointInfo, Server
from compaction.engines.endpoint_settings import EndpointSettings
from compaction.engines.openai import OpenAIEngine
from compaction.engines.server_tokenizer import count_on_server
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import TextRenderer
from compaction.history import ids
from compaction.protocols import ContextLengthError, EngineError, GenerateRequest

_log = logging.getLogger(__name__)

_OWNERS: dict[str, Server] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
    "library": "ollama",
    "openai": "openai",
    "openai-internal": "openai",
    "system": "openai",
}
"""What servers write into `owned_by` of their models"""

_LISTS_ALL: frozenset[Server] = frozenset({"vllm", "sglang", "llama.cpp"})
"""Servers that serve what they list and nothing else; some of them answer to any name with the model they have"""

_ADVICE = {
    "authentication": "set the variable to a key of this endpoint, or name another with api_key_env",
    "budget_exceeded": "add credit there, or raise the limit",
    "connection": "check that the server runs there and can be reached from here",
    "engine_timeout": "check that the server is not overloaded, or raise timeout",
    "rate_limit": "wait, or raise attempts and max_wait",
    "server_error": "look into the server's log",
    "bad_request": "see what it refuses; a field can be left out with request_extra: {FIELD: null}",
    "refusal": "check the server's content filter",
}
"""Error class to the next step"""

_MESSAGES = ({"role": "user", "content": "Reply with the word ok."},)


async def preflight(
    settings: EndpointSettings, *, temperature: float = 1.0, spending: Spending | None = None
) -> EndpointInfo:
    """Asks an endpoint what it is, and for one reply of at most 16 tokens at `temperature`, booked in `spending`.

    Raises EndpointRefused with one message and the next step if it cannot be used.
    """
    spending = spending or Spending()
    connection = Connection(settings)
    try:
        listing = await _list_models(connection, settings)
        entry = _entry(settings, listing)
        server = _server(settings, entry, listing)
        models = tuple(str(model["id"]) for model in listing)
        if entry is None and server in _LISTS_ALL:
            raise EndpointRefused(_unknown_model(settings, models, "not served there"))
        usage, token_ids = await _first_reply(settings, server, models, temperature, spending)
        return EndpointInfo(
            model=settings.model,
            server=server,
            context_length=await _context_length(connection, settings, server, entry or {}),
            gives_token_ids=token_ids,
            has_tokenizer=isinstance(await count_on_server(connection, settings, server, _MESSAGES, 0), int),
            gives_usage=usage,
            models=models,
        )
    except EngineError as error:
        raise EndpointRefused(_with_advice(error)) from None
    finally:
        await connection.aclose()


def check_window(info: EndpointInfo, window: int) -> None:
    """Raises EndpointRefused if a window of so many tokens does not fit the endpoint's context, where that is known."""
    if info.context_length is not None and window > info.context_length:
        raise EndpointRefused(
            f"window={window} is larger than the context length {info.context_length} of {info.model}; lower --windows "
            f"to at most {info.context_length}, or start the server with a longer context"
        )


async def _list_models(connection: Connection, settings: EndpointSettings) -> list[dict[str, Any]]:
    """The server's models; none where it lists none (or only to other keys: the first reply will tell)."""
    answer = await connection.fetch("GET", f"{settings.base_url}/models")
    if isinstance(answer, Failure):
        if answer.error_class == "connection":
            raise EndpointRefused(f"{answer.message}. Is the server running at {settings.base_url}?")
        if answer.error_class == "engine_timeout" or "web page" in answer.message:
            raise EndpointRefused(answer.message)
        return []
    data = answer.get("data") if isinstance(answer, dict) else answer
    return [m for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)] if isinstance(data, list) else []


def _entry(settings: EndpointSettings, listing: list[dict[str, Any]]) -> dict[str, Any] | None:
    for model in listing:
        aliases = model.get("aliases")
        names = [model["id"], str(model["id"]).removesuffix(":latest"), *(aliases if isinstance(aliases, list) else [])]
        if settings.model in names:
            return model
    return None


def _server(settings: EndpointSettings, entry: dict[str, Any] | None, listing: list[dict[str, Any]]) -> Server:
    if urlsplit(settings.base_url).hostname == "api.openai.com":
        return "openai"
    owners = [str(model.get("owned_by")) for model in ([entry] if entry else listing)]
    return next((_OWNERS[owner] for owner in owners if owner in _OWNERS), "unknown")


async def _context_length(
    connection: Connection, settings: EndpointSettings, server: Server, entry: dict[str, Any]
) -> int | None:
    """The server's, by whatever name it goes; else that of the settings."""
    meta = entry["meta"] if isinstance(entry.get("meta"), dict) else {}
    told = [entry.get("max_model_len"), entry.get("context_length"), entry.get("context_window"), meta.get("n_ctx")]
    if server == "llama.cpp":  # what it was started with, mostly less than what the model was trained with
        props = await connection.fetch("GET", f"{settings.server_root}/props")
        defaults = props.get("default_generation_settings") if isinstance(props, dict) else None
        told += [defaults.get("n_ctx") if isinstance(defaults, dict) else None]
    told += [settings.context_length, meta.get("n_ctx_train")]
    return next((n for n in told if isinstance(n, int) and n > 0), None)


async def _first_reply(
    settings: EndpointSettings, server: Server, models: tuple[str, ...], temperature: float, spending: Spending
) -> tuple[bool, bool]:
    """(usage came, token ids came) with a first reply."""
    hoped = EndpointInfo(settings.model, server, None, server == "vllm", False, True, models)
    engine = OpenAIEngine(settings, TextRenderer(), spending, hoped)
    request = GenerateRequest("preflight", ids([]), 16, temperature, seed=0, messages=_MESSAGES)
    try:
        reply, _ = await engine.ask(request)
    except ContextLengthError as error:
        raise EndpointRefused(f"not even one short message fits this model's context: {error}") from None
    except EngineError as error:
        if error.error_class != "model_not_found":
            raise
        raise EndpointRefused(_unknown_model(settings, models, str(error))) from None
    finally:
        await engine.aclose()
    if reply.usage is None:
        _log.warning("%s does not say what a call takes: tokens are estimated, costs unknown", settings.base_url)
    return reply.usage is not None, reply.token_ids is not None


def _unknown_model(settings: EndpointSettings, models: tuple[str, ...], said: str) -> str:
    if not models:
        return (
            f"model {settings.model!r}: {said}. The server lists no models: check that base_url is right (most end in "
            "/v1) and the model's name"
        )
    nearest = difflib.get_close_matches(settings.model, models, n=3, cutoff=0.4)
    hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
    more = f" and {len(models) - 20} more" if len(models) > 20 else ""
    return f"model {settings.model!r} at {settings.base_url}: {said}{hint}; available: {', '.join(models[:20])}{more}"


def _with_advice(error: EngineError) -> str:
    advice = _ADVICE.get(error.error_class)
    return f"{error}. Next: {advice}" if advice and "base_url" not in str(error) else str(error)
