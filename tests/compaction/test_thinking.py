from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction.thinking import split_thinking


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>a</think>\n\ncat b", False, ("a", "cat b")),
        ("\n<think>a</think>cat b", False, ("a", "cat b")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("a</think>cat b", True, ("a", "cat b")),
        ("cat b", False, ("", "cat b")),
        ("grep '</think>' a", False, ("", "grep '</think>' a")),
        ("grep '<think>' a", None, ("", "grep '<think>' a")),
        ("a</think>cat b", None, ("a", "cat b")),
        ("<think>a", False, ("a", None)),
        ("<think>a", None, ("a", None)),
        ("cat b", True, ("cat b", None)),
        ("", True, ("", None)),
    ],
)
def test_what_is_said_stands_behind_the_thinking(text: str, opened: bool | None, expected: tuple[str, str | None]):
    assert split_thinking(text, opened) == expected


@given(st.text().filter(lambda text: "think>" not in text), st.sampled_from([False, None]))
def test_a_reply_without_thinking_is_said_as_it_is(text: str, opened: bool | None):
    assert split_thinking(text, opened) == ("", text)
