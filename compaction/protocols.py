"""What the floors above provide: tasks, environments, engines, recorders.

`evaluation` and `rl` meet only through these protocols; `tasks/` wires them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

FinishReason = Literal["stop", "length"]

Tools = tuple[dict[str, Any], ...]
"""Functions that a model may call, each in the JSON that chat templates and endpoints take"""

ChatMessage = dict[str, Any]
"""A message in the JSON of chat endpoints"""

CountSource = Literal["exact", "tokenizer", "estimate"]
"""Where token counts come from: the model's own ids, a tokenizer that counted its texts, or characters per token"""


@dataclass
class Usage:
    """Counts of engine calls, those that failed included where the engine was told what they took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, those served from a kept prefix"""
    calls: int = 0
    cost: float | None = 0.0
    """US dollars; None as soon as the price of one call is unknown"""

    def add(self, other: Usage) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens
        self.calls += other.calls
        self.cost = None if self.cost is None or other.cost is None else self.cost + other.cost


@dataclass(frozen=True)
class ToolCall:
    """A function call that an endpoint gives beside a reply's text."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it"""


class InfrastructureError(Exception):
    """Something outside the agent broke: the rollout gets no reward (never 0).

    `error_class` names the kind, a key of `evaluation.failures`; each class has its own, a raiser may say it better.
    `usage` is what the failed call took, where that is known.
    """

    error_class = "infrastructure"

    def __init__(self, message: str, error_class: str | None = None, usage: Usage | None = None) -> None:
        super().__init__(message)
        if error_class is not None:
            self.error_class = error_class
        self.usage = usage


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
    """The engine says that the prompt does not fit its own context length. Triggers one compaction, then a stop.

    `usage` is what the call took all the same, where that is known.
    """

    def __init__(self, message: str, usage: Usage | None = None) -> None:
        super().__init__(message)
        self.usage = usage


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
    note: str = ""
    """What else the agent should know, such as `stopped after 120 s`"""


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
    messages: tuple[ChatMessage, ...] = ()
    """The same prompt as chat messages, for engines and scripts that read text."""
    tools: Tools = ()
    """Functions the model may call that the prompt defines, for the same"""


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
    text: str | None = None
    """The reply as text, from an engine that speaks text; its `token_ids` are then only as many as the reply takes in
    the next prompt, and are the model's own exactly where the engine gives them"""
    reasoning: str | None = None
    """What the model thought beside the reply, where it is to be sent back with the reply"""
    tool_calls: tuple[ToolCall, ...] = ()
    """Functions that the reply calls, from an engine that gives them beside the text"""
    usage: Usage | None = None
    """What the call took in all, failed attempts included; None: one call, counted from the fields above"""


@runtime_checkable
class Engine(Protocol):
    """Samples completions. One engine serves many rollouts at once."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises EngineError, or ContextLengthError where the prompt does not fit the engine."""
        ...

    async def release(self, rollout_id: str) -> None:
        """The rollout is over: whatever was kept for it may be freed."""
        ...


@runtime_checkable
class MeasuringEngine(Engine, Protocol):
    """An engine that can say how long a prompt is before it is asked to continue it."""

    async def measure(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> int | None:
        """Tokens of these chat messages and tools, the template's own included, no generation prompt; None if
        unknown."""
        ...


class Recorder(Protocol):
    """Told about a rollout as it happens (progress, evidence)."""

    def turn(self, rollout_id: str, turn: int) -> None: ...

    def compaction(self, rollout_id: str, tokens_before: int, tokens_after: int) -> None: ...


class Renderer(Protocol):
    """Turns messages into token ids, each exactly once, and ids back into text. Works per message, append-only.

    Sampled ids are never changed, and stand in the context as they are.
    """

    generation_prompt: tuple[int, ...]
    """Ids that open an assistant message; the model samples what follows."""
    special_ids: frozenset[int]
    """Control tokens: they never stand inside a well-formed reply, only at its end"""
    end_ids: tuple[int, ...]
    """Tokens that end a reply, the template's own first; none where no ids are the model's"""
    opens_thinking: bool | None
    """Whether the generation prompt opens the thinking, so that a reply holds only its end; None where unknown"""
    takes_tools: bool
    """Whether tools can be defined in the system message by the template itself"""
    takes_results: bool
    """Whether there are messages of role tool"""
    count_source: CountSource
    """What the number of ids is worth as a count of the model's tokens"""

    def with_thinking(self, thinking: bool | None) -> Renderer:
        """The same renderer for a model that is to think, or not, before it says something; None: as it does."""
        ...

    def message(self, role: Literal["system", "user"], text: str, tools: Tools = ()) -> list[int]:
        """Ids of one whole message. Special tokens inside `text` stay text. `tools` are defined in a system message."""
        ...

    def results(self, texts: Sequence[str]) -> list[int]:
        """Ids of the messages of role tool that answer the calls of one reply, in order."""
        ...

    def close(self, sampled: Sequence[int] | np.ndarray, finish_reason: FinishReason) -> list[int]:
        """Context ids that complete an assistant message after the sampled ids (the end token, if it was cut)."""
        ...

    def follow(
        self, sampled: Sequence[int] | np.ndarray, finish_reason: FinishReason, message: Sequence[int]
    ) -> list[int]:
        """Context ids after the sampled ids: what completes them, and `message`, whose first id is left out where the
        model ended its reply with it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a reply's text, no message around it. Special tokens stay text."""
        ...

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Text of sampled ids without the token that ended them; control tokens inside it show as their text."""
        ...
