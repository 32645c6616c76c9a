"""What vLLM is asked, in this process and over HTTP alike. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from compaction.protocols import GenerateRequest
from rl.engines.calls import check_request, end_tokens


@dataclass(frozen=True)
class Limits:
    """What the model in a checkpoint folder takes, and what ends its replies."""

    max_length: int
    """Most tokens of a sequence, prompt and reply together"""
    vocabulary: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, checkpoint: Path, max_length: int) -> Limits:
        from transformers import AutoConfig, GenerationConfig

        config: Any = AutoConfig.from_pretrained(checkpoint).get_text_config()
        own = (checkpoint / "generation_config.json").is_file()
        ends = end_tokens(GenerationConfig.from_pretrained(checkpoint) if own else None, config)
        return cls(max_length, config.vocab_size, tuple(sorted(ends)))

    def sampling(self, request: GenerateRequest) -> dict[str, Any]:
        """vLLM's sampling parameters by name: the plain distribution at the request's temperature, with its logprobs.

        Raises ContextLengthError and EngineError for a request that cannot be served.
        """
        check_request(request, self.max_length, self.vocabulary)
        return {
            "temperature": request.temperature,
            "top_p": 1.0,
            "max_tokens": request.max_tokens,
            "seed": request.seed >> 1,  # torch takes 63 bits
            "logprobs": 0,
            "stop_token_ids": list(self.ends),
            "detokenize": False,
        }


class PrefixSalts:
    """Keeps vLLM's kept prefixes apart: by the weights that computed them, and by the rollout that they belong to.

    A rollout that was released and comes again is another one: it finds nothing of the first.
    """

    def __init__(self, owner: str = "") -> None:
        """`owner`: tells those who use the same server apart."""
        self._owner = owner
        self._numbers: dict[str, int] = {}
        self._next = count()

    def of(self, version: int, rollout_id: str) -> str:
        if rollout_id not in self._numbers:
            self._numbers[rollout_id] = next(self._next)
        return f"{self._owner}{version}-{self._numbers[rollout_id]}"

    def forget(self, rollout_id: str) -> None:
        self._numbers.pop(rollout_id, None)
