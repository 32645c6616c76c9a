"""The package must have every issue resolved, on expressions that the agent has not seen."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: nothing there may stand for Python's own modules
import json  # noqa: E402
import math  # noqa: E402

from grading import main, need, read, require, run  # noqa: E402

ERROR = "CalcError"
NAMES = {"a": 0, "b": 5, "x1": 2, "tax_2024": 19, "_": 1, "t": "word"}
CASES = {
    "1 + 2 * 3": 7,
    "10 - 2 - 3": 5,
    "24 / 4 / 2": 3.0,
    "100 - 1 - 2 - 3 + 4 - 5": 93,
    "2 * 3 % 4 * 5": 10,
    "1 < 2 == 2 > 1": True,
    "1 == 1 == 1": True,
    "7 - (2 - 1) - 1": 5,
    "2 ** 3 ** 2": 512,
    "-2 ** 2": -4,
    "2 ** -1": 0.5,
    "2 ** -2 ** 2": 0.0625,
    "(-2) ** 2": 4,
    "- -1": 1,
    "---1": -1,
    "-(-1)": 1,
    "!!b": True,
    "!a": True,
    "!-a": True,
    "-b * 2": -10,
    "3 - -2": 5,
    "2 * -3": -6,
    "a != 0 && 10 / a > 1": False,
    "a == 0 || 10 / a > 1": True,
    "a == 0 ? 0 : 10 / a": 0,
    "b == 0 ? 10 / a : b": 5,
    "b && 7": True,
    "a || 0": False,
    "b || nope": True,
    "1 && 0 || 1": True,
    "0 || 1 && 0": False,
    "x1 * 10": 20,
    "tax_2024 + _": 20,
    "x1x": ERROR,
    r'"say \"hi\""': 'say "hi"',
    r'"a\\b"': "a\\b",
    r'"a\nb"': "a\nb",
    r'"\\"': "\\",
    r'"\t"': ERROR,
    r'"abc\"': ERROR,
    '"abc': ERROR,
    '"a" + "b"': "ab",
    '""': "",
    '"a" < "b"': True,
    "nope": ERROR,
    "nope(1)": ERROR,
    "1 / a": ERROR,
    "1 % a": ERROR,
    "a ** -1": ERROR,
    '"a" - 1': ERROR,
    'abs("a")': ERROR,
    "min(1)": ERROR,
    "-t": ERROR,
    "2.5 ** 100000": ERROR,
    "1 2": ERROR,
    "(1))": ERROR,
    "((1)": ERROR,
    "3 +": ERROR,
    "": ERROR,
    "  ": ERROR,
    "1.2.3": ERROR,
    "#": ERROR,
    "1 ? 2": ERROR,
    "min(1,)": ERROR,
    "1 ? 2 ? 3 : 4 : 5": 3,
    "0 ? 1 : 0 ? 2 : 3": 3,
    "1 ? 0 ? 6 : 7 : 8": 7,
    "sum()": 0,
    "len()": ERROR,
    "sum(1, 2, max(3, 4))": 7,
    "len(t) + len(\"\")": 4,
    ".5 + .25": 0.75,
    "1e3": 1000.0,
    "2.5e-3 * 1000": 2.5,
    "1E+2": 100.0,
    "1.": 1.0,
    "2e": ERROR,
    "min(3, b, x1)": 2,
    "7 % 4": 3,
    "b >= 5 && b <= 5": True,
}
PROBE = """
import json, sys
sys.path.insert(0, "/app")
from calc.evaluate import evaluate
from calc.tokens import CalcError
sources, names = json.load(sys.stdin)
for source in sources:
    try:
        result = evaluate(source, dict(names))
    except Exception as error:
        result = "CalcError" if isinstance(error, CalcError) else "another: " + type(error).__name__
    print(json.dumps([type(result).__name__, result]))
"""


def same(found, expected):
    kind, value = found
    if kind != type(expected).__name__:
        return False
    return math.isclose(value, expected, rel_tol=1e-12) if kind == "float" else value == expected


def check():
    need("python3")
    sources = [read(path) for path in Path("/app/calc").glob("*.py")]
    require(sources, "/app/calc is gone")
    banned = [word for word in ("eval(", "exec(", "compile(") if any(bare_call(word, source) for source in sources)]
    require(not banned, f"uses {banned}")
    output, status = run("python3", "-B", "-c", PROBE, stdin=json.dumps([list(CASES), NAMES]))
    require(status == 0, f"the package does not run: {output[-300:]}")
    answers = output.splitlines()
    require(len(answers) == len(CASES), "the package prints something itself")
    for (source, expected), answer in zip(CASES.items(), answers, strict=True):
        try:
            found = json.loads(answer)
        except ValueError:
            found = ["?", None]
        require(isinstance(found, list) and len(found) == 2 and same(found, expected), f"{source!r} gives {answer[:200]}")


def bare_call(word, source):
    """Is the built-in function called, rather than something whose name ends the same or a method?"""
    start = -1
    while (start := source.find(word, start + 1)) >= 0:
        if start == 0 or not (source[start - 1].isalnum() or source[start - 1] in "_."):
            return True
    return False


main(check)
