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
    with pytest.raises(ValueError, match=r"'shel-line' is unknown; choose one of: shell-line"):
        load_scaffold("shel-line")
