"""What the engines that serve from this process share: a request on its way to its completion."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compaction.protocols import Completion, ContextLengthError, EngineError, FinishReason, GenerateRequest


@dataclass(eq=False)
class Call:
    """One request from its arrival to its completion."""

    request: GenerateRequest
    future: asyncio.Future[Completion]
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def stamp(self, version: int) -> None:
        """Stamps the tokens that have no version yet."""
        self.versions += [version] * (len(self.token_ids) - len(self.versions))

    def finish(self, reason: FinishReason) -> None:
        """Hands the completion to whoever waits."""
        if not self.future.done():
            self.future.set_result(self._completion(reason))

    def fail(self, error: EngineError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def _completion(self, reason: FinishReason) -> Completion:
        return Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish_reason=reason,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self.cached_tokens,
        )


def check_request(request: GenerateRequest, max_length: int, vocabulary: int) -> None:
    """Raises ContextLengthError for a prompt that is too long, EngineError for what cannot be served as it stands."""
    length = len(request.prompt_ids)
    if length > max_length:
        raise ContextLengthError(f"the prompt has {length} tokens, the engine takes {max_length}")
    if length == 0 or request.max_tokens < 1:
        raise EngineError(
            f"a request needs a prompt and max_tokens of at least 1, got {length} tokens and {request.max_tokens}"
        )
    if length + request.max_tokens > max_length:
        raise EngineError(
            f"prompt ({length}) + max_tokens ({request.max_tokens}) = {length + request.max_tokens} tokens, "
            f"the engine takes {max_length}; lower max_tokens or give the engine a larger max_length"
        )
    low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    if low < 0 or high >= vocabulary:
        raise EngineError(f"prompt ids reach from {low} to {high}, the vocabulary from 0 to {vocabulary - 1}")


def end_tokens(*configs: Any) -> tuple[int, ...]:
    """End tokens of the first of these configurations that names any: generation config first, then the model's.

    Without any, only max_tokens ends a reply.
    """
    for config in configs:
        ends: int | Sequence[int] | None = getattr(config, "eos_token_id", None)
        if ends is not None:
            return (ends,) if isinstance(ends, int) else tuple(ends)
    return ()
