"""Grading: the task's tests run in the sandbox that the agent worked in, and the reward is what they write to a file.

The agent may have left processes, files and links behind in order to be the one who writes that file: its processes
are ended and its files removed first. Nothing but the file counts, not even the tests' exit code.
"""

from __future__ import annotations

import json
import logging
import math
import re
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

from compaction.protocols import InfrastructureError, VerifierError
from evaluation.environments.archives import pack_folder, regular_files, unpack
from evaluation.environments.output import ClippedOutput
from evaluation.environments.scripts import Ran, Script, Session
from evaluation.tasksets.task_folder import TaskFolder

log = logging.getLogger(__name__)

REWARD_LIMIT = 64_000
"""Bytes of a reward file"""
STDOUT_LIMIT = 1_000_000
"""Bytes kept of what the tests print: head and tail"""
EVIDENCE_LIMIT = 10_000_000
"""Bytes kept of each of /logs/agent and /logs/artifacts"""
_CLEANING_SECONDS = 60.0

_CLEAN = """\
for place in /tests /logs /logs/verifier; do
    [ ! -L $place ] || rm -f $place
    [ ! -d $place ] || chmod u+rwx $place
done
chmod -R u+rwx /tests /logs/verifier 2>/dev/null
rm -rf /tests /logs/verifier 2>/dev/null
mkdir -p /tests /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs/verifier || exit
for place in /tests /logs/verifier; do
    [ -z "$(ls -A $place)" ] || { echo "$place cannot be emptied"; exit 1; }
done
"""
"""Links go and are not followed. /tests may be a mount point: then what is in it goes."""

_BOOTSTRAP_FAILURES = re.compile(
    r"curl: \([56]\) Could not resolve"
    r"|curl: \((?:7|22|28|35|52|56|60|92)\) (?!.*(?:localhost|127\.0\.0\.1|0\.0\.0\.0|::1))"
    r"|wget: (?:unable to resolve|bad address)"
    r"|Temporary failure (?:resolving|in name resolution)"
    r"|^E: (?:Failed to fetch|Unable to fetch|Unable to locate package|Could not get lock)"
    r"|^error: (?:Failed to (?:fetch|download|install)|Request failed after)"
    r"|dns error: failed to lookup address"
    r"|^ERROR: (?:Could not find a version that satisfies|No matching distribution found)"
    r"|^npm (?:ERR!|error) (?:network|code E(?:NOTFOUND|AI_AGAIN|CONNREFUSED))",
    re.MULTILINE,
)
"""How curl, wget, apt, uv, pip and npm say that they got nothing; not about servers in the sandbox itself"""
_TESTS_BEGAN = re.compile(r"={3,} test session starts ={3,}")
"""From here on it is the tests that speak, and no longer their bootstrap"""


class GradedSandbox(Protocol):
    """What grading needs of a sandbox. All calls block and may raise EnvironmentFailure."""

    @property
    def shell(self) -> str: ...

    @property
    def workdir(self) -> str: ...

    def end_processes(self) -> None:
        """Ends everything that runs in the sandbox."""
        ...

    def run(self, script: Script) -> Ran: ...

    def put(self, archive: bytes) -> None:
        """Unpacks an archive at the root."""
        ...

    def get(self, path: str) -> Iterator[bytes]:
        """An archive of a file or folder. Raises FileNotFoundError."""
        ...


def grade(sandbox: GradedSandbox, folder: TaskFolder, evidence: Path | None) -> float:
    """Runs the task's tests and returns the reward; what they wrote is kept in `evidence`.

    Raises VerifierError where there is no reward, with the error class that says why.
    """
    if not (folder.path / "tests" / "test.sh").is_file():
        raise VerifierError(f"task {folder.name} has no tests/test.sh in {folder.path}")
    sandbox.end_processes()
    root = Session("/")
    cleaned = sandbox.run(Script(_CLEAN, root, _CLEANING_SECONDS, user="root"))
    if cleaned.exit_code or cleaned.timed_out:
        raise VerifierError(f"task {folder.name}: the sandbox cannot be prepared for grading: {cleaned.output[-500:]}")
    sandbox.put(pack_folder(folder.path / "tests", "tests"))
    tests = f"{sandbox.shell} /tests/test.sh >/logs/verifier/test-stdout.txt 2>&1"
    session = Session(sandbox.workdir)
    ran = sandbox.run(
        Script(tests, session, folder.verifier_timeout, environment=folder.verifier_env, user=folder.verifier_user)
    )
    files = _results(sandbox)
    if evidence is not None:
        _keep(sandbox, files, evidence)
    if ran.timed_out:
        raise VerifierError(
            f"task {folder.name}: tests/test.sh did not end within {folder.verifier_timeout:g} s "
            "([verifier] timeout_sec in task.toml)",
            "verifier_timeout",
        )
    stdout = files.get("test-stdout.txt", b"").decode("utf-8", "replace")
    return parse_reward(files.get("reward.json"), files.get("reward.txt"), stdout)


