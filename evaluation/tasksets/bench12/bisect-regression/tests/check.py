"""The hash must be that of the first bad commit; main must hold a repair on top of all that was there."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: nothing there may stand for Python's own modules
import tempfile  # noqa: E402

from grading import git, lines, main, need, require, run  # noqa: E402

REPOSITORY = "/app/tally"
FIRST_BAD = "ec6b0cab3344d9d870ecb21ad56abe071a30f87b"
OLD_MAIN = "c7389718da83049d8328dbd6a7df62f6e5b25fc1"
CASES = {
    "59m 30s": "1h 00m",
    "119m 1s": "2h 00m",
    "2h 59m 59s": "3h 00m",
    "1h 1s": "1h 01m",
    "60m": "1h 00m",
    "": "0h 00m",
    "# lunch 1h\n\n2 bells\n30 secs": "1h 01m",
    "1 fortnight\n3 finals\n1 lap": "340h 32m",
}


def check():
    need("git")
    require(lines("/app/bad-commit.txt") == [FIRST_BAD], "bad-commit.txt names another commit")
    git(REPOSITORY, "merge-base", "--is-ancestor", OLD_MAIN, "refs/heads/main")
    require(git(REPOSITORY, "rev-parse", "refs/heads/main") != OLD_MAIN, "main holds no repair")
    with tempfile.TemporaryDirectory() as folder:
        git(REPOSITORY, "worktree", "add", "--detach", "--force", f"{folder}/main", "refs/heads/main")
        require(Path(folder, "main/tally/output.py").is_file(), "the module output is gone")
        for text, expected in CASES.items():
            Path(folder, "durations").write_text(text)
            output, status = run("python3", "-m", "tally", f"{folder}/durations", cwd=f"{folder}/main")
            require((output.strip(), status) == (expected, 0), f"{text!r} gives {output.strip()[-200:]!r}")
        output, _ = run("python3", "-m", "tally", "--seconds", f"{folder}/durations", cwd=f"{folder}/main")
        require(output.strip() == "1225895", f"--seconds gives {output.strip()[-200:]!r}")


main(check)
