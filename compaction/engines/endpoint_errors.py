"""What a server's refusal means: from status and message to an error class, and whether trying again can help."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

import httpx

from compaction.engines.endpoint_settings import EndpointSettings
from compaction.protocols import ContextLengthError, EngineError, Usage

CONTEXT_LENGTH = "context_length"
"""Class of a failure that is raised as ContextLengthError"""

_SHOWN = 300
"""Characters of a server's text in a message"""

_CONTEXT_LENGTH = re.compile(
    "|".join(
        [
            r"maximum context length",  # vLLM old and new, OpenAI, SGLang, Mistral, OpenRouter
            r"longer than the maximum model length",  # vLLM's engine
            r"longer than the model's context length",  # SGLang, Together
            r"max_tokens must be at least 1, got -?\d",  # vLLM: what the prompt leaves is nothing
            r"exceeds? the available context size",  # llama.cpp
            r"exceed_context_size_error",
            r"exceed(s|ed)? (the |max |this |model's )*(context|prompt) (length|window|limit)",  # Ollama, others
            r"context[_ ](length|window)[_ ]exceeded",  # OpenAI's code
            r"prompt (is )?too long",  # Anthropic
            r"maximum prompt length",  # xAI
            r"input token count .* exceeds the maximum number of tokens",  # Gemini
            r"reduce the length of the (messages|prompt|input)",  # Groq
        ]
    ),
    re.IGNORECASE,
)
_UNPAID = re.compile(
    r"insufficient[_ ](user[_ ])?(quota|balance|credits)|billing_hard_limit|billing_not_active", re.IGNORECASE
)
_NO_MODEL = re.compile(r"model_not_found|model .{0,200}(does not exist|not found)", re.IGNORECASE | re.DOTALL)
_FILTERED = re.compile(r"content_filter|content_policy_violation|ResponsibleAIPolicyViolation", re.IGNORECASE)
_TLS = re.compile(r"ssl|certificate|tls", re.IGNORECASE)


class EndpointRefused(ValueError):
    """An endpoint that cannot be used as asked. The message says what to do."""


@dataclass(frozen=True)
class Failure:
    """One try that gave no reply. Plain data: it holds no exception, so no request with its headers either."""

    error_class: str
    message: str
    retry: bool = False
    """Whether trying again can help"""
    retry_after: float | None = None
    """Seconds that the server asked to wait"""
    usage: Usage | None = None
    """What the try took, where the server said so"""
    asks_for: str | None = None
    """The name that the server wants the token limit under"""

    def throw(self, spent: Usage, attempts: int) -> NoReturn:
        """Raises ContextLengthError or EngineError; `spent` is what all tries took."""
        message = self.message if attempts == 1 else f"{self.message} (tried {attempts} times)"
        if self.error_class == CONTEXT_LENGTH:
            raise ContextLengthError(message, spent if spent.calls else None)
        raise EngineError(message, self.error_class, spent if spent.calls else None)


def status_failure(
    settings: EndpointSettings, status: int, text: str, headers: Mapping[str, str], usage: Usage | None = None
) -> Failure:
    """The failure that an HTTP status of 300 or more, or an error object in its place, stands for."""
    said = _message(text)
    error_class, retry = _classify(status, said)
    message = f"{settings.base_url}: HTTP {status}: {shown(settings, said)}"
    if error_class == "authentication":
        message += f" ({settings.credentials()})"
    if 300 <= status < 400:
        message += f"; it redirects to {shown(settings, headers.get('location', 'nowhere'))}: set base_url to that"
    after = _retry_after(headers.get("retry-after")) if retry else None
    limit = "max_completion_tokens" if _wants_other_limit(error_class, said) else None
    return Failure(error_class, message, retry, after, usage, limit)


def transport_failure(settings: EndpointSettings, error: httpx.HTTPError, usage: Usage | None = None) -> Failure:
    """The failure of a connection that could not be made or broke."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message = f"{settings.base_url}: {shown(settings, said)}"
    if isinstance(error, httpx.ConnectError) and _TLS.search(said):
        return Failure("connection", f"{message}; is it {_other_scheme(settings)}, or a certificate not trusted here?")
    return Failure("connection", message, retry=True, usage=usage)


def timeout_failure(settings: EndpointSettings, usage: Usage | None = None) -> Failure:
    return Failure(
        "engine_timeout", f"{settings.base_url}: no reply within {settings.timeout:g} s", retry=True, usage=usage
    )


def body_failure(settings: EndpointSettings, kind: str, text: str) -> Failure:
    """A reply that should have been JSON and is something else."""
    said = shown(settings, text)
    if "html" in kind.lower() or text.lstrip()[:1] == "<":
        return Failure(
            "bad_request",
            f"{settings.base_url} answers with a web page, not as an OpenAI-compatible server: check base_url, which "
            f"mostly ends in /v1 ({said})",
        )
    return Failure(
        "server_error", f"{settings.base_url}: the reply is not JSON ({kind or 'no content type'}: {said})", retry=True
    )


def shown(settings: EndpointSettings, text: str) -> str:
    """A server's text as far as a message shows it: secrets cut out first, then one line of at most 300 characters."""
    line = " ".join(settings.redact(text).split()) or "(empty)"
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "…"


def _classify(status: int, said: str) -> tuple[str, bool]:
    """(error class, retry?)"""
    if status in (401, 403):
        return "authentication", False
    if status == 402 or _UNPAID.search(said):
        return "budget_exceeded", False
    if status == 429:
        return "rate_limit", True
    if status == 413 or _CONTEXT_LENGTH.search(said):
        return CONTEXT_LENGTH, False
    if status == 404 or (status < 500 and _NO_MODEL.search(said)):
        return "model_not_found", False
    if status < 500 and _FILTERED.search(said):
        return "refusal", False
    if status == 408:
        return "engine_timeout", True
    if status in (409, 425) or status >= 500:
        return "server_error", True
    return "bad_request", False


def _wants_other_limit(error_class: str, said: str) -> bool:
    refused = re.search(r"unsupported|not supported|instead", said, re.IGNORECASE)
    return error_class == "bad_request" and bool(refused) and "max_tokens" in said and "max_completion_tokens" in said


def _message(text: str) -> str:
    """What an error body says: its messages and codes, without a request that it may repeat; else the text itself."""
    try:
        said = _said(json.loads(text))
    except (ValueError, RecursionError):
        return text
    return " ".join(said) or text


def _said(body: Any) -> list[str]:
    """All messages, then codes, of an error body in any of the forms that servers use."""
    if isinstance(body, str):
        return [_message(body)] if body.lstrip()[:1] == "{" else [body]  # gateways wrap the server's own body
    if isinstance(body, list):
        return [part for item in body for part in _said(item)]
    if not isinstance(body, dict):
        return []
    texts = [part for name in ("error", "message", "detail", "msg") for part in _said(body.get(name))]
    marks = [str(body[name]) for name in ("code", "type") if isinstance(body.get(name), str)]
    return [*texts, *(f"[{mark}]" for mark in marks if mark not in texts)]


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number or an HTTP date; None for anything else."""
    if value is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", value.strip()):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def _other_scheme(settings: EndpointSettings) -> str:
    scheme, _, rest = settings.base_url.partition("://")
    return f"{'http' if scheme.lower() == 'https' else 'https'}://{rest}"
