from __future__ import annotations

import pytest

from compaction.protocols import Execution
from compaction.scaffolds import Action, load_scaffold


@pytest.fixture
def shell_line():
    return load_scaffold("shell-line")


def test_the_whole_reply_is_the_command(shell_line):
    assert shell_line.parse("  cat a | grep b \n", "stop") == Action("command", "cat a | grep b")


def test_exit_ends_the_rollout(shell_line):
    assert shell_line.parse("exit\n", "stop").kind == "finish"


@pytest.mark.parametrize(
    ("reply", "finish"), [("", "stop"), ("  \n", "stop"), ("cat a\ncat b", "stop"), ("exit", "length")]
)
def test_a_malformed_reply_runs_nothing_and_is_told_why(shell_line, reply: str, finish: str):
    action = shell_line.parse(reply, finish)
    assert action.kind == "malformed"
    assert action.text.strip()


@pytest.mark.parametrize(("text", "expected"), [("cat a", True), ("exit", True), ("out cat a", False), ("", False)])
def test_a_command_is_recognised_as_an_action(shell_line, text: str, expected: bool):
    assert shell_line.is_action(text) is expected


def test_an_observation_is_the_output_without_its_last_newline(shell_line):
    assert shell_line.observation(Execution("a\n\nb\n")) == "a\n\nb"
    assert shell_line.observation(Execution("")) == ""


def test_an_unknown_scaffold_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'shel-line' is unknown; choose one of: bash-block, shell-line, tools"):
        load_scaffold("shel-line")


@pytest.fixture
def bash_block():
    return load_scaffold("bash-block")


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("I look first.\n\n```bash\nls -la\n```\n", "ls -la"),
        ("```sh\ncd /app\nmake\n```\nThat builds it.", "cd /app\nmake"),
        ("```\nls\n```", "ls"),
        ("As in\n```python\nprint(1)\n```\nso\n```bash\npython3 a.py\n```", "python3 a.py"),
        ("````bash\ncat > a.md <<'E'\n```\ncode\n```\nE\n````", "cat > a.md <<'E'\n```\ncode\n```\nE"),
        ("```bash\r\nls\r\n```\r\n", "ls"),
        ("~~~bash\nls\n~~~", "ls"),
        ("```bash\n  indented\n```", "  indented"),
    ],
)
def test_the_one_shell_block_is_the_command(bash_block, reply: str, command: str):
    assert bash_block.parse(reply, "stop") == Action("command", command)


def test_a_block_of_nothing_but_exit_ends_the_rollout(bash_block):
    assert bash_block.parse("All done.\n```bash\nexit\n```", "stop").kind == "finish"
    assert bash_block.parse("```bash\nexit 1\n```", "stop") == Action("command", "exit 1")


@pytest.mark.parametrize(
    ("reply", "finish", "why"),
    [
        ("", "stop", "it is empty"),
        ("I would run ls.", "stop", "no command"),
        ("```bash\nls", "stop", "not closed"),
        ("```bash\nls\n```\n```bash\npwd\n```", "stop", "holds 2 commands"),
        ("```bash\n\n```", "stop", "is empty"),
        ("```python\nprint(1)\n```", "stop", "no command"),
        ("```bash\nls\n```", "length", "cut off"),
    ],
)
def test_a_reply_without_one_whole_command_is_answered_with_why_and_how(bash_block, reply: str, finish: str, why: str):
    action = bash_block.parse(reply, finish)
    assert action.kind == "malformed"
    assert why in action.text
    assert "Nothing was run" in action.text
    assert "```bash" in action.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I go on.\n```bash\nls\n```\n", True),
        ("<summary>9. Next step: ```bash\nls\n```\nthen read it</summary>", False),
        ("<summary>\n```bash\nls\n```\n</summary>", False),
        ("no block", False),
    ],
)
def test_a_text_that_ends_with_a_command_is_an_action(bash_block, text: str, expected: bool):
    assert bash_block.is_action(text) is expected


def test_an_observation_names_exit_code_and_what_happened(bash_block):
    assert bash_block.observation(Execution("a\n\nb\n", 2)) == "[exit code 2]\na\n\nb"
    assert bash_block.observation(Execution("", 137, "stopped after 120 s")) == (
        "[exit code 137 · stopped after 120 s, no output]"
    )
