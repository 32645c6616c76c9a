"""Thinking inside a reply: what stands in <think> … </think> in front of what is said."""

from __future__ import annotations

import re

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_CUT = re.compile(r"\s*<think>(.*)\Z", re.DOTALL)
_THOUGHT_END = re.compile(r"(.*?)</think>\s*", re.DOTALL)

UNCLOSED = (
    "Your reply could not be used: its thinking is not closed by </think>, so nothing stands behind it. Nothing was "
    "run. Think more briefly, close it with </think>, then give your action."
)
"""What the agent is told"""


def split_thinking(text: str, opened: bool | None = None) -> tuple[str, str | None]:
    """(thinking, what is said behind it) of a reply; None is said where the thinking is not closed.

    `opened`: whether the prompt already opened the thinking, so that only its end is in the text. None where that is
    not known: then an end without a beginning tells.
    """
    if opened:
        thought = _THOUGHT_END.match(text)
        return (thought[1].strip(), text[thought.end() :]) if thought else (text.strip(), None)
    thought = _THOUGHT.match(text)
    if thought is None and opened is None and "<think>" not in text:
        thought = _THOUGHT_END.match(text)
    if thought is not None:
        return thought[1].strip(), text[thought.end() :]
    cut = _CUT.match(text)
    return (cut[1].strip(), None) if cut else ("", text)
