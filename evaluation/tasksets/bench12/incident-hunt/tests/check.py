"""Every complaint must be traced to its sector."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: nothing there may stand for Python's own modules
from grading import TESTS, lines, main, require  # noqa: E402


def check():
    expected = lines(TESTS / "incidents.csv")
    found = lines("/app/incidents.csv")
    for line, wanted in zip(found, expected, strict=False):
        require(line.replace(" ", "") == wanted, f"{line!r} is not right")
    require(len(found) == len(expected), f"{len(found)} lines instead of {len(expected)}")


main(check)
