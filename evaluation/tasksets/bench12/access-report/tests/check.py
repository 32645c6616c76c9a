"""The report and the summary must be those that the untouched log gives."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: nothing there may stand for Python's own modules
from grading import TESTS, lines, main, require  # noqa: E402


def check():
    for name in ("report.csv", "summary.txt"):
        require(lines(f"/app/{name}") == lines(TESTS / name), f"{name} is not as expected")


main(check)
