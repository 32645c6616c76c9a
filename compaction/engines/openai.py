"""An engine behind any OpenAI-compatible endpoint: messages out, text back."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt

from compaction.engines.endpoint_errors import Failure
from compaction.engines.endpoint_http import Connection
from compaction.engines.endpoint_info import EndpointInfo
from compaction.engines.endpoint_replies import Reply
from compaction.engines.endpoint_settings import EndpointSettings
from compaction.engines.server_tokenizer import count_on_server
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import MESSAGE_TOKENS, TextRenderer, count_text
from compaction.history import ids
from compaction.protocols import (
    ChatMessage,
    Completion,
    ContextLengthError,
    EngineError,
    GenerateRequest,
    Renderer,
    Tools,
    Usage,
)

_log = logging.getLogger(__name__)

_FIRST_WAIT = 1.0
"""Seconds that the first pause between two tries may be at most; every later one twice the one before"""
_SEEDS = 2**31
"""Seeds that every server takes lie below"""


class OpenAIEngine:
    """Samples from a chat completions endpoint. It reads a request's messages, not its ids.

    `renderer` only counts tokens (see `endpoint_renderer`); where it estimates, it learns from what the server counts.
    `info` is what `preflight` found: with it the server's own tokenizer and token ids are used. Every call is booked
    in `spending`. Raises EndpointRefused at construction if `spending` has a max_cost and the settings lack a price.
    """

    def __init__(
        self, settings: EndpointSettings, renderer: Renderer, spending: Spending, info: EndpointInfo | None = None
    ) -> None:
        spending.require_prices(settings)
        self._settings, self._renderer, self._spending, self._info = settings, renderer, spending, info
        self._connection = Connection(settings)
        self._limit_name = "max_tokens"
        self._measures = info is not None and info.has_tokenizer
        self._own_count_source = renderer.count_source
        self._placeholder = next(i for i in itertools.count() if i not in renderer.special_ids)

    async def generate(self, request: GenerateRequest) -> Completion:
        """One reply. Its logprobs are the server's, where it gives some for the distribution really sampled, else 0.

        Raises ContextLengthError where the server says that the prompt is too long for it, or where the request leaves
        no room for a reply, and else EngineError with the class of the last failure and what all tries took.
        """
        if request.max_tokens < 1:  # servers answer this in a dozen ways, none of them clear
            raise ContextLengthError(f"the prompt leaves no room for a reply (max_tokens={request.max_tokens})")
        reply, spent = await self.ask(request)
        self._learn(request, reply)
        token_ids, logprobs = self._tokens(request, reply)
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=np.zeros(len(token_ids), np.int32),
            finish_reason=reply.finish_reason,
            prompt_tokens=reply.usage.prompt_tokens if reply.usage else 0,
            cached_tokens=reply.usage.cached_tokens if reply.usage else 0,
            text=reply.text,
            tool_calls=reply.tool_calls,
            reasoning=reply.reasoning or None if self._settings.reasoning == "keep" else None,
            usage=spent,
        )

    async def ask(self, request: GenerateRequest) -> tuple[Reply, Usage]:
        """The reply as the server gave it, and what all tries for it took. Raises as `generate` does."""
        spent = Usage()
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._settings.attempts),
            retry=retry_if_result(lambda outcome: isinstance(outcome, Failure) and outcome.retry),
            wait=self._wait,
            before_sleep=_log_pause,
            retry_error_callback=_outcome,
        )
        try:
            outcome: Reply | Failure = await retrying(self._try, request, spent)
        except EngineError as error:  # the budget is used up, or the key unusable
            error.usage = spent if spent.calls else None
            raise
        if isinstance(outcome, Failure):
            outcome.throw(spent, retrying.statistics["attempt_number"])
        return outcome, spent

    async def measure(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> int | None:
        """Tokens of these messages and tools by the server's own tokenizer, without what opens a reply; None where
        it has none.

        The first failure ends it, with one line in the log: counts are then the renderer's again.
        """
        if not self._measures or self._info is None:
            return None
        opening = len(self._renderer.generation_prompt)
        try:
            counted = await count_on_server(
                self._connection, self._settings, self._info.server, messages, opening, tools
            )
        except EngineError as error:  # an unusable key: the next call says so
            counted = Failure(error.error_class, str(error))
        if isinstance(counted, int):
            if self._renderer.count_source == "estimate":
                self._renderer.count_source = "tokenizer"
            return counted
        if self._measures:  # several rollouts may find out at once
            self._measures = False
            self._renderer.count_source = self._own_count_source
            _log.warning("the server's tokenizer is not asked again: %s", counted.message if counted else "none")
        return None

    async def release(self, rollout_id: str) -> None:
        """Nothing is kept for a rollout here; the server's prefix cache looks after itself."""

    async def aclose(self) -> None:
        """Closes the connections of the running event loop."""
        await self._connection.aclose()

    async def _try(self, request: GenerateRequest, spent: Usage) -> Reply | Failure:
        """One try, twice asked only where the server wants the limit under another name; that is then remembered."""
        self._spending.check()
        name = self._limit_name
        outcome = await self._connection.complete(self._body(request, name), request.max_tokens)
        if isinstance(outcome, Failure) and outcome.asks_for not in (None, name):
            self._limit_name = outcome.asks_for or name
            outcome = await self._connection.complete(self._body(request, self._limit_name), request.max_tokens)
        usage = outcome.usage
        if usage is None and isinstance(outcome, Reply):
            usage = self._estimated(request, outcome)
        if usage is not None:
            spent.add(usage)
            self._spending.add(request.kind, usage)
        return outcome

    def _body(self, request: GenerateRequest, limit_name: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._settings.model,
            "messages": list(request.messages),
            limit_name: request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed % _SEEDS,
        }
        if request.tools:
            body["tools"] = list(request.tools)
        if self._settings.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._info is not None and self._info.gives_token_ids:
            body |= {"return_token_ids": True, "logprobs": True}
        body |= self._settings.request_extra
        return {name: value for name, value in body.items() if value is not None}

    def _wait(self, state: RetryCallState) -> float:
        """Seconds until the next try: what the server asks for, else exponential with full jitter."""
        after = _outcome(state).retry_after
        if after is None:
            return random.uniform(0.0, min(self._settings.max_wait, _FIRST_WAIT * 2 ** (state.attempt_number - 1)))
        return min(self._settings.max_wait, after * random.uniform(1.0, 1.1))  # not all at the same moment

    def _estimated(self, request: GenerateRequest, reply: Reply) -> Usage:
        """What a reply took whose server does not say: an estimate of tokens, but no cost unless it is free."""
        completion = count_text(self._renderer, reply.reasoning) + count_text(self._renderer, reply.said)
        usage = self._settings.usage(len(request.prompt_ids), 0, completion)
        if usage.cost != 0.0:
            usage.cost = None
        return usage

    def _learn(self, request: GenerateRequest, reply: Reply) -> None:
        if isinstance(self._renderer, TextRenderer) and reply.usage is not None:
            characters = sum(_characters(message) for message in request.messages) + _characters_of(request.tools)
            around = MESSAGE_TOKENS * (len(request.messages) + 1)
            self._renderer.learn(characters, reply.usage.prompt_tokens - around)

    def _tokens(self, request: GenerateRequest, reply: Reply) -> tuple[np.ndarray, np.ndarray]:
        """(ids, logprobs) of what the reply takes in the next prompt: the model's own, or placeholders and zeros."""
        setting = self._settings.reasoning
        thought = bool(reply.reasoning) or reply.reasoning_tokens > 0
        counted = not thought or setting == "count" or (setting == "keep" and bool(reply.reasoning))
        if counted and reply.token_ids is not None:
            token_ids = ids(reply.token_ids)
            sampled = reply.logprobs is not None and request.temperature in (0.0, 1.0)  # else they are not tempered
            return token_ids, np.asarray(reply.logprobs if sampled else np.zeros(len(token_ids)), np.float32)
        n = self._reply_length(request, reply, counted)
        return np.full(n, self._placeholder, np.int32), np.zeros(n, np.float32)

    def _reply_length(self, request: GenerateRequest, reply: Reply, counted: bool) -> int:
        """Tokens of the reply, its thinking among them if `counted`: by usage as far as that tells."""
        said, thought = count_text(self._renderer, reply.said), count_text(self._renderer, reply.reasoning)
        total = reply.usage.completion_tokens if reply.usage else 0
        if total == 0:
            return said + thought if counted else said
        total = min(total, max(request.max_tokens, said + thought))  # whatever a broken server counts
        if counted:
            return total
        if reply.reasoning_tokens:
            return max(total - reply.reasoning_tokens, min(said, 1))
        return math.ceil(total * said / max(said + thought, 1))


def _characters(message: ChatMessage) -> int:
    calls = _characters_of(message.get("tool_calls", ()))
    return len(message["content"]) + len(message.get("reasoning_content", "")) + calls


def _characters_of(parts: Sequence[dict[str, Any]]) -> int:
    return sum(len(json.dumps(part)) for part in parts)


def _outcome(state: RetryCallState) -> Any:
    """What the last try gave. Tries give failures back and do not raise them: exceptions would hold the request."""
    assert state.outcome is not None
    return state.outcome.result()


def _log_pause(state: RetryCallState) -> None:
    _log.info("%s; next try in %.1f s", _outcome(state).message, state.upcoming_sleep)
