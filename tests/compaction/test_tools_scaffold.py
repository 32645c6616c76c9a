"""Function calls as models write them, and what is answered to those that cannot be used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compaction.protocols import ToolCall
from compaction.scaffolds import Action, load_scaffold
from compaction.scaffolds.written_calls import written_calls
from tests.compaction.families import FAMILIES


def execute(arguments: Any) -> dict[str, Any]:
    return {"name": "execute_commands", "arguments": arguments}


LS = execute({"commands": ["ls"]})
DONE = {"name": "task_complete", "arguments": {}}
BARE = '{"name": "execute_commands", "parameters": {"commands": ["ls"]}}'
GLM = '<tool_call>execute_commands\n<arg_key>commands</arg_key>\n<arg_value>["ls"]</arg_value>\n</tool_call>'


def hermes(*calls: dict[str, Any], before: str = "") -> str:
    return before + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def parse(said: str | None, finish: str = "stop", *calls: ToolCall) -> Action:
    return load_scaffold("tools").parse(said, finish, calls)


def commands(action: Action) -> list[tuple[str, ...]]:
    return [call.commands for call in action.calls]


# What is understood


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (hermes(LS), [("ls",)]),
        (hermes(LS, before="I look first.\n"), [("ls",)]),
        (hermes(LS, execute({"commands": ["cd a", "pwd"]})), [("ls",), ("cd a", "pwd")]),
        ('<tool_call>{"name": "execute_commands", "parameters": {"commands": ["ls"]}}</tool_call>', [("ls",)]),
        ('<tool_call>{"name": "execute_commands", "arguments": "{\\"commands\\": [\\"ls\\"]}"}</tool_call>', [("ls",)]),
        ('<tool_call>{"name": "execute_commands", "arguments": {"commands": ["a\nb"]}}</tool_call>', [("a\nb",)]),
        (hermes(execute({"commands": ["grep '</tool_call>' a"]})), [("grep '</tool_call>' a",)]),
        (GLM, [("ls",)]),
        (GLM.replace("\n", ""), [("ls",)]),
        (BARE, [("ls",)]),
        (f"<|python_tag|>{BARE}", [("ls",)]),
        ('{"type": "function", "name": "execute_commands", "parameters": {"commands": ["ls"]}}', [("ls",)]),
        ('Now:\n{"name": "execute_commands", "parameters": {"commands": ["a"]}}; '
         '{"name": "execute_commands", "parameters": {"commands": ["b"]}}', [("a",), ("b",)]),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_form_of_every_family(said: str, expected: list[tuple[str, ...]]):
    action = parse(said)
    assert action.kind == "calls"
    assert commands(action) == expected
    assert [call.answer for call in action.calls] == [None] * len(expected)
    assert len({call.id for call in action.calls}) == len(expected)


@pytest.mark.parametrize("name", list(FAMILIES))
@example(lists=[["grep '<tool_call>' a"], ["ls"]])
@given(
    lists=st.lists(
        st.lists(st.text().filter(lambda t: t.strip() and "</" not in t), min_size=1), min_size=1, max_size=3
    )
)
def test_whatever_a_family_writes_is_read_as_it_was_meant(name: str, lists: list[list[str]]):
    written = [{"name": "execute_commands", "arguments": {"commands": commands}} for commands in lists]
    said = FAMILIES[name].joint.join(FAMILIES[name].call(call) for call in written)
    assert [call.arguments for call in written_calls(said)] == [call["arguments"] for call in written]
    assert commands(parse(said)) == [tuple(commands) for commands in lists]


@given(st.one_of(st.text(), st.lists(st.sampled_from(
    ["<tool_call>", "</tool_call>", "{", "}", '"name":', '"execute_commands"', "<arg_key>", "</arg_key>", "<arg_value>",
     "</arg_value>", "commands", '"commands": ["ls"]', ",", '"arguments": {', "[" * 3000, "\n", "null", "task_complete"]
)).map("".join)))  # fmt: skip
def test_any_reply_is_run_or_answered(said: str):
    action = parse(said)
    assert action.kind in ("calls", "malformed")
    assert action.text.strip() or action.calls
    for call in action.calls:
        assert (call.answer is None) == bool(call.commands)


# What is not


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("I would run ls.", "There is no call in your reply"),
        ("", "There is no call in your reply"),
        ('<tool_call>\n{"name": "execute_commands", "arguments": {\n</tool_call>', "JSON cannot be read"),
        (f"<tool_call>{BARE}", "not followed by </tool_call>"),
        ("<tool_call>task_complete", "not closed by </tool_call>"),
        ("<tool_call>run it now</tool_call>", "'run it now' is neither a JSON object nor a function's name"),
        ('<tool_call>{"function": "ls"}</tool_call>', 'needs "name" and "arguments"'),
        ("<tool_call>x<arg_key>commands</arg_key>[]</tool_call>", "not pairs of <arg_key> and <arg_value>"),
        (hermes({"name": "bash", "arguments": {}}), "no function 'bash', only execute_commands and task_complete"),
        (hermes(execute({})), 'needs the argument "commands"'),
        (hermes({"name": "execute_commands"}), 'needs the argument "commands"'),
        (hermes(execute({"commands": "ls"})), 'must be a list of strings, and is a string: "ls"'),
        (hermes(execute({"commands": ["ls", 1]})), "holds a number: 1"),
        (hermes(execute({"commands": [None]})), "holds null"),
        (hermes(execute({"commands": []})), "is an empty list"),
        (hermes(execute({"commands": [" "]})), "holds an empty command"),
        (hermes(execute({"commands": ["ls"], "timeout": 5})), "has no argument 'timeout'"),
        (hermes(execute(["ls"])), "must be a JSON object, and are a list"),
        (hermes({"name": "task_complete", "arguments": {"answer": 1}}), "task_complete has no argument 'answer'"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_answered_with_what_was_wrong_and_how_to_do_it_right(said: str, why: str):
    action = parse(said)
    told = action.text or action.calls[0].answer
    assert told is not None
    assert why in told
    assert "Nothing was run" in told
    assert 'Call execute_commands with {"commands": ["your command"]}' in told
    assert not any(commands(action))


def test_beside_a_malformed_call_no_other_is_run():
    action = parse(hermes(LS, {"name": "bash", "arguments": {}}, DONE))
    assert commands(action) == [(), (), ()]
    assert [(call.answer or "").split(":")[0] for call in action.calls] == [
        "Not run", "This call could not be used", "Not run"
    ]  # fmt: skip


def test_a_cut_reply_and_unclosed_thinking_run_nothing():
    assert parse(hermes(LS), "length").text.startswith("Your reply was cut off")
    assert "not closed by </think>" in parse(None).text


def test_the_calls_of_an_endpoint_are_read_from_its_fields():
    action = parse(
        "I look.", "stop", ToolCall("a1", "execute_commands", '{"commands": ["ls"]}'), ToolCall("a2", "x", "{")
    )
    assert [call.id for call in action.calls] == ["a1", "a2"]
    assert "JSON cannot be read" in (action.calls[1].answer or "")
    assert commands(parse("", "stop", ToolCall("a1", "execute_commands", '{"commands": ["ls"]}'))) == [("ls",)]
    assert commands(parse(None, "stop", ToolCall("a1", "task_complete", ""))) == [()]


# Ending


def test_the_first_task_complete_is_asked_back_and_the_next_one_ends_the_rollout():
    scaffold = load_scaffold("tools")
    first = scaffold.parse(hermes(DONE), "stop")
    assert first.kind == "calls"
    assert "call task_complete again now, and nothing else" in (first.calls[0].answer or "")
    assert scaffold.parse(hermes(DONE), "stop").kind == "finish"


@pytest.mark.parametrize(
    ("between", "finish"),
    [
        (hermes(LS), "stop"),
        ("I am sure.", "stop"),
        (hermes(DONE), "length"),
        (None, "stop"),
        (hermes(DONE, LS), "stop"),
        (hermes(LS, DONE), "stop"),
    ],
)
def test_anything_else_in_between_cancels_it(between: str | None, finish: str):
    scaffold = load_scaffold("tools")
    scaffold.parse(hermes(DONE), "stop")
    assert scaffold.parse(between, finish).kind != "finish"
    last = scaffold.parse(hermes(DONE), "stop")
    asked_again = between is not None and finish == "stop" and "task_complete" in between
    assert (last.kind == "finish") is asked_again


def test_two_calls_of_task_complete_in_one_reply_are_one():
    assert parse(hermes(DONE, DONE)).kind == "calls"


def test_commands_before_task_complete_are_run_and_it_is_asked_back():
    action = parse(hermes(LS, DONE))
    assert commands(action) == [("ls",), ()]
    assert [call.answer is None for call in action.calls] == [True, False]


# Summaries


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (hermes(LS), True),
        (hermes(LS, before="I go on.\n"), True),
        ("<tool_call>{", True),
        (BARE, True),
        (f"<summary>It ran\n{BARE}\nand that was it</summary>", False),
        ("<summary>task_complete is next</summary>", False),
        ("", False),
    ],
)  # fmt: skip
def test_a_text_that_ends_with_a_call_is_an_action(text: str, expected: bool):
    assert load_scaffold("tools").is_action(text) is expected
