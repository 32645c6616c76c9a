"""Every file that can be restored must be there with the content of the manifest, and nothing else."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: nothing there may stand for Python's own modules
import hashlib  # noqa: E402
import os  # noqa: E402

from grading import TESTS, Wrong, lines, main, require  # noqa: E402

RESTORED = Path("/app/restored")


def digest(path):
    try:
        require(path.is_file() and not path.is_symlink() and path.stat().st_size < 1_000_000, f"{path} is no small file")
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise Wrong(f"{path}: {error.strerror}") from None


def check():
    expected = dict(reversed(line.split("  ", 1)) for line in (TESTS / "restorable.sha256").read_text("utf-8").splitlines())
    found = {os.path.relpath(os.path.join(folder, name), RESTORED) for folder, _, names in os.walk(RESTORED) for name in names}
    require(found == set(expected), f"missing {sorted(set(expected) - found)}, too many {sorted(found - set(expected))}")
    for name, wanted in expected.items():
        require(digest(RESTORED / name) == wanted, f"{name} has the wrong content")
    require(lines("/app/missing.txt") == lines(TESTS / "missing.txt"), "missing.txt is not as expected")


main(check)
