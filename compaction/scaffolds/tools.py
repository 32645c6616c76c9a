"""Native tool calling: the model acts by calling functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compaction.protocols import Execution, FinishReason, ToolCall, Tools
from compaction.scaffolds.scaffold import Action, Call
from compaction.scaffolds.text import shell_observation
from compaction.scaffolds.written_calls import WrittenCall, endpoint_calls, ends_with_call, written_calls
from compaction.thinking import UNCLOSED

EXECUTE, COMPLETE = "execute_commands", "task_complete"

_ADVICE = (
    f'Call {EXECUTE} with {{"commands": ["your command"]}}, a list of shell commands that run in order; or {COMPLETE} '
    "with {} once everything is done."
)
VERIFY = (
    "You say that the task is complete. Check once more that everything that was asked for is done and works. If it "
    f"is, call {COMPLETE} again now, and nothing else; if not, go on working."
)
"""Answers the first call that says so"""


class NativeTools:
    """Two functions: `execute_commands` runs shell commands in order, `task_complete` ends the rollout.

    `task_complete` is asked back once: only a reply that calls it again right after, and nothing else, ends the
    rollout. One scaffold serves one rollout.
    """

    act = (
        f"In each reply, think briefly, then call\n{EXECUTE} with the shell commands to run next, and wait for their "
        "output."
    )
    finish = f"When the task is complete, call {COMPLETE}."
    tools: Tools = (
        {
            "type": "function",
            "function": {
                "name": EXECUTE,
                "description": "Runs shell commands in order and gives back what each of them printed.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "commands": {
                            "type": "array",
                            "items": {"type": "string"},
                            "description": "The commands. Each may hold several lines.",
                        }
                    },
                    "required": ["commands"],
                },
            },
        },
        {
            "type": "function",
            "function": {
                "name": COMPLETE,
                "description": "Says that the whole task is done. Asks back once before it counts.",
                "parameters": {"type": "object", "properties": {}},
            },
        },
    )

    def __init__(self) -> None:
        self._asked_back = False

    def parse(self, said: str | None, finish_reason: FinishReason, tool_calls: Sequence[ToolCall] = ()) -> Action:
        asked_back, self._asked_back = self._asked_back, False
        if finish_reason == "length":
            return Action("malformed", f"Your reply was cut off: it was too long. Nothing was run. {_ADVICE}")
        if said is None and not tool_calls:
            return Action("malformed", UNCLOSED)
        written = endpoint_calls(tool_calls) or written_calls(said or "")
        if not written:
            return Action("malformed", f"There is no call in your reply. Nothing was run. {_ADVICE}")
        calls = [_call(number, call) for number, call in enumerate(written, 1)]
        if any(call.answer is not None for call in calls):
            return Action("calls", calls=tuple(_not_run(call) for call in calls))
        completing = [call.name == COMPLETE for call in calls]
        if asked_back and all(completing):
            return Action("finish", calls=tuple(calls))
        self._asked_back = any(completing)
        return Action("calls", calls=tuple(replace(c, answer=VERIFY) if c.name == COMPLETE else c for c in calls))

    def is_action(self, text: str) -> bool:
        return ends_with_call(text)

    def observation(self, execution: Execution) -> str:
        return shell_observation(execution)


def definitions(tools: Tools) -> str:
    """The tools as a part of a system prompt, in the form that Hermes brought up, for templates that define none."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions. Their signatures stand within <tools></tools> tags:\n"
        f"<tools>\n{listed}\n</tools>\n\nFor each call, give a JSON object with the function's name and arguments "
        'within <tool_call></tool_call> tags:\n<tool_call>\n{"name": <function-name>, "arguments": <arguments>}\n'
        "</tool_call>"
    )


def _call(number: int, written: WrittenCall) -> Call:
    """A call with its commands, or with the fault that it is answered with."""
    arguments = written.arguments if isinstance(written.arguments, dict) else {}
    call = Call(written.id or f"call_{number}", written.name, arguments)
    fault = written.fault or _fault(written)
    if fault is not None:
        return replace(call, answer=f"This call could not be used: {fault}. Nothing was run. {_ADVICE}")
    return replace(call, commands=tuple(arguments.get("commands", ())))


def _fault(written: WrittenCall) -> str | None:
    """What is wrong with a call of whole form; None if nothing is."""
    name, arguments = written.name, written.arguments
    if name not in (EXECUTE, COMPLETE):
        return f"there is no function {name!r}, only {EXECUTE} and {COMPLETE}"
    if not isinstance(arguments, dict):
        return f"the arguments of {name} must be a JSON object, and are {_kind(arguments)}"
    known = {"commands"} if name == EXECUTE else set()
    if unknown := sorted(set(arguments) - known):
        return f"{name} has no argument {unknown[0]!r}"
    if name == COMPLETE:
        return None
    if "commands" not in arguments:
        return f'{name} needs the argument "commands"'
    commands = arguments["commands"]
    if not isinstance(commands, list):
        return f'"commands" must be a list of strings, and is {_kind(commands)}'
    if not commands:
        return '"commands" is an empty list'
    other = [command for command in commands if not isinstance(command, str)]
    if other:
        return f'"commands" must hold strings only, and holds {_kind(other[0])}'
    return '"commands" holds an empty command' if any(not command.strip() for command in commands) else None


def _not_run(call: Call) -> Call:
    """A call beside a malformed one."""
    if call.answer is not None:
        return call
    return replace(call, commands=(), answer="Not run: another call of the same reply could not be used.")


_KINDS = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


def _kind(value: Any) -> str:
    named = _KINDS.get(type(value), "null")
    shown = json.dumps(value, ensure_ascii=False)
    return named if value is None else f"{named}: {shown if len(shown) <= 60 else shown[:60] + '…'}"
