"""Clipping of outputs: sizes, marker, characters."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from evaluation.environments.output import ClippedOutput

MARKER = re.compile(r"\n\[… ([\d,]+) bytes cut …\]\n")


def clipped(limit: int, *pieces: bytes) -> ClippedOutput:
    output = ClippedOutput(limit)
    for piece in pieces:
        output.add(piece)
    return output


def test_what_fits_is_kept_whole() -> None:
    assert clipped(10, b"01234", b"56789").text() == "0123456789"


def test_one_byte_more_is_cut_and_named() -> None:
    assert clipped(10, b"0123456789a").text() == "01234\n[… 1 bytes cut …]\n6789a"


def test_the_cut_of_200_mb_is_named_in_full() -> None:
    output = ClippedOutput(30_000)
    for _ in range(2000):
        output.add(b"x" * 100_000)
    assert "[… 199,970,000 bytes cut …]" in output.text()


@given(st.lists(st.binary(max_size=40)), st.integers(2, 50))
def test_pieces_do_not_matter_and_nothing_is_counted_wrong(pieces: list[bytes], limit: int) -> None:
    data = b"".join(pieces)
    output = clipped(limit, *pieces).bytes()
    assert output == clipped(limit, data).bytes()
    if len(data) <= limit:
        assert output == data
        return
    found = re.search(rb"\n\[\xe2\x80\xa6 ([\d,]+) bytes cut \xe2\x80\xa6\]\n", output)
    assert found is not None
    head, tail = output[: found.start()], output[found.end() :]
    assert data.startswith(head)
    assert data.endswith(tail)
    assert len(head) + len(tail) + int(found[1].replace(b",", b"")) == len(data)
    assert limit - 6 <= len(head) + len(tail) <= limit


@given(st.text(min_size=60, alphabet="aé€😀"), st.integers(8, 50))
def test_no_character_is_cut(text: str, limit: int) -> None:
    shown = clipped(limit, text.encode()).text()
    assert "\ufffd" not in shown
    head, tail = MARKER.sub("\0", shown, count=1).split("\0")
    assert text.startswith(head)
    assert text.endswith(tail)


def test_bytes_that_are_not_utf8_are_kept_up_to_the_limit() -> None:
    assert clipped(8, b"\xff" * 20).text() == "\ufffd" * 4 + "\n[… 12 bytes cut …]\n" + "\ufffd" * 4
