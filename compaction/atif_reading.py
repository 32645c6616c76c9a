"""ATIF trajectories, ours and other agents', as texts to learn from (the format: see atif.py).

A compaction is known by our own mark. Other agents' trajectories are one window. Their structured tool calls become
commands or calls of the student's scaffold where that says the same, word for word; else the trajectory is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from compaction.rollout import CallRecord
from compaction.scaffolds import Action, load_scaffold
from compaction.scaffolds.tools import COMPLETE, EXECUTE, VERIFY
from compaction.trajectory import NotUsable, Said, Summarized, Trajectory, ended

SHELL_CALLS = frozenset({"bash", "bash_command", "execute_bash", "run_bash", "run_command", "sh", "shell"})
"""Names that agents give to a call that runs its argument `command` in a shell"""
FINISHING_CALLS = frozenset({"exit", "finish", "submit"})
REMARKS = frozenset({"description"})
"""Arguments that change nothing in what a call does"""


def is_atif(document: Any) -> bool:
    return isinstance(document, dict) and str(document.get("schema_version", "")).startswith("ATIF-")


def trajectory_from_atif(document: Any, name: str, scaffold: str, reward: float | None) -> Trajectory:
    """An ATIF root object as texts. `name` is for one without an id, `reward` for one that does not hold its own,
    `scaffold` the one that structured tool calls are written for.

    Raises NotUsable, also for an object that is no ATIF.
    """
    if not is_atif(document):
        raise NotUsable("it is no ATIF trajectory")
    try:
        return _trajectory(document, name, scaffold, reward)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotUsable("it does not keep to ATIF", f"{type(error).__name__}: {error}") from error


def _trajectory(document: dict[str, Any], name: str, scaffold: str, reward: float | None) -> Trajectory:
    agent = document["agent"]
    ours = (agent.get("extra") or {}).get("settings") if agent["name"] == "compactionrl" else None
    ending = ((document.get("final_metrics") or {}).get("extra") or {}) if ours else {}
    if ending.get("error_class") is not None:
        raise NotUsable("the trial failed and has no reward", str(ending["error_class"]))
    if ours and load_scaffold(ours["scaffold"]).tools:
        raise NotUsable(f"its calls are whole in the Parquet file alone: scaffold {ours['scaffold']}")
    if document.get("continued_trajectory_ref"):
        raise NotUsable("it goes on in another file", str(document["continued_trajectory_ref"]))
    steps = _Steps(document["steps"], scaffold)
    turns = tuple(steps.turns)
    return Trajectory(
        id=str(document.get("session_id") or document.get("trajectory_id") or name),
        task_id=str((document.get("extra") or {}).get("task_id") or name),
        opening=tuple(steps.opening),
        turns=ended(list(turns), ending.get("stop_reason")) if ours else turns,
        compactions=tuple(steps.compactions),
        copied=steps.copied,
        reward=ending["reward"] if ours else reward,
        scaffold=ours["scaffold"] if ours else None,
    )


class _Steps:
    """The steps, sorted into what they are."""

    def __init__(self, steps: list[dict[str, Any]], scaffold: str) -> None:
        self.opening: list[str] = []
        self.turns: list[Said] = []
        self.compactions: list[Summarized] = []
        self.copied = 0
        self._scaffold = scaffold
        self._structured = any(step.get("tool_calls") for step in steps)
        resumes = False
        for number, step in enumerate(steps):
            if resumes:  # our own resume message: the student's prompts write it again
                resumes = False
            elif step["source"] != "agent":
                self._told(step)
            elif mark := (step.get("extra") or {}).get("compaction"):
                resumes = mark["tokens_after"] is not None
                if resumes:
                    self.compactions.append(Summarized(len(self.turns), _text(step["message"]), mark["kept"]))
            else:
                self._acted(step, last=number == len(steps) - 1)
        if not self.opening:
            raise NotUsable("it holds no task message")

    def _told(self, step: dict[str, Any]) -> None:
        """The task, or what stands as the observation of the turn before. System prompts are the student's own."""
        text = _text(step["message"])
        if not self.turns and step["source"] == "user":
            self.opening.append(text)
        elif self.turns and self.turns[-1].answers is None:
            self.turns[-1] = _answered(self.turns[-1], text)
        elif self.turns:
            raise NotUsable("a message stands between its turns", text[:80])

    def _acted(self, step: dict[str, Any], *, last: bool) -> None:
        copied = bool(step.get("is_copied_context"))
        if copied and self.copied < len(self.turns):
            raise NotUsable("turns copied from another trajectory stand in its middle")
        self.turns += self._said(step, last)
        if copied:
            self.copied = len(self.turns)

    def _said(self, step: dict[str, Any], last: bool) -> list[Said]:
        results = (step.get("observation") or {}).get("results")
        message, commands = _text(step["message"]), self._commands(step, last)
        if commands and load_scaffold(self._scaffold).tools:
            return _called(message, commands, None if results is None else _by_call(step, commands, results))
        if len(commands) > 1:
            raise NotUsable("a step holds several tool calls", f"{len(commands)} in step {step['step_id']}")
        action = _written(message, commands[0], self._scaffold) if commands else message
        return [Said(action, None if results is None else (_joined(results),))]

    def _commands(self, step: dict[str, Any], last: bool) -> list[str | None]:
        """What a step's structured calls run, None being the end of the work; empty for a step of words alone."""
        if not self._structured:
            return []
        calls = step.get("tool_calls") or []
        return [_command(call, step["step_id"], last) for call in calls] or ([None] if last else [])


