"""One HTTP call to an endpoint: a reply, or the failure it met. Nothing here raises what holds a request's headers."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from functools import cache
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import httpx

from compaction.engines.endpoint_errors import (
    Failure,
    body_failure,
    status_failure,
    timeout_failure,
    transport_failure,
)
from compaction.engines.endpoint_replies import MalformedReply, Reply, ReplyBuilder
from compaction.engines.endpoint_settings import EndpointSettings

_CONNECT_SECONDS = 30.0
"""A server that has not taken the connection by then will not"""


@cache
def _certificates() -> ssl.SSLContext:
    """Those trusted here; reading them takes longer than many a call."""
    return httpx.create_ssl_context()


class Connection:
    """The HTTP clients of one endpoint, one per event loop."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def aclose(self) -> None:
        """Closes this loop's connections; those of a loop that is gone went with it."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def complete(self, body: dict[str, Any], max_tokens: int) -> Reply | Failure:
        """Asks for a chat completion. Raises EngineError for a key that cannot be sent."""
        builder = ReplyBuilder(self._settings)
        try:
            async with (
                asyncio.timeout(self._settings.timeout),
                self._client().stream(
                    "POST",
                    f"{self._settings.base_url}/chat/completions",
                    content=json.dumps(body),  # ASCII: half a surrogate pair in a message breaks nothing
                    headers=self._settings.headers(),
                ) as response,
            ):
                failure = await _read(self._settings, response, builder)
        except TimeoutError:
            failure = timeout_failure(self._settings, builder.usage)
        except httpx.HTTPError as error:
            failure = transport_failure(self._settings, error, builder.usage)
        return failure or builder.build(max_tokens)

    async def fetch(self, method: str, url: str, body: dict[str, Any] | None = None) -> Any | Failure:
        """The JSON of something beside completions. Raises EngineError for a key that cannot be sent."""
        try:
            async with asyncio.timeout(min(self._settings.timeout, _CONNECT_SECONDS)):
                response = await self._client().request(
                    method, url, content=None if body is None else json.dumps(body), headers=self._settings.headers()
                )
        except TimeoutError:
            return timeout_failure(self._settings)
        except httpx.HTTPError as error:
            return transport_failure(self._settings, error)
        if response.status_code >= 300:
            return status_failure(self._settings, response.status_code, _text(response), response.headers)
        return _json(self._settings, response)

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(
                verify=_certificates(),
                timeout=httpx.Timeout(None, connect=min(self._settings.timeout, _CONNECT_SECONDS)),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),  # the job bounds them
                trust_env=urlsplit(self._settings.base_url).hostname not in ("localhost", "127.0.0.1", "::1"),
            )
        return self._clients[loop]


async def _read(settings: EndpointSettings, response: httpx.Response, builder: ReplyBuilder) -> Failure | None:
    """Fills the builder. By the reply's own type: some servers stream unasked, others never do."""
    if response.status_code >= 300:
        await response.aread()
        return status_failure(settings, response.status_code, _text(response), response.headers)
    if "event-stream" in response.headers.get("content-type", ""):
        return await _read_stream(settings, response, builder)
    await response.aread()
    payload = _json(settings, response)
    return payload if isinstance(payload, Failure) else _add(settings, payload, builder)


async def _read_stream(settings: EndpointSettings, response: httpx.Response, builder: ReplyBuilder) -> Failure | None:
    async for data in _events(response):
        if data == "[DONE]":
            return None
        try:
            payload = json.loads(data)
        except ValueError:  # words may be missing now
            message = f"{settings.base_url}: the stream holds a piece that is not JSON"
            return Failure("server_error", message, retry=True, usage=builder.usage)
        failure = _add(settings, payload, builder)
        if failure is not None:
            return failure
    if builder.finish_reason is None:
        message = f"{settings.base_url}: the stream ended before the reply did"
        return Failure("connection", message, retry=True, usage=builder.usage)
    return None


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of server-sent events, one line each; comments and other fields are passed over.

    Lines end at line feeds only: httpx's own line reader also ends them at characters that JSON may hold as they are.
    """
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if (data := _data(line)) is not None:
                yield data
    if (data := _data(rest)) is not None:
        yield data


def _data(line: bytes) -> str | None:
    name, colon, value = line.strip().partition(b":")
    is_error = name == b"error" and value.lstrip()[:1] == b"{"  # llama.cpp's field for errors
    if not colon or not (name == b"data" or is_error) or not value.strip():
        return None
    return value.strip().decode("utf-8", "replace")


def _add(settings: EndpointSettings, payload: Any, builder: ReplyBuilder) -> Failure | None:
    """Adds a payload, unless it is an error in a completion's place or no completion at all."""
    try:
        builder.add(payload)
    except MalformedReply as malformed:
        return Failure("server_error", f"{settings.base_url}: {malformed}", retry=True, usage=builder.usage)
    error = _error_in(payload)
    if error is None:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return status_failure(settings, status, json.dumps({"error": error}), {}, builder.usage)


def _error_in(payload: dict[str, Any]) -> Any | None:
    """An error object where a completion, or its first choice, should be."""
    choices = payload.get("choices") or [{}]
    if "message" in payload and "code" in payload and "choices" not in payload:
        return payload
    return payload.get("error") or choices[0].get("error")


def _json(settings: EndpointSettings, response: httpx.Response) -> Any | Failure:
    text = _text(response)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return body_failure(settings, response.headers.get("content-type", ""), text)


def _text(response: httpx.Response) -> str:
    return response.content.decode("utf-8", "replace")
