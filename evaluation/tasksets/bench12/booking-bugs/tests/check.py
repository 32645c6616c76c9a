"""The module must keep the rules of SPEC.md, on cases that the agent has not seen."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: nothing there may stand for Python's own modules
import json  # noqa: E402

from grading import main, need, read, require, run  # noqa: E402

CASES = [
    ("overlaps", [[0, 60], [60, 120]], False),
    ("overlaps", [[60, 120], [0, 60]], False),
    ("overlaps", [[0, 61], [60, 120]], True),
    ("overlaps", [[0, 100], [20, 30]], True),
    ("overlaps", [[0, 100], [50, 50]], False),
    ("overlaps", [[0, 100], [60, 40]], False),
    ("overlaps", [[50, 50], [50, 50]], False),
    ("merge", [[]], []),
    ("merge", [[[30, 90], [0, 60]]], [[0, 90]]),
    ("merge", [[[0, 100], [10, 20]]], [[0, 100]]),
    ("merge", [[[0, 30], [30, 60]]], [[0, 60]]),
    ("merge", [[[50, 50], [0, 10], [90, 80]]], [[0, 10]]),
    ("merge", [[[5, 9], [0, 3], [3, 4], [8, 20], [30, 31]]], [[0, 4], [5, 20], [30, 31]]),
    ("free", [[480, 1080], []], [[480, 1080]]),
    ("free", [[480, 1080], [[660, 720], [540, 600]]], [[480, 540], [600, 660], [720, 1080]]),
    ("free", [[480, 1080], [[540, 900], [600, 660]]], [[480, 540], [900, 1080]]),
    ("free", [[480, 1080], [[0, 500], [1000, 2000]]], [[500, 1000]]),
    ("free", [[480, 1080], [[0, 100], [1200, 1300]]], [[480, 1080]]),
    ("free", [[480, 1080], [[400, 1100]]], []),
    ("free", [[480, 1080], [[600, 600], [700, 650]]], [[480, 1080]]),
    ("free", [[480, 1080], [[480, 500], [1060, 1080]]], [[500, 1060]]),
    ("free", [[480, 480], []], []),
    ("parse", ["09:30-11:00"], [570, 660]),
    ("parse", [" 09:30 - 11:00 "], [570, 660]),
    ("parse", ["22:00-02:00"], [1320, 1560]),
    ("parse", ["08:00-08:00"], [480, 1920]),
    ("parse", ["20:00-24:00"], [1200, 1440]),
    ("parse", ["00:00-24:00"], [0, 1440]),
    ("parse", ["00:00-00:00"], [0, 1440]),
    *(("parse", [text], "ValueError") for text in (
        "25:00-26:00", "12:60-13:00", "10:00-24:30", "24:00-01:00", "9h-10h", "09:00", "", "-01:00-02:00", "09:00-10:00-11:00"
    )),
    ("price", [[600, 660], 1200], 1200),
    ("price", [[600, 601], 100], 2),
    ("price", [[600, 630], 101], 51),
    ("price", [[600, 600], 1200], 0),
    ("price", [[660, 600], 1200], 0),
    ("price", [[300, 420], 1200], 1800),
    ("price", [[1260, 1380], 1200], 1800),
    ("price", [[1319, 1321], 6000], 150),
    ("price", [[1440 + 300, 1440 + 420], 1200], 1800),
    ("price", [[1440 + 600, 1440 + 660], 1200], 1200),
    ("price", [[420, 960], 1000], 8800),
    ("price", [[420, 901], 6000], 48080),
    ("price", [[840, 840 + 1440], 777], 13675),
]
PROBE = """
import json, sys
sys.path.insert(0, "/app")
import booking
def ranges(value):
    if isinstance(value, list):
        return tuple(value) if len(value) == 2 and all(isinstance(v, int) for v in value) else [ranges(v) for v in value]
    return value
for name, arguments, _ in json.load(sys.stdin):
    arguments = [ranges(a) for a in arguments]
    before = repr(arguments)
    try:
        result = getattr(booking, name)(*arguments)
    except Exception as error:
        result = type(error).__name__
    print(json.dumps([result, repr(arguments) == before]))
"""


def check():
    need("python3")
    read("/app/booking.py")
    output, status = run("python3", "-B", "-c", PROBE, stdin=json.dumps(CASES))
    require(status == 0, f"booking.py does not run: {output[-300:]}")
    answers = output.splitlines()
    require(len(answers) == len(CASES), "booking.py prints something itself")
    for (name, arguments, expected), answer in zip(CASES, answers, strict=True):
        require(answer == json.dumps([expected, True]), f"{name}{tuple(arguments)} gives {answer[:200]}")


main(check)
