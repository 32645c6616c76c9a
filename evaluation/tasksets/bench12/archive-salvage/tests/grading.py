"""What the checks of bench12 share: the same file in every task.

A check runs isolated (python3 -I -S) and imports nothing that the agent wrote; such code runs in processes of its own.
Exit status 0: right, 10: wrong. Any other is a fault of the verifier, for which test.sh writes no reward.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
WRONG = 10
OUTPUT_BYTES = 1_000_000
FILE_BYTES = 50_000_000
END = time.monotonic() + 90
"""Below the verifier's timeout: what takes too long is wrong, and does not go without a grade"""


class Wrong(Exception):
    """What the agent left is not right; the message says what."""


def require(condition, message):
    if not condition:
        raise Wrong(message)


def need(*tools):
    """Ends with no reward where a tool of the verifier is missing."""
    for tool in tools:
        if shutil.which(tool) is None:
            print(f"{tool} is missing", file=sys.stderr)
            sys.exit(3)


def read(path, limit=1_000_000):
    """Text of a file that the agent was to write."""
    require(os.path.isfile(path), f"{path} is missing or no plain file")
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise Wrong(f"{path}: {error.strerror}") from None
    require(len(content) <= limit, f"{path} is larger than {limit} bytes")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise Wrong(f"{path} is not UTF-8") from None


def lines(path):
    """Lines of a file that the agent was to write, without trailing blanks and blank lines at the end."""
    return [line.rstrip() for line in read(path).rstrip().split("\n")]


def run(*command, cwd="/", stdin="", env=None):
    """Output (its beginning) and exit status of a command; all that it started ends with it."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
        given.write(stdin.encode())
        given.seek(0)
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "HOME": "/tmp", "LC_ALL": "C.UTF-8", **(env or {})},
            stdin=given,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=limit_files,
        )
        try:
            process.wait(max(0.1, END - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Wrong(f"{' '.join(map(str, command))[:80]}: takes too long") from None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        output.seek(0)
        return output.read(OUTPUT_BYTES).decode(errors="replace"), process.returncode


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))


def git(repository, *words):
    """Output of a git command in the agent's repository, whoever owns it. Wrong where git fails."""
    output, status = run(
        "git",
        *("-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null", "-C", repository),
        *words,
        env={"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_OPTIONAL_LOCKS": "0"},
    )
    require(status == 0, f"git {' '.join(words)}: {output.strip()[-300:]}")
    return output.strip()


def main(check):
    try:
        check()
    except Wrong as error:
        print(f"wrong: {error}".encode("ascii", "backslashreplace").decode())
        sys.exit(WRONG)
    print("right")
    sys.exit(0)
