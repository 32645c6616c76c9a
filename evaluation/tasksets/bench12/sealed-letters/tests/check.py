"""Who gets what in the end, after all changes, and the sum."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: nothing there may stand for Python's own modules
from grading import TESTS, lines, main, require  # noqa: E402


def check():
    found = [" ".join(line.split()) for line in lines("/app/testament.txt")]
    expected = lines(TESTS / "testament.txt")
    for line, wanted in zip(found, expected, strict=False):
        require(line == wanted, f"{line!r} is not right")
    require(len(found) == len(expected), f"{len(found)} lines instead of {len(expected)}")


main(check)
