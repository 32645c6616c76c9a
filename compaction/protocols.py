"""What the floors above provide: tasks, environments, engines, recorders.

`evaluation` and `rl` meet only through these protocols; `tasks/` wires them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np

FinishReason = Literal["stop", "length"]


class InfrastructureError(Exception):
    """Something outside the agent broke: the rollout gets no reward (never 0). `error_class` names the kind."""

    error_class = "infrastructure"


class EngineError(InfrastructureError):
    """The engine could not answer (crash, abort without logprobs, weights that fail to load)."""

    error_class = "engine"


class EnvironmentFailure(InfrastructureError):
    """The environment could not start, execute or grade."""

    error_class = "environment"


class VerifierError(InfrastructureError):
    """The verifier left no usable reward."""

    error_class = "verifier"


class ContextLengthError(Exception):
    """The engine says that the prompt does not fit its own context length. Triggers one compaction, then a stop."""


@dataclass(frozen=True)
class TaskLimits:
    """Limits that a task sets for its agent."""

    max_turns: int | None = None
    """Turn limit; the lower of this and the agent's own counts."""
    deadline_seconds: float | None = None
    """The agent's timeout: the rollout is stopped there and graded as it stands."""


@dataclass(frozen=True)
class Execution:
    """What a command did."""

    output: str
    exit_code: int = 0


@runtime_checkable
class Environment(Protocol):
    """Where one rollout acts. Any method may raise an InfrastructureError; `stop` is always called."""

    async def start(self) -> None: ...

    async def execute(self, command: str) -> Execution: ...

    async def upload(self, path: str, content: bytes) -> None: ...

    async def grade(self) -> float:
        """The reward in [0, 1] from the verifier. Raises VerifierError if there is none."""
        ...

    async def stop(self) -> None: ...


@runtime_checkable
class Task(Protocol):
    """Something to solve. Picklable: it travels to rollout workers."""

    @property
    def id(self) -> str: ...

    @property
    def instruction(self) -> str: ...

    @property
    def limits(self) -> TaskLimits: ...

    def open(self) -> Environment: ...


@dataclass(frozen=True)
class GenerateRequest:
    """One call of an engine: a prompt as token ids, and how to sample."""

    rollout_id: str
    """Names the rollout, so that an engine can keep its prefix between turns."""
    prompt_ids: np.ndarray
    """[T] int32 token ids of the whole prompt, the generation prompt included."""
    max_tokens: int
    temperature: float
    seed: int
    """Seed of this call alone: sampling does not depend on what else is in the batch."""
    kind: Literal["execution", "summary"] = "execution"
    messages: tuple[dict[str, str], ...] = ()
    """The same prompt as chat messages, for engines and scripts that read text."""


@dataclass(frozen=True)
class Completion:
    """What an engine sampled: n tokens, n logprobs, n weight versions.

    `logprobs` are those of the distribution really sampled (temperature applied; greedy decoding reports the
    untempered softmax). The end token, when sampled, is the last of `token_ids`.
    """

    token_ids: np.ndarray
    """[n] int32"""
    logprobs: np.ndarray
    """[n] float32"""
    versions: np.ndarray
    """[n] int32: the weight version that sampled each token"""
    finish_reason: FinishReason
    """`stop`: the model ended by itself; `length`: cut at max_tokens"""
    prompt_tokens: int = 0
    """Prompt length as the engine counted it"""
    cached_tokens: int = 0
    """How many prompt tokens were served from a kept prefix"""


@runtime_checkable
class Engine(Protocol):
    """Samples completions. One engine serves many rollouts at once."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises EngineError, or ContextLengthError where the prompt does not fit the engine."""
        ...

    async def release(self, rollout_id: str) -> None:
        """The rollout is over: whatever was kept for it may be freed."""
        ...


class Recorder(Protocol):
    """Told about a rollout as it happens (progress, evidence)."""

    def turn(self, rollout_id: str, turn: int) -> None: ...

    def compaction(self, rollout_id: str, tokens_before: int, tokens_after: int) -> None: ...


class Renderer(Protocol):
    """Turns messages into token ids, each exactly once, and ids back into text. Works per message, append-only."""

    generation_prompt: tuple[int, ...]
    """Ids that open an assistant message; the model samples what follows."""
    special_ids: frozenset[int]
    """Control tokens: they never stand inside a well-formed reply, only at its end"""

    def message(self, role: Literal["system", "user"], text: str) -> list[int]:
        """Ids of one whole message. Special tokens inside `text` stay text."""
        ...

    def close(self, sampled: Sequence[int] | np.ndarray, finish_reason: FinishReason) -> list[int]:
        """Context ids that complete an assistant message after the sampled ids (the end token, if it was cut)."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no message around it."""
        ...

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Text of sampled ids without the end token; control tokens inside it show as their text."""
        ...


@dataclass
class Usage:
    """Counts of one rollout's engine calls."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    calls: int = field(default=0)