def _command(call: dict[str, Any], step_id: Any, last: bool) -> str | None:
    """The shell command of a call; None where it ends the work. Raises NotUsable for anything else, ValueError for half
    a character."""
    name, arguments = str(call["function_name"]), dict(call["arguments"])
    if last and name.lower() in FINISHING_CALLS:
        return None
    command = arguments.get("command")
    if isinstance(command, str):
        command.encode()
    known = {"command"} | REMARKS
    if name.lower() not in SHELL_CALLS or not isinstance(command, str) or not arguments.keys() <= known:
        raise NotUsable("a tool call is no shell command", f"{name}({', '.join(sorted(arguments))}) in step {step_id}")
    return command


def _by_call(step: dict[str, Any], commands: list[str | None], results: list[dict[str, Any]]) -> list[str]:
    """One answer for each call of a step. Raises NotUsable where they cannot be told apart, or one is missing."""
    calls = step.get("tool_calls") or []
    if len(calls) <= 1:
        return [_joined(results)]
    ids = [result.get("source_call_id") for result in results]
    if all(id is None for id in ids) and len(results) == len(calls):
        return [_text(result.get("content")) for result in results]
    named = [call["tool_call_id"] for call in calls]
    answered = {id for id, command in zip(named, commands, strict=True) if command is not None}
    if len(set(named)) < len(named) or not answered <= set(ids) <= set(named):
        raise NotUsable("results cannot be told apart by their calls", f"step {step['step_id']}")
    return [_joined([result for result in results if result["source_call_id"] == id]) for id in named]


def _answered(turn: Said, text: str) -> Said:
    """A turn whose answer stands in the message behind it."""
    if len(turn.calls) > 1:
        raise NotUsable("results cannot be told apart by their calls", text[:80])
    return replace(turn, answers=(text,), calls=tuple(replace(call, answer=text) for call in turn.calls))


def _called(message: str, commands: list[str | None], answers: list[str] | None) -> list[Said]:
    """A turn of scaffold `tools`; at the end of the work two, as that scaffold asks back there."""
    if commands == [None]:
        answers = [VERIFY]
    if answers is None:
        return [Said(message, None, tuple(_call(command, "") for command in commands))]
    given = [VERIFY if command is None else answer for command, answer in zip(commands, answers, strict=True)]
    turn = Said(message, tuple(given), tuple(map(_call, commands, given)))
    return [turn, Said("", None, (_call(None, ""),))] if None in commands else [turn]


def _call(command: str | None, answer: str) -> CallRecord:
    """`id` says nothing here: no endpoint gave it."""
    if command is None:
        return CallRecord("", COMPLETE, {}, (), answer)
    return CallRecord("", EXECUTE, {"commands": [command]}, (command,), answer)


def _joined(results: list[dict[str, Any]]) -> str:
    return "\n".join(_text(result.get("content")) for result in results)


def _written(message: str, command: str | None, scaffold: str) -> str:
    """A reply with that command (None: the end), which the scaffold reads as exactly that. Raises NotUsable."""
    wanted = Action("finish") if command is None else Action("command", command.strip("\n"))
    reader = load_scaffold(scaffold)
    for reply in _attempts(message, "exit" if command is None else wanted.text):
        if reader.parse(reply, "stop") == wanted:
            return reply
    raise NotUsable(f"a tool call cannot be written for scaffold {scaffold}", (command or "the end")[:80])


def _attempts(message: str, command: str) -> Iterator[str]:
    lead = f"{message}\n\n" if message.strip() else ""
    fence = "````" if re.search(r"^```", command, re.MULTILINE) else "```"
    yield f"{lead}{fence}bash\n{command}\n{fence}"
    if not lead:
        yield command


def _text(content: Any) -> str:
    """A message's or observation's text. Raises NotUsable for pictures, ValueError for half a character."""
    if content is None:
        return ""
    if isinstance(content, str):
        content.encode()
        return content
    if others := sorted({str(part["type"]) for part in content if part["type"] != "text"}):
        raise NotUsable("it holds more than text", ", ".join(others))
    return "".join(_text(part["text"]) for part in content)
