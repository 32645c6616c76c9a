"""The window: when to compact, how much room is left, what is kept. Pure functions on token counts.

The rules are those of the design's section "The window"; every table of the paper rests on them.
Symbols: C = settings.window, |h| = `tokens`, |q_sum| = `Overheads.instruction` (the generation prompt included).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compaction.settings import CompactionSettings

_PARTIAL = "\ufffd"
"""What decoding shows for a piece of a character"""


class WindowTooSmall(ValueError):
    """Settings under which a rollout could not take one minimal turn. The message holds the arithmetic."""


@dataclass(frozen=True)
class Overheads:
    """Fixed token costs of rendering, measured once with the model's own template."""

    instruction: int
    """|q_sum|: the summary instruction as a message, and the generation prompt after it"""
    turn: int
    """What a turn costs beside its action: generation prompt, closing, and an empty observation"""
    resume: int
    """The resume message around an empty summary"""


def should_compact(settings: CompactionSettings, tokens: int, compactions_left: int) -> bool:
    """After a whole turn: C − |h| < T_comp, and a compaction is left (rule 1)."""
    return compactions_left > 0 and settings.window - tokens < settings.threshold


def reserve(settings: CompactionSettings, compactions_left: int, overheads: Overheads) -> int:
    """Tokens kept free so that the summary request always fits; none once no compaction is left (rules 2, 3)."""
    return overheads.instruction + settings.summary_cap if compactions_left > 0 else 0


def response_room(settings: CompactionSettings, tokens: int, compactions_left: int, overheads: Overheads) -> int:
    """Most tokens the next action may have. Below `min_response` the rollout stops as `context_full` (rules 2, 3)."""
    free = settings.window - tokens - overheads.turn - reserve(settings, compactions_left, overheads)
    return min(settings.max_response, free)


def observation_room(settings: CompactionSettings, tokens: int, compactions_left: int, overheads: Overheads) -> int:
    """Most tokens the observation message may have, `tokens` counting everything before it (rule 2)."""
    return settings.window - tokens - reserve(settings, compactions_left, overheads)


def clip(
    texts: Sequence[str],
    fits: Callable[[list[str]], bool],
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> list[str] | None:
    """`texts`, the longest of them cut so that `fits` holds of all together; None if nothing fits.

    Of a cut text, head and tail are left around a marker that names what was cut. Cuts fall between tokens of the text;
    a character cut in two is left out. How many tokens each may keep is found by bisection.
    """
    if fits(list(texts)):
        return list(texts)
    tokens = [list(encode(text)) for text in texts]

    def kept(n: int) -> list[str]:
        return [text if len(own) <= n else _cut(own, n, decode) for text, own in zip(texts, tokens, strict=True)]

    if not fits(kept(0)):
        empty = [""] * len(texts)
        return empty if fits(empty) else None
    low, high = 0, max(len(own) for own in tokens) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(kept(middle)):
            low = middle
        else:
            high = middle - 1
    return kept(low)


def _cut(tokens: Sequence[int], n: int, decode: Callable[[Sequence[int]], str]) -> str:
    """Head and tail of a text, `n` tokens in all."""
    marker = f"[cut {len(tokens) - n}]"
    head = n - n // 2
    tail = decode(tokens[len(tokens) - n // 2 :]).lstrip(_PARTIAL) if n // 2 else ""
    return f"{decode(tokens[:head]).rstrip(_PARTIAL)} {marker} {tail}" if n else marker


def kept_turns(settings: CompactionSettings, tokens: int, base_tokens: int, turn_tokens: Sequence[int]) -> int | None:
    """How many recent turns the resumed window keeps: the largest k ≤ keep_recent with C − |h̄| ≥ T_comp and |h̄| < |h|.

    `tokens` is |h| before, `base_tokens` the resumed context without turns. None: even k = 0 does not get there
    (rule 4, stop reason `compaction_grew`).
    """
    for keep in range(min(settings.keep_recent, len(turn_tokens)), -1, -1):
        resumed = base_tokens + sum(turn_tokens[len(turn_tokens) - keep :])
        if settings.window - resumed >= settings.threshold and resumed < tokens:
            return keep
    return None


def check_window(settings: CompactionSettings, system: int, task: int, overheads: Overheads) -> None:
    """Refuses, before the start, settings that leave no room for one minimal turn (rule 5).

    `system` and `task` are the sizes of the two rendered messages. Raises WindowTooSmall with the arithmetic.
    """
    turn = overheads.turn + settings.min_response
    held = reserve(settings, settings.cap, overheads)
    need = system + task + turn + held
    if need > settings.window:
        raise WindowTooSmall(
            f"window={settings.window} is too small: system {system} + task {task} + one turn {turn} + summary reserve "
            f"{held} = {need} tokens. Raise window to at least {need}, or lower summary_cap or min_response."
        )
    if settings.cap == 0:
        return
    kept_task = task if settings.keep_task else 0
    resumed = system + kept_task + overheads.resume + settings.summary_cap
    need = resumed + turn + reserve(settings, settings.cap - 1, overheads)
    if need > settings.window:
        raise WindowTooSmall(
            f"window={settings.window} is too small after a compaction: system {system} + resume message "
            f"{kept_task + overheads.resume} + summary {settings.summary_cap} + one turn and its reserve "
            f"{need - resumed} = {need} tokens. Raise window to at least {need}, or lower summary_cap."
        )
    need = system + kept_task + overheads.resume + settings.threshold
    if need > settings.window:
        raise WindowTooSmall(
            f"window={settings.window} could never resume: system {system} + resume message "
            f"{kept_task + overheads.resume} + threshold {settings.threshold} = {need} tokens, even around an empty "
            f"summary. Raise window to at least {need}, or lower threshold."
        )
    if settings.threshold < turn + held:
        raise WindowTooSmall(
            f"threshold={settings.threshold} cannot hold one turn {turn} and the summary reserve {held}: a window "
            f"could be too full to act and not full enough to compact. Raise threshold to at least {turn + held}."
        )
