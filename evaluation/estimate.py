"""What a sweep will take, before it runs: from trials that are there, else from a stated assumption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compaction.settings import CompactionSettings
from evaluation.trial import TrialResult

TURNS = 40
"""Turns of an assumed trial"""
TURN_TOKENS = 600
"""Tokens that an assumed turn adds to the window, the action's among them"""
ACTION_TOKENS = 200
OPENING_TOKENS = 1_500
"""System prompt and task"""


@dataclass(frozen=True)
class Tokens:
    """Tokens of one trial. `repeated` are prompt tokens that an earlier call of the same window had sent already."""

    prompt: float
    repeated: float
    completion: float


def assumed_tokens(settings: CompactionSettings, turns: int) -> Tokens:
    """A trial of `turns` turns that add TURN_TOKENS each, compacted as `settings` say; cap 0 ends with its window.

    Every call sends the whole window: the prompt's tokens are a sum over turns.
    """
    held, compactions = float(OPENING_TOKENS), 0
    prompt = completion = fresh = 0.0
    new = held
    for _ in range(turns):
        if settings.window - held < settings.threshold and compactions < settings.cap:
            summary = settings.summary_cap / 2
            prompt, fresh, completion = prompt + held, fresh + new, completion + summary
            held = OPENING_TOKENS + summary + TURN_TOKENS * settings.keep_recent
            new, compactions = held, compactions + 1
        if held + TURN_TOKENS > settings.window:
            break
        prompt, fresh, completion = prompt + held, fresh + new, completion + ACTION_TOKENS
        held, new = held + TURN_TOKENS, float(TURN_TOKENS)
    return Tokens(prompt, prompt - fresh, completion)


def measured_tokens(results: Sequence[TrialResult]) -> Tokens | None:
    """The mean of finished trials; None for none."""
    if not results:
        return None
    n = len(results)
    return Tokens(
        sum(r.prompt_tokens for r in results) / n,
        sum(r.cached_tokens for r in results) / n,
        sum(r.generated_tokens for r in results) / n,
    )
