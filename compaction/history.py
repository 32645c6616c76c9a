"""h_t = (s, u, z_1 … z_t): what the model sees, as messages and as token ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from compaction.protocols import ChatMessage


def ids(values: object) -> np.ndarray:
    """Token ids as an int32 array."""
    return np.asarray(values, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Message:
    """A system, task or resume message: its text, and its ids as rendered once."""

    role: str
    text: str
    token_ids: np.ndarray


@dataclass(frozen=True, eq=False)
class Turn:
    """One atomic (action, observation) pair z_i, as chat messages and as ids. It is kept or dropped whole.

    `action_ids` are the tokens as sampled and are never encoded again; `before_ids` open the assistant message and
    `observation_ids` close it and hold the observation message.
    """

    messages: tuple[ChatMessage, ...]
    before_ids: np.ndarray
    action_ids: np.ndarray
    observation_ids: np.ndarray

    @cached_property
    def token_ids(self) -> np.ndarray:
        return np.concatenate([self.before_ids, self.action_ids, self.observation_ids])


@dataclass(frozen=True, eq=False)
class History:
    """The context so far. Immutable: a failed compaction leaves nothing behind in it."""

    system: Message
    opening: tuple[Message, ...]
    """The task message; after a compaction the resume message (and the task before it where keep_task is set)"""
    turns: tuple[Turn, ...] = ()
    uncounted: int = 0
    """Tokens that the engine counted beyond the ids (or fewer, if negative): of a template or tokenizer not ours"""

    @cached_property
    def token_ids(self) -> np.ndarray:
        """[|h|] int32"""
        parts = [self.system.token_ids, *(m.token_ids for m in self.opening), *(t.token_ids for t in self.turns)]
        return np.concatenate(parts)

    @property
    def tokens(self) -> int:
        """|h|"""
        return len(self.token_ids) + self.uncounted

    def measured(self, tokens: int) -> History:
        """The same context, of which the engine says that it is `tokens` long."""
        return replace(self, uncounted=tokens - len(self.token_ids))

    def add(self, turn: Turn) -> History:
        return replace(self, turns=(*self.turns, turn))

    def resumed(self, opening: tuple[Message, ...], keep: int) -> History:
        """h̄ = s ⊕ u_resume(S) ⊕ the last `keep` turns, verbatim."""
        return History(self.system, opening, self.turns[len(self.turns) - keep :])

    def messages(self) -> tuple[ChatMessage, ...]:
        """The same context as chat messages."""
        first = ({"role": m.role, "content": m.text} for m in (self.system, *self.opening))
        return (*first, *(message for turn in self.turns for message in turn.messages))
