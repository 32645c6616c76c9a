"""What a chat completion says, whole or put together from the pieces of a stream."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from compaction.engines.endpoint_calls import CallBuilder
from compaction.engines.endpoint_errors import Failure, shown
from compaction.engines.endpoint_settings import EndpointSettings
from compaction.protocols import FinishReason, ToolCall, Usage
from compaction.thinking import split_thinking


class MalformedReply(ValueError):
    """A reply that is JSON, but not a chat completion."""


@dataclass(frozen=True)
class Reply:
    """A chat completion's first choice, as the server gave it."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    reasoning: str
    finish_reason: FinishReason
    usage: Usage | None
    """None where the server did not say"""
    reasoning_tokens: int
    """Of the sampled tokens, as the server counts them; 0 where it does not"""
    token_ids: list[int] | None
    """All sampled tokens, thinking included, where the server gives them"""
    logprobs: list[float] | None
    """One for each of `token_ids`"""

    @property
    def said(self) -> str:
        """All that is no thinking, the calls as JSON."""
        return self.text + "".join(json.dumps([call.name, call.arguments]) for call in self.tool_calls)


@dataclass
class ReplyBuilder:
    """Gathers a reply from payloads: one whole completion, or the pieces of a stream."""

    settings: EndpointSettings
    finish_reason: str | None = None
    answered: bool = False
    """Whether there was a choice at all"""
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _refusals: list[str] = field(default_factory=list)
    _calls: CallBuilder = field(default_factory=CallBuilder)
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[Any] = field(default_factory=list)
    _usage: dict[str, Any] | None = None

    def add(self, payload: Any) -> None:
        """Raises MalformedReply."""
        if not isinstance(payload, dict):
            raise MalformedReply("the reply is not an object")
        if isinstance(payload.get("usage"), dict):
            self._usage = payload["usage"]
        choices = payload.get("choices") or []
        if not isinstance(choices, list):
            raise MalformedReply("choices is not a list")
        for choice in choices:
            if not isinstance(choice, dict):
                raise MalformedReply("a choice is not an object")
            if choice.get("index", 0) in (0, None):
                self._add_choice(choice)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        self.answered = True
        part = choice.get("message") or choice.get("delta") or {}
        if not isinstance(part, dict):
            raise MalformedReply("the message is not an object")
        self._texts.append(_content(part.get("content")))
        self._thoughts.append(_content(part.get("reasoning_content") or part.get("reasoning")))
        self._refusals.append(_content(part.get("refusal")))
        self._calls.add(part.get("tool_calls"))
        if isinstance(choice.get("finish_reason"), str):
            self.finish_reason = choice["finish_reason"]
        if isinstance(choice.get("token_ids"), list):
            self._token_ids += choice["token_ids"]
        logprobs = choice.get("logprobs")
        entries = logprobs.get("content") if isinstance(logprobs, dict) else None
        for entry in entries or []:
            self._logprobs.append(entry.get("logprob") if isinstance(entry, dict) else None)

    @property
    def usage(self) -> Usage | None:
        """What the server says that the call took; None if it does not say."""
        if self._usage is None:
            return None
        prompt, completion = _count(self._usage, "prompt_tokens"), _count(self._usage, "completion_tokens")
        if prompt == 0:  # no call has an empty prompt
            return None
        cached = min(prompt, _count(self._usage.get("prompt_tokens_details"), "cached_tokens"))
        return self.settings.usage(prompt, cached, completion)

    def build(self, max_tokens: int) -> Reply | Failure:
        """The reply, or why there is none: nothing chosen, refused, aborted."""
        text, refusal = _joined(self._texts), _joined(self._refusals)
        reason = self.finish_reason
        where = self.settings.base_url
        if not self.answered:
            return Failure("server_error", f"{where}: the reply holds no choices", retry=True, usage=self.usage)
        if reason in ("abort", "error"):
            return Failure(
                "server_error", f"{where}: the server ended the reply: {reason}", retry=True, usage=self.usage
            )
        if reason == "content_filter" or (refusal and not text):
            detail = f"refused: {refusal}" if refusal else "a content filter stopped the reply"
            return Failure("refusal", f"{where}: {shown(self.settings, detail)}", usage=self.usage)
        reasoning = _joined(self._thoughts)
        if not reasoning:  # the server did not set it apart
            reasoning, said = split_thinking(text)
            text = said or ""
        usage = self.usage
        reasoning_tokens = _count((self._usage or {}).get("completion_tokens_details"), "reasoning_tokens")
        ids = _tokens(self._token_ids)
        return Reply(
            text=text,
            tool_calls=self._calls.build(),
            reasoning=reasoning,
            finish_reason=_finish(reason, usage, max_tokens),
            usage=usage,
            reasoning_tokens=min(reasoning_tokens, usage.completion_tokens) if usage else 0,
            token_ids=ids,
            logprobs=_finite(self._logprobs, ids),
        )


def _finish(reason: str | None, usage: Usage | None, max_tokens: int) -> FinishReason:
    """Tool calls end a reply like `stop`; of a reason that is missing or unknown, the number of tokens decides."""
    if reason == "length":
        return "length"
    if reason in ("stop", "tool_calls", "function_call"):
        return "stop"
    return "length" if usage is not None and usage.completion_tokens >= max_tokens else "stop"


def _content(content: Any) -> str:
    """Text of a content field: a string, null, or a list of parts of which those of text count."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    raise MalformedReply("the content is neither text nor a list of parts")


def _joined(pieces: list[str]) -> str:
    """One text. A character that a stream cut in two surrogates is whole again; one half alone is replaced."""
    return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count(counts: Any, name: str) -> int:
    """A count of a usage object; 0 for one that is missing or no number."""
    value = counts.get(name) if isinstance(counts, dict) else None
    finite = isinstance(value, int | float) and math.isfinite(value)
    return max(0, int(value)) if finite and value is not None else 0


def _tokens(token_ids: list[Any]) -> list[int] | None:
    valid = bool(token_ids) and all(type(i) is int and 0 <= i < 2**31 for i in token_ids)
    return token_ids if valid else None


def _finite(logprobs: list[Any], token_ids: list[int] | None) -> list[float] | None:
    """The logprobs, if they are numbers, one for each token."""
    if token_ids is None or len(logprobs) != len(token_ids):
        return None
    numbers = all(isinstance(p, int | float) and math.isfinite(p) for p in logprobs)
    return [float(p) for p in logprobs] if numbers else None
