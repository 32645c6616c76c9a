"""Both branches must be in main, and main must do what both wanted."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: nothing there may stand for Python's own modules
import json  # noqa: E402
import tempfile  # noqa: E402

from grading import Wrong, git, main, need, require, run  # noqa: E402

REPOSITORY = "/app/shop"
TIPS = {"main": "21d504fd343655619f4d35f84398c198c5142216", "feature/weights": "d04b41928a8109ff7821e89f507688f86132fa9f"}
CHANGES = """\
- report shows amounts
- weighed goods
- report is called invoice now
- prices carry their currency
- first version
"""
PROBE = """
import json, sys
sys.path.insert(0, ".")
from shop.cart import line_total, total
from shop.invoice import invoice
from shop.labels import label
from shop.price import format_price
lines = [("Tea", 335, 3), ("Apples", 299, 1250, "g"), ("Cup", 1, 1)]
print(json.dumps([
    line_total(lines[1]), total(lines), total(lines, 5), total([("x", 110, 1)], 5), total([("x", 90, 1)], 5),
    total([("x", 10**17 + 1, 1)], 50), invoice(lines, "EUR", 5), invoice([], "CHF"), label(lines[1], "GBP"),
    format_price(-5, "EUR"),
]))
"""
EXPECTED = [
    374,
    1380,
    1330,
    104,
    85,
    50_000_000_000_000_000,
    "Tea              3 x    €10.05\nApples        1250 g     €3.74\nCup              1 x     €0.01\n"
    "total                   €13.30",
    "total                  Fr.0.00",
    "Apples 1250 g at £2.99/kg: £3.74",
    "-€0.05",
]


def check():
    need("git")
    for name, tip in TIPS.items():
        git(REPOSITORY, "merge-base", "--is-ancestor", tip, "refs/heads/main")
        require(git(REPOSITORY, "rev-parse", "refs/heads/main") != tip, f"main is still at the old {name}")
    require(git(REPOSITORY, "symbolic-ref", "HEAD") == "refs/heads/main", "main is not checked out")
    require(git(REPOSITORY, "status", "--porcelain", "--untracked-files=no") == "", "the working tree holds changes that are not committed")
    files = git(REPOSITORY, "ls-tree", "-r", "--name-only", "refs/heads/main").split("\n")
    require("shop/report.py" not in files, "shop/report.py is still there")
    require(git(REPOSITORY, "show", "refs/heads/main:CHANGES") == CHANGES.strip(), "CHANGES is not as expected")
    with tempfile.TemporaryDirectory() as folder:
        git(REPOSITORY, "worktree", "add", "--detach", "--force", f"{folder}/main", "refs/heads/main")
        output, status = run("python3", "-B", "-c", PROBE, cwd=f"{folder}/main")
    require(status == 0, f"the merged code fails: {output[-300:]}")
    try:
        answers = json.loads(output)
    except ValueError:
        raise Wrong("the merged code prints something itself") from None
    require(isinstance(answers, list) and len(answers) == len(EXPECTED), "the merged code prints something itself")
    for found, expected in zip(answers, EXPECTED, strict=True):
        require(found == expected, f"{found!r} instead of {expected!r}")


main(check)
