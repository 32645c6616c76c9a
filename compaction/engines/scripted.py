"""A deterministic engine that answers from a script. It stands in for a model in tests and dry runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from compaction.history import ids
from compaction.protocols import Completion, GenerateRequest, Renderer

Script = Callable[[GenerateRequest], str]
"""Maps a request (its `messages` and `kind`) to the reply's text"""


class ScriptedEngine:
    """Replies with `script(request)`, encoded, ended by the end token, cut at max_tokens. Logprobs are 0."""

    def __init__(self, script: Script, renderer: Renderer, *, version: int = 0, seconds: float = 0.0) -> None:
        self.requests: list[GenerateRequest] = []
        self.version = version
        self._script, self._renderer, self._seconds = script, renderer, seconds

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return scripted_completion(self._script(request), request, self._renderer, self.version)

    async def release(self, rollout_id: str) -> None:
        pass

    def load_weights(self, state_dict: Mapping[str, Any], version: int) -> None:
        """A script has no weights; what it says from now on bears `version`."""
        self.version = version


def scripted_completion(text: str, request: GenerateRequest, renderer: Renderer, version: int = 0) -> Completion:
    """`text` as if a model had sampled it in answer to `request`."""
    tokens = renderer.encode(text)
    end = renderer.end_ids[:1]
    ended = len(tokens) + 1 <= request.max_tokens
    tokens = [*tokens, *end] if ended else tokens[: request.max_tokens]
    return Completion(
        token_ids=ids(tokens),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), version, np.int32),
        finish_reason="stop" if ended else "length",
        prompt_tokens=len(request.prompt_ids),
    )