def parse_reward(json_bytes: bytes | None, txt_bytes: bytes | None, stdout: str) -> float:
    """The reward from the verifier's files, of which reward.json wins; None: there is no such file.

    Raises VerifierError with class reward_missing, reward_empty, reward_invalid or, where the tests' own tools could
    not be downloaded, verifier_bootstrap: some scripts write 0 then.
    """
    bootstrap = _BOOTSTRAP_FAILURES.search(_TESTS_BEGAN.split(stdout, maxsplit=1)[0])
    if json_bytes is None and txt_bytes is None:
        if bootstrap:
            raise _bootstrap_error(bootstrap, "no reward file")
        raise VerifierError(
            f"tests/test.sh wrote neither reward.json nor reward.txt to /logs/verifier; it printed: {_ending(stdout)}",
            "reward_missing",
        )
    reward = _from_json(json_bytes) if json_bytes is not None else _from_text(txt_bytes or b"")
    if not (math.isfinite(reward) and 0 <= reward <= 1):
        raise VerifierError(f"the verifier's reward is {reward!r}; a number from 0 to 1 is needed", "reward_invalid")
    if reward == 0 and bootstrap:
        raise _bootstrap_error(bootstrap, "reward 0")
    return reward


def _from_json(content: bytes) -> float:
    text = _content("reward.json", content)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise VerifierError(f"reward.json is no JSON: {text[:100]!r}", "reward_invalid") from None
    if isinstance(value, dict):
        if "reward" in value:
            value = value["reward"]
        elif len(value) == 1:
            value = next(iter(value.values()))
        else:
            raise VerifierError(
                f"reward.json has no key `reward` and not exactly one other: {text[:200]!r}", "reward_invalid"
            )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise VerifierError(f"the reward in reward.json is no number: {str(value)[:100]!r}", "reward_invalid")
    try:
        return float(value)
    except OverflowError:
        raise VerifierError("the reward in reward.json is too large for a number", "reward_invalid") from None


def _from_text(content: bytes) -> float:
    text = _content("reward.txt", content)
    try:
        return float(text)
    except ValueError:
        raise VerifierError(f"reward.txt holds no number: {text[:100]!r}", "reward_invalid") from None


def _content(name: str, content: bytes) -> str:
    if len(content) > REWARD_LIMIT:
        raise VerifierError(f"{name} is larger than {REWARD_LIMIT:,} bytes", "reward_invalid")
    text = content.decode("utf-8", "replace").strip()
    if not text:
        raise VerifierError(f"{name} is empty", "reward_empty")
    return text


def _bootstrap_error(found: re.Match[str], what: str) -> VerifierError:
    start, end = found.string.rfind("\n", 0, found.start()) + 1, found.string.find("\n", found.end())
    line = found.string[start : end if end >= 0 else None][:300]
    return VerifierError(
        f"{what}, and the tests could not download their own tools: {line!r}; check the sandbox's network",
        "verifier_bootstrap",
    )


def _ending(stdout: str) -> str:
    return repr(stdout.strip()[-300:]) if stdout.strip() else "nothing"


def _results(sandbox: GradedSandbox) -> dict[str, bytes]:
    """Reward files, cut one byte over the limit, and the tests' output, clipped."""
    files: dict[str, bytes] = {}
    try:
        with closing(regular_files(sandbox.get("/logs/verifier"))) as found:
            for path, _, content in found:
                if str(path) in ("reward.json", "reward.txt"):
                    files[str(path)] = content.read(REWARD_LIMIT + 1)
                elif str(path) == "test-stdout.txt":
                    clipped = ClippedOutput(STDOUT_LIMIT)
                    while chunk := content.read(1 << 16):
                        clipped.add(chunk)
                    files[str(path)] = clipped.bytes()
    except FileNotFoundError:
        pass
    except tarfile.TarError as error:
        raise VerifierError(f"what the verifier wrote cannot be read from the sandbox: {error}") from None
    return files


def _keep(sandbox: GradedSandbox, files: dict[str, bytes], evidence: Path) -> None:
    """A reward does not fail for its evidence."""
    try:
        (evidence / "verifier").mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (evidence / "verifier" / name).write_bytes(content)
        for name in ("agent", "artifacts"):
            unpack(sandbox.get(f"/logs/{name}"), evidence / name, EVIDENCE_LIMIT)
    except (OSError, tarfile.TarError, InfrastructureError) as error:
        log.warning("evidence in %s is incomplete: %s", evidence, error)
