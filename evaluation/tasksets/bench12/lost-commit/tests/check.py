"""The branch must be the very commit, and main one commit longer with the fix in it."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: nothing there may stand for Python's own modules
from grading import git, lines, main, need, require  # noqa: E402

REPOSITORY = "/app/kiosk"
PRICING = "9393de3c5fb4ecc441963d8030832e464cc81c78"
OLD_MAIN = "11a55cda538b05879b1ad17f5bfe5286a1fe298b"
FIXED_TREE = "37286685394725f20fecae88fb952f400f2ad62f"


def check():
    need("git")
    require(git(REPOSITORY, "rev-parse", "refs/heads/pricing") == PRICING, "pricing points at another commit")
    git(REPOSITORY, "fsck", "--no-dangling", "--no-reflogs", PRICING)
    require(git(REPOSITORY, "rev-parse", "refs/heads/main^") == OLD_MAIN, "main is not one commit longer")
    require(git(REPOSITORY, "rev-parse", "refs/heads/main^{tree}") == FIXED_TREE, "main does not hold just the fix")
    require(lines("/app/pricing.txt") == [PRICING], "pricing.txt names another commit")


main(check)
