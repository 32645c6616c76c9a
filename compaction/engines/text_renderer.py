"""Counting a model's tokens where its tokenizer is not at hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from compaction.engines.endpoint_settings import EndpointSettings
from compaction.protocols import CountSource, FinishReason, Renderer, Tools
from compaction.rendering import load_renderer

MESSAGE_TOKENS = 4
"""What a chat template adds around a message, and to open a reply"""
_MARGIN = 1.1
"""An estimate errs on the long side: too early a compaction costs less than a refused prompt"""
_RATIOS = (1.0, 6.0)
"""Characters per token that a real tokenizer can have; what lies outside counts something else"""
_FORGETTING = 0.8
"""Weight of what was learned before, at each prompt: prompts of one rollout repeat each other"""
_PRIOR_TOKENS = 100.0
"""What the first ratio weighs against the first real prompt"""


class TextRenderer:
    """Renders to as many placeholder ids as a message is estimated to have tokens, by a learned ratio with a margin."""

    generation_prompt = (0,) * MESSAGE_TOKENS
    special_ids: frozenset[int] = frozenset()
    end_ids: tuple[int, ...] = ()
    opens_thinking: bool | None = None
    takes_tools = takes_results = True  # the endpoint's own template sees to both

    def __init__(self, chars_per_token: float = 3.0) -> None:
        self.count_source: CountSource = "estimate"
        self._characters, self._tokens = _PRIOR_TOKENS * chars_per_token, _PRIOR_TOKENS

    @property
    def chars_per_token(self) -> float:
        return min(max(self._characters / self._tokens, _RATIOS[0]), _RATIOS[1])

    def learn(self, characters: int, tokens: int) -> None:
        """From a prompt whose texts have so many characters and tokens, by the server's count; recent ones weigh more.

        What no text has (no characters, or no tokens) teaches nothing.
        """
        if characters > 0 and tokens > 0:
            self._characters = _FORGETTING * self._characters + characters
            self._tokens = _FORGETTING * self._tokens + tokens

    def with_thinking(self, thinking: bool | None) -> TextRenderer:
        return self

    def message(self, role: Literal["system", "user"], text: str, tools: Tools = ()) -> list[int]:
        defined = text + "".join(json.dumps(tool) for tool in tools)
        return [0] * (math.ceil(len(defined) / self.chars_per_token * _MARGIN) + MESSAGE_TOKENS)

    def results(self, texts: Sequence[str]) -> list[int]:
        return [i for text in texts for i in self.message("user", text)]

    def close(self, sampled: Sequence[int] | np.ndarray, finish_reason: FinishReason) -> list[int]:
        return []

    def follow(
        self, sampled: Sequence[int] | np.ndarray, finish_reason: FinishReason, message: Sequence[int]
    ) -> list[int]:
        return list(message)

    def encode(self, text: str) -> list[int]:
        """Code points: texts are clipped between characters."""
        return [ord(c) for c in text]

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(chr(int(i)) for i in token_ids)


def endpoint_renderer(settings: EndpointSettings) -> Renderer:
    """What counts the tokens of this endpoint's prompts: its tokenizer where the settings name one, else an estimate.

    Each endpoint has its own: an estimate learns from what that endpoint counts. Raises FileNotFoundError for a
    tokenizer folder that does not exist, TemplateNotSupported for one without a usable chat template.
    """
    return TextRenderer() if settings.tokenizer is None else load_renderer(settings.tokenizer, "tokenizer")


def count_text(renderer: Renderer, text: str) -> int:
    """Tokens of a text, nothing around it."""
    return len(renderer.message("user", text)) - len(renderer.message("user", ""))
