"""ATIF read back: our own loses nothing, other agents' calls become commands only where that says the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compaction.atif import atif_trajectory
from compaction.atif_reading import trajectory_from_atif
from compaction.scaffolds import Action, load_scaffold
from compaction.trajectory import NotUsable, Said, Trajectory, trajectory_of
from tests.compaction.parts import play, replies, small_settings


def agent_step(
    message: str, *calls: tuple[str, dict[str, Any]], shown: str | None = "ok", **more: Any
) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": message, **more}
    if calls:
        step["tool_calls"] = [
            {"tool_call_id": str(i), "function_name": n, "arguments": a} for i, (n, a) in enumerate(calls)
        ]
    return step if shown is None else step | {"observation": {"results": [{"content": shown}]}}


def document(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    opening = [{"source": "system", "message": "s"}, {"source": "user", "message": "mend it"}]
    numbered = [{"step_id": i, **step} for i, step in enumerate([*opening, *steps], 1)]
    agent = {"name": "other", "version": "1"}
    return {"schema_version": "ATIF-v1.6", "session_id": "x", "agent": agent, "steps": numbered, **more}


def read(*steps: dict[str, Any], scaffold: str = "bash-block", **more: Any) -> Trajectory:
    return trajectory_from_atif(document(*steps, **more), "file", scaffold, 1.0)


@pytest.mark.parametrize("changes", [{}, {"keep_recent": 0}, {"cap": 0}, {"max_turns": 6}])
def test_our_own_says_the_same_as_the_rollout(renderer, changes: dict[str, Any]):
    script = replies(["cat a", "cat b", "echo 42 > answer"] * 5)
    rollout, _ = play(script, settings=small_settings(**changes), renderer=renderer)
    exported = json.loads(json.dumps(atif_trajectory(rollout, model_name="m")))
    assert trajectory_from_atif(exported, "file", "shell-line", None) == trajectory_of(rollout)


def test_a_shell_call_becomes_the_same_command_behind_the_same_words():
    command = "cat <<'E' > a.md\n```bash\nls\n```\nE"
    first = agent_step("I write it.", ("Bash", {"command": command, "description": "write"}))
    told = read(first, agent_step("", ("bash", {"command": "ls\n"})), agent_step("Done.", shown=None))
    scaffold = load_scaffold("bash-block")
    assert [scaffold.parse(turn.action, "stop") for turn in told.turns] == [
        Action("command", command),
        Action("command", "ls"),
        Action("finish"),
    ]
    assert told.turns[0].action.startswith("I write it.\n\n````bash\n")
    assert told.turns[2] == Said("Done.\n\n```bash\nexit\n```", None)
    assert (told.opening, told.reward, told.scaffold, told.compactions) == (("mend it",), 1.0, None, ())


def test_a_call_that_ends_the_work_is_the_scaffolds_end():
    told = read(agent_step("", ("bash", {"command": "ls"})), agent_step("Fine.", ("finish", {"message": "x"})))
    assert load_scaffold("bash-block").parse(told.turns[1].action, "stop").kind == "finish"


def run_of(turn: Said) -> list[tuple[str, ...]]:
    return [call.commands for call in turn.calls]


def test_for_a_student_that_calls_functions_a_shell_call_is_its_own():
    told = read(agent_step("I look.", ("Bash", {"command": "ls\npwd"})), agent_step("", shown="x"), scaffold="tools")
    assert (told.turns[0].action, told.turns[0].answers) == ("I look.", ("ok",))
    assert [(call.name, call.arguments) for call in told.turns[0].calls] == [
        ("execute_commands", {"commands": ["ls\npwd"]})
    ]


@pytest.mark.parametrize("last", [agent_step("Fine.", ("finish", {"message": "x"})), agent_step("Fine.", shown=None)])
def test_for_a_student_that_is_asked_back_the_end_is_said_twice(last: dict[str, Any]):
    told = read(agent_step("", ("bash", {"command": "ls"})), last, scaffold="tools")
    scaffold = load_scaffold("tools")
    first, second = (f'<tool_call>{{"name": "{turn.calls[0].name}"}}</tool_call>' for turn in told.turns[1:])
    assert (told.turns[1].action, told.turns[1].answers) == ("Fine.", (scaffold.parse(first, "stop").calls[0].answer,))
    assert scaffold.parse(second, "stop").kind == "finish"
    assert told.turns[2].answers is None


@pytest.mark.parametrize(
    "results",
    [
        [{"content": "1"}, {"content": "2"}],
        [{"source_call_id": "1", "content": "2"}, {"source_call_id": "0", "content": "1"}],
    ],
)
def test_several_calls_of_a_step_keep_each_its_own_answer(results: list[dict[str, Any]]):
    step = agent_step("", ("bash", {"command": "a"}), ("bash", {"command": "b"}), shown=None)
    told = read(step | {"observation": {"results": results}}, agent_step("", shown=None), scaffold="tools")
    assert (run_of(told.turns[0]), told.turns[0].answers) == ([("a",), ("b",)], ("1", "2"))


@pytest.mark.parametrize(
    "results",
    [
        [{"content": "1 2"}],
        [{"source_call_id": "7", "content": "1"}] * 2,
        [{"source_call_id": "1", "content": "2"}, {"content": "1"}],
        [{"source_call_id": "1", "content": "2"}],
    ],
)
def test_answers_that_cannot_be_told_apart_are_refused(results: list[dict[str, Any]]):
    step = agent_step("", ("bash", {"command": "a"}), ("bash", {"command": "b"}), shown=None)
    with pytest.raises(NotUsable, match="cannot be told apart"):
        read(step | {"observation": {"results": results}}, scaffold="tools")


def test_an_answer_that_stands_as_a_message_belongs_to_its_call():
    work = agent_step("I look.", ("bash", {"command": "ls"}), shown=None)
    told = read(work, {"source": "user", "message": "x"}, agent_step("", shown=None), scaffold="tools")
    assert (run_of(told.turns[0]), told.turns[0].answers) == ([("ls",)], ("x",))
    two = agent_step("", ("bash", {"command": "a"}), ("bash", {"command": "b"}), shown=None)
    with pytest.raises(NotUsable, match="cannot be told apart"):
        read(two, {"source": "user", "message": "x"}, scaffold="tools")


@pytest.mark.parametrize("scaffold", ["bash-block", "tools"])
def test_half_a_character_is_refused(scaffold: str):
    for step in (
        agent_step("", ("bash", {"command": "echo \ud83d"})),
        agent_step("\ud83d"),
        agent_step("", shown="\ud83d"),
    ):
        with pytest.raises(NotUsable, match="does not keep to ATIF: UnicodeEncodeError"):
            read(step, agent_step("ls"), scaffold=scaffold)


def test_nothing_is_made_up_behind_a_last_step_whose_answers_are_missing():
    told = read(agent_step("", ("bash", {"command": "a"}), ("finish", {}), shown=None), scaffold="tools")
    assert [(run_of(turn), turn.answers) for turn in told.turns] == [([("a",), ()], None)]


def test_a_copied_end_is_copied_as_a_whole():
    told = read(agent_step("", ("finish", {}), is_copied_context=True), scaffold="tools")
    assert (len(told.turns), told.copied) == (2, 2)


def test_an_agent_that_writes_its_commands_as_text_is_kept_as_it_is():
    reply = "so\n```bash\nls\n```"
    told = read(agent_step(reply, shown=None), {"source": "user", "message": "a b"}, agent_step(reply))
    assert told.turns == (Said(reply, ("a b",)), Said(reply, ("ok",)))


def test_turns_copied_from_another_trajectory_are_counted():
    told = read(agent_step("ls", is_copied_context=True), agent_step("pwd"), scaffold="shell-line")
    assert told.copied == 1


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([agent_step("", ("bash", {"command": "ls"}), ("bash", {"command": "ls"}))], "a step holds several tool calls"),
        ([agent_step("", ("edit", {"path": "a", "text": "b"}))], "a tool call is no shell command"),
        ([agent_step("", ("bash", {"command": "ls", "timeout": 3}))], "a tool call is no shell command"),
        ([agent_step([{"type": "image", "source": {}}])], "it holds more than text"),  # type: ignore[arg-type]
        ([agent_step("ls"), {"source": "user", "message": "no"}], "a message stands between its turns"),
        ([agent_step("ls"), agent_step("ls", is_copied_context=True)], "turns copied from another trajectory"),
        ([{"source": "agent"}], "it does not keep to ATIF"),
    ],
)
def test_what_cannot_be_told_faithfully_is_refused_with_the_reason(steps: list[dict[str, Any]], reason: str):
    with pytest.raises(NotUsable) as caught:
        read(*steps)
    assert caught.value.reason.startswith(reason)


def test_a_call_that_the_scaffold_cannot_hold_is_refused():
    with pytest.raises(NotUsable, match="cannot be written for scaffold shell-line: ls"):
        read(agent_step("I look.", ("bash", {"command": "ls"})), scaffold="shell-line")
    plain = read(agent_step("", ("bash", {"command": "ls"})), scaffold="shell-line")
    assert plain.turns[0].action == "ls"


@pytest.mark.parametrize("other", [[], {"schema_version": "2"}, {"schema_version": "ATIF-v1.8"}, None])
def test_another_kind_of_file_is_none(other: Any):
    with pytest.raises(NotUsable, match="ATIF"):
        trajectory_from_atif(other, "file", "bash-block", None)
