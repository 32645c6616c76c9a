"""Segments and rollouts: what the agent loop makes, what training reads, what Parquet keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from compaction.history import ids
from compaction.protocols import Completion, CountSource, Usage
from compaction.settings import AgentSettings

SegmentKind = Literal["execution", "summary"]

StopReason = Literal[
    "finished",  # the agent said it was done
    "max_turns",  # turn limit
    "deadline",  # the agent's timeout
    "context_full",  # no compaction left and no room for a reply
    "compaction_grew",  # the resumed window would be no smaller, or not small enough
    "summary_failed",  # no acceptable summary
    "refusal",  # a content filter of the endpoint stopped the reply
    "error",  # infrastructure: no reward
]


@dataclass(frozen=True, eq=False)
class Segment:
    """One stretch of a rollout that the policy sampled in one window: σ_s of the paper.

    `context_ids` stand in front of the segment's own tokens. For an execution segment they are the whole window it
    started from (system, task or resume message, kept turns); for a summary segment only the summary instruction,
    because its prefix is the execution segment before it. `token_ids` hold the sampled tokens and, in an execution
    segment, the observations between them.

    Raises ValueError at construction when lengths differ or values stand where the mask is off.
    """

    kind: SegmentKind
    ordinal: int
    context_ids: np.ndarray
    """[c] int32"""
    token_ids: np.ndarray
    """[n] int32"""
    optimized: np.ndarray
    """[n] bool: sampled by the policy; each sampled token is optimized in exactly one segment"""
    logprobs: np.ndarray
    """[n] float32 of the sampling distribution, 0 where not optimized"""
    versions: np.ndarray
    """[n] int32 weight version per token, -1 where not optimized"""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("optimized", "logprobs", "versions"):
            if len(getattr(self, name)) != n:
                found = len(getattr(self, name))
                raise ValueError(f"segment {self.ordinal}: {name} has {found} entries for {n} tokens")
        off = ~self.optimized
        if np.any(self.logprobs[off] != 0) or np.any(self.versions[off] != -1):
            raise ValueError(f"segment {self.ordinal}: logprob or version on a token that was not sampled")
        if np.any(self.versions[self.optimized] < 0):
            raise ValueError(f"segment {self.ordinal}: sampled token without a weight version")
        if not np.all(np.isfinite(self.logprobs)) or np.any(self.logprobs > 1e-4):
            raise ValueError(f"segment {self.ordinal}: logprobs must be finite and at most 0")

    @property
    def n_optimized(self) -> int:
        return int(self.optimized.sum())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segment):
            return NotImplemented
        return (self.kind, self.ordinal) == (other.kind, other.ordinal) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("context_ids", "token_ids", "optimized", "logprobs", "versions")
        )


@dataclass
class SegmentBuilder:
    """Collects one segment: context in front, then sampled and observed tokens."""

    kind: SegmentKind
    context: np.ndarray
    tokens: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)

    def sampled(self, completion: Completion) -> None:
        self.tokens.append(completion.token_ids)
        self.logprobs.append(completion.logprobs)
        self.versions.append(completion.versions)

    def observed(self, token_ids: np.ndarray) -> None:
        self.tokens.append(token_ids)
        self.logprobs.append(np.zeros(len(token_ids), np.float32))
        self.versions.append(np.full(len(token_ids), -1, np.int32))

    def build(self, ordinal: int) -> Segment:
        versions = np.concatenate(self.versions or [ids([])]).astype(np.int32)
        return Segment(
            kind=self.kind,
            ordinal=ordinal,
            context_ids=ids(self.context),
            token_ids=ids(np.concatenate(self.tokens or [ids([])])),
            optimized=versions >= 0,
            logprobs=np.concatenate(self.logprobs or [np.zeros(0)]).astype(np.float32),
            versions=versions,
        )


@dataclass(frozen=True)
class CallRecord:
    """A function call of a reply, and its answer."""

    id: str
    name: str
    arguments: dict[str, Any]
    commands: tuple[str, ...]
    """What was run for it, in order; nothing for a malformed call"""
    answer: str


@dataclass(frozen=True)
class TurnRecord:
    """One (action, observation) pair as text."""

    segment: int
    action: str
    observation: str
    tokens: int
    """|h| after the turn"""
    calls: tuple[CallRecord, ...] = ()
    """Of a reply that acts by calling functions"""


@dataclass(frozen=True)
class CompactionRecord:
    """One compaction: what went, what stayed."""

    segment: int
    """Ordinal of the summary segment; where no attempt was kept, of the execution segment before it"""
    after_turn: int
    """Number of turns before it"""
    tokens_before: int
    tokens_after: int | None
    """|h| of the resumed window; None where the compaction failed"""
    dropped: int
    """Turns of the window that only the summary now covers"""
    kept: int
    summary: str
    """Body of the accepted summary; in training, where the rejected one is a segment, its whole text"""
    discarded: tuple[str, ...] = ()
    """Rejected attempts in evaluation, kept as evidence, never trained on"""
    rejected: str | None = None
    """Why the last attempt was not accepted, if it was not"""
    reply: str = ""
    """The whole accepted reply, of which `summary` is the body; empty in files of earlier versions"""


@dataclass(frozen=True)
class Outcome:
    """How a rollout ended. `reward` is None exactly when infrastructure failed."""

    reward: float | None
    stop_reason: StopReason
    error_class: str | None = None
    detail: str | None = None

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.error_class is not None):
            raise ValueError(f"a rollout has a reward or an error class, not both or neither: {self}")
        if self.reward is not None and not 0.0 <= self.reward <= 1.0:
            raise ValueError(f"reward {self.reward} is outside [0, 1]")


@dataclass(frozen=True)
class Rollout:
    """One task attempted once: segments in order (execution, summary, execution, …) and how it ended."""

    id: str
    task_id: str
    seed: int
    settings: AgentSettings
    segments: tuple[Segment, ...]
    outcome: Outcome
    turns: tuple[TurnRecord, ...] = ()
    compactions: tuple[CompactionRecord, ...] = ()
    usage: Usage = field(default_factory=Usage)
    count_source: CountSource = "exact"
    """Only exact rollouts can be trained on: of the others the ids merely count"""
    instruction: str = ""
    """The task's text; empty in files of earlier versions"""
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Wall seconds in `generate` and `environment`; not part of equality"""

    def __post_init__(self) -> None:
        for i, segment in enumerate(self.segments):
            expected = "summary" if i % 2 else "execution"
            if segment.ordinal != i or segment.kind != expected:
                raise ValueError(
                    f"rollout {self.id}: segment {i} is {segment.kind} with ordinal {segment.ordinal}, "
                    f"expected {expected} {i}"
                )

    def windows(self) -> Iterator[tuple[Segment, Segment | None]]:
        """(execution, the summary that ended its window or None), in order."""
        for i in range(0, len(self.segments), 2):
            yield self.segments[i], self.segments[i + 1] if i + 1 < len(self.segments) else None

    @property
    def n_compactions(self) -> int:
        """Compactions that led to a resumed window."""
        return sum(c.tokens_after is not None for c in self.compactions)

    @property
    def summary_tokens(self) -> list[int]:
        """Sampled tokens of each accepted summary."""
        return [self.segments[c.segment].n_optimized for c in self.compactions if c.tokens_after is not None]
