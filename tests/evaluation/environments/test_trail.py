"""The in-process shell, held to dash with GNU tools command by command."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from compaction.protocols import Environment, EnvironmentFailure
from evaluation.environments.trail import TrailEnvironment

FILES = {"L1": " L2 R2 k3 flip", "R2": " L7 R8\n end a1\n", "log": "", "x.y": "no newline\nk3"}


def run(*commands: str, files: dict[str, str] = FILES) -> list[tuple[str, int]]:
    async def all_of_them() -> list[tuple[str, int]]:
        environment = TrailEnvironment(files, "done", ["k3", "a1"])
        await environment.start()
        executions = [await environment.execute(command) for command in commands]
        return [(e.output, e.exit_code) for e in executions]

    return asyncio.run(all_of_them())


def graded(*commands: str, answer: tuple[str, ...] = ("k3", "a1")) -> float:
    async def grade() -> float:
        environment = TrailEnvironment(FILES, "done", answer)
        await environment.start()
        for command in commands:
            await environment.execute(command)
        return await environment.grade()

    return asyncio.run(grade())


@pytest.mark.parametrize(
    ("command", "output", "exit_code"),
    [
        ("cat L1", " L2 R2 k3 flip", 0),
        ("cat L1 nope L1", " L2 R2 k3 flipcat: nope: No such file or directory\n L2 R2 k3 flip", 1),
        ("cat 'a b'", "cat: 'a b': No such file or directory\n", 1),
        ("cat .", "cat: .: Is a directory\n", 1),
        ("cat", "", 0),
        ("ls", "L1\nR2\nlog\nx.y\n", 0),
        ("ls nope", "ls: cannot access 'nope': No such file or directory\n", 2),
        ("grep k3 L1 x.y", "L1: L2 R2 k3 flip\nx.y:k3\n", 0),
        ("grep -n k3 x.y", "2:k3\n", 0),
        ("grep -l k3 L1 R2", "L1\n", 0),
        ("grep nope L1", "", 1),
        ("grep k3 nope", "grep: nope: No such file or directory\n", 2),
        ("echo k3  a1", "k3 a1\n", 0),
        ("echo 'k3  a1' \"b\"", "k3  a1 b\n", 0),
        ("echo -n k3", "k3", 0),
        ("echo 'a\\nb'", "a\nb\n", 0),
        ("echo a # not shown", "a\n", 0),
        ("foo bar", "sh: 1: foo: not found\n", 127),
        ("sed p L1", "sh: 1: sed: not found\n", 127),
        ("./L1", "sh: 1: ./L1: Permission denied\n", 126),
        ("echo 'a", "sh: 1: Syntax error: Unterminated quoted string\n", 2),
        ("echo a >", "sh: 1: Syntax error: end of file unexpected\n", 2),
        ("echo a > > b", "sh: 1: Syntax error: redirection unexpected\n", 2),
        ("echo a > q/x", "sh: 1: cannot create q/x: Directory nonexistent\n", 2),
        ("exit", "", 0),
        ("", "", 0),
    ],
)
def test_answers_as_a_posix_shell(command: str, output: str, exit_code: int) -> None:
    assert run(command) == [(output, exit_code)]


@pytest.mark.parametrize(
    "command",
    [
        "echo $HOME",
        "cat L1 | cat",
        "cat L*",
        "cat L1; ls",
        "cat < L1",
        "cd /",
        "X=1",
        "if true",
        "cat ~",
        "cat -n L1",
        "echo a 2> b",
        "echo a >& b",
        "grep 'a.b' L1",
        "cat L1 > b",
        "ls -l",
        "echo '\\0101' > L1",
        "cat 'a\\b\tc'",
        "grep -v '' L1",
        "echo a\nls",
        "echo \x00",
    ],
)
def test_what_is_not_supported_says_so_and_changes_nothing(command: str) -> None:
    (output, exit_code), listing, first = run(command, "ls", "cat L1")
    assert "not supported" in output
    assert exit_code == 2
    assert listing == ("L1\nR2\nlog\nx.y\n", 0)
    assert first == (FILES["L1"], 0)


def test_redirection_writes_empties_and_appends() -> None:
    *_, shown = run("echo k3>done", "echo a1 >> done", "cat done")
    assert shown == ("k3\na1\n", 0)
    *_, shown = run("echo old > done", "> done", "cat done")
    assert shown == ("", 0)
    *_, first, second = run("echo a > f > ./g", "cat f", "cat g")
    assert (first, second) == (("", 0), ("a\n", 0))


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "./../../etc/passwd"])
def test_the_host_is_out_of_reach(path: str) -> None:
    read, write = run(f"cat {path}", f"echo k3 > {path}")
    assert read == (f"cat: {path}: Permission denied\n", 1)
    assert write == (f"sh: 1: cannot create {path}: Permission denied\n", 2)


def test_the_grade_compares_the_words_of_the_out_file() -> None:
    assert graded("echo k3 a1 > done") == 1.0
    assert graded("echo k3 > done", "echo '  a1' >> done") == 1.0
    assert graded("echo a1 k3 > done") == 0.0
    assert graded("echo k3 a1 a1 > done") == 0.0
    assert graded("echo k3 a1 > log") == 0.0
    assert graded() == 0.0


def test_a_task_without_facts_still_wants_its_file() -> None:
    assert graded(answer=()) == 0.0
    assert graded("echo > done", answer=()) == 1.0


def test_rollouts_do_not_share_files() -> None:
    async def two() -> str:
        first, second = TrailEnvironment(FILES, "done", []), TrailEnvironment(FILES, "done", [])
        await first.start()
        await second.start()
        await first.execute("echo k3 > L1")
        return (await second.execute("cat L1")).output

    assert asyncio.run(two()) == FILES["L1"]


def test_it_must_be_started_and_takes_uploads() -> None:
    async def use() -> str:
        environment = TrailEnvironment(FILES, "done", [])
        assert isinstance(environment, Environment)
        with pytest.raises(EnvironmentFailure, match="call start"):
            await environment.execute("ls")
        await environment.start()
        await environment.upload("new", b"k3")
        with pytest.raises(EnvironmentFailure, match="/etc/new"):
            await environment.upload("/etc/new", b"k3")
        shown = (await environment.execute("cat new")).output
        await environment.stop()
        with pytest.raises(EnvironmentFailure, match="call start"):
            await environment.grade()
        return shown

    assert asyncio.run(use()) == "k3"


# --- differential: the same commands in a real shell ---------------------------------------------------------------

NAMES = ["L1", "R2", "log", "x.y", "nope", "./L1", "L1/", "L1/x", "q/x", ".", "./", "-", "", "a b", "it's", "a'b\"c"]
NAMES += ["a:b", "#x", "~x", "{", "a=b", "-n", "--", "!", "done", ".hid", "L1/."]
WORDS = [
    "k3",
    "a1",
    "-n",
    "",
    "it's",
    "\\n",
    "a\\tb",
    "x\\cy",
    "\\\\",
    "\\q",
    "é",
    "#",
    "a#b",
    "=",
    "a  b",
    '"',
    "!",
    "{}",
]


@st.composite
def spelled(draw: st.DrawFn, word: str) -> str:
    """One of the ways to write a word."""
    style = draw(st.sampled_from(["single", "double", "escaped", "plain"]))
    if style == "double":
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if style == "escaped" and word:
        return "".join(f"\\{c}" for c in word)
    if style == "plain" and word and all(c.isalnum() or c in "./-" for c in word):
        return word
    return "'" + word.replace("'", "'\\''") + "'"


blanks = st.sampled_from([" ", "  ", "\t"])
names = st.sampled_from(NAMES).flatmap(spelled)
texts = st.sampled_from(WORDS).flatmap(spelled)
redirects = st.builds("{}{}{}".format, st.sampled_from([">", ">>"]), st.sampled_from(["", " "]), names)
grep_flags = st.lists(st.sampled_from(["-l", "-n", "-c", "-i", "-v", "-w", "-ln", "-iv"]), max_size=2)
patterns = st.sampled_from(["k3", "K3", "k", " L", "flip", "a b", "it's", "", "end", "+", "]"]).flatmap(spelled)


def joined(*parts: list[str]) -> st.SearchStrategy[str]:
    words = [word for part in parts for word in part]
    return st.lists(blanks, min_size=len(words), max_size=len(words)).map(
        lambda gaps: "".join(word + gap for word, gap in zip(words, gaps, strict=True))
    )


few_names, few_texts, few_redirects = (st.lists(s, max_size=3) for s in (names, texts, redirects))
commands = st.one_of(
    few_names.flatmap(lambda n: joined(["cat"], n)),
    few_names.flatmap(lambda n: joined(["ls"], n)),
    st.tuples(grep_flags, patterns, few_names).flatmap(lambda t: joined(["grep"], t[0], [t[1]], t[2])),
    st.tuples(few_texts, few_redirects).flatmap(lambda t: joined(["echo"], t[0], t[1])),
    st.tuples(few_redirects, few_texts, names).flatmap(lambda t: joined(t[0], ["echo"], t[1], [">>", t[2]])),
    st.tuples(st.one_of(names, texts), few_texts, few_redirects).flatmap(lambda t: joined([t[0]], t[1], t[2])),
    st.text(alphabet="echo catL1'\"\\>#-=\t", max_size=16),
)


def real_shell() -> tuple[str, dict[str, str]]:
    """(dash, {tool: path}). On Linux both must be there; elsewhere the test is skipped."""
    found = {name: shutil.which(name) for name in ("dash", "cat", "ls", "grep")}
    gnu = found["cat"] and b"GNU" in subprocess.run([found["cat"], "--version"], capture_output=True).stdout
    if not gnu or not all(found.values()):
        if os.uname().sysname == "Linux":
            pytest.fail(f"dash and the GNU tools are needed for the differential test: {found}")
        pytest.skip("no dash with GNU tools")
    paths = {name: str(path) for name, path in found.items()}
    return paths.pop("dash"), paths


@seed(20240607)
@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(commands, min_size=1, max_size=8))
def test_outputs_exit_codes_and_files_equal_those_of_a_real_shell(lines: list[str]) -> None:
    dash, tools = real_shell()

    async def compare(folder: Path, bin_folder: Path) -> None:
        environment = TrailEnvironment(FILES, "done", [])
        await environment.start()
        for line in lines:
            ours = await environment.execute(line)
            if "not supported" in ours.output or "which word?" in ours.output:
                continue
            real = subprocess.run(
                ["sh", "-c", "--", line],
                executable=dash,
                cwd=folder,
                env={"PATH": str(bin_folder), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            assert (ours.output, ours.exit_code) == (real.stdout.decode(), real.returncode), line
        for path in folder.iterdir():
            assert (await environment.execute(f"cat './{_escaped(path.name)}'")).output == path.read_text(), path.name
        assert {p.name for p in folder.iterdir() if p.name[0] != "."} == set(
            (await environment.execute("ls")).output.splitlines()
        )

    with tempfile.TemporaryDirectory() as temporary:
        folder, bin_folder = Path(temporary, "work"), Path(temporary, "bin")
        folder.mkdir()
        bin_folder.mkdir()
        for name, content in FILES.items():
            (folder / name).write_text(content)
        for tool, path in tools.items():
            (bin_folder / tool).symlink_to(path)
        asyncio.run(compare(folder, bin_folder))


def _escaped(name: str) -> str:
    return name.replace("'", "'\\''")
