"""One rollout's calls of its engine: seeded, timed, checked, and counted."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

import numpy as np

from compaction.protocols import (
    ChatMessage,
    Completion,
    ContextLengthError,
    Engine,
    EngineError,
    GenerateRequest,
    InfrastructureError,
    MeasuringEngine,
    Tools,
    Usage,
)
from compaction.rollout import SegmentKind

Messages = tuple[ChatMessage, ...]


@dataclass
class EngineCalls:
    """The engine as one rollout sees it. Call i is seeded by (seed, task id, rollout id, i)."""

    engine: Engine
    temperature: float
    key: tuple[int, str, str]
    """(seed, task id, rollout id)"""
    tools: Tools = ()
    """Functions the model may call, defined in every prompt: of a summary too, or its prefix would be another"""
    made: int = 0
    usage: Usage = field(default_factory=Usage)
    seconds: float = 0.0

    async def generate(
        self, context: np.ndarray, asked: np.ndarray, max_tokens: int, kind: SegmentKind, messages: Messages
    ) -> Completion:
        """At most `max_tokens` tokens behind the ids `context` and `asked`; `messages` say the same as text.

        Raises what the engine raises, and EngineError for a completion that could not be trained on.
        """
        seed, task, rollout = self.key
        named = f"{seed}|{task}|{rollout}|{self.made}".encode()
        self.made += 1
        request = GenerateRequest(
            rollout_id=rollout,
            prompt_ids=np.concatenate([context, asked]),
            max_tokens=max_tokens,
            temperature=self.temperature,
            seed=int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little"),
            kind=kind,
            messages=messages,
            tools=self.tools,
        )
        started = time.perf_counter()
        try:
            completion = await self.engine.generate(request)
        except (InfrastructureError, ContextLengthError) as error:
            if error.usage:
                self.usage.add(error.usage)
            raise
        finally:
            self.seconds += time.perf_counter() - started
        self.usage.add(completion.usage or _counted(completion, request))
        _check(completion, max_tokens)
        return completion

    async def measure(self, messages: Messages) -> int | None:
        """How long the engine says this context is; None from one that cannot say."""
        return await self.engine.measure(messages, self.tools) if isinstance(self.engine, MeasuringEngine) else None


def _counted(completion: Completion, request: GenerateRequest) -> Usage:
    """One call of an engine that keeps no accounts."""
    prompt = completion.prompt_tokens or len(request.prompt_ids)
    return Usage(prompt, len(completion.token_ids), completion.cached_tokens, calls=1)


def _check(completion: Completion, max_tokens: int) -> None:
    """Refuses what could not be trained on."""
    n = len(completion.token_ids)
    if n > max_tokens and completion.text is None:
        raise EngineError(f"the engine sampled {n} tokens where at most {max_tokens} were asked for")
    if len(completion.logprobs) != n or len(completion.versions) != n:
        raise EngineError(
            f"the engine gave {len(completion.logprobs)} logprobs, {len(completion.versions)} versions for {n} tokens"
        )
    if not np.all(np.isfinite(completion.logprobs)) or np.any(np.asarray(completion.versions) < 0):
        raise EngineError("the engine gave a logprob that is not finite, or a weight version below 0")
