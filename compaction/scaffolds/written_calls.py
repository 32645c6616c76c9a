"""Function calls as models write them: Hermes and Qwen, GLM, Llama, and the fields of an endpoint's reply."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compaction.protocols import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_BARE = re.compile(r"^[ \t]*(?:<\|python_tag\|>\s*)?(?=\{\s*\"(?:name|type)\")", re.MULTILINE)
"""Where a bare call may begin: an object at the start of a line, as Llama's are"""
_JSON = json.JSONDecoder(strict=False)  # a line break inside a string is what was meant


@dataclass(frozen=True)
class WrittenCall:
    """A call as it was written: its name and arguments, or what is wrong with its form."""

    name: str
    arguments: Any = None
    fault: str | None = None
    id: str = ""
    """Where it has one of its own"""


def written_calls(text: str) -> list[WrittenCall]:
    """The calls in a reply's text, in order. A malformed one is among them, with its fault."""
    bare, start, end = _bare(text)
    return _tagged(text) if _has_tag(text, start, end) else bare


def ends_with_call(text: str) -> bool:
    """Whether a text ends in calls. One that quotes a call goes on behind it."""
    bare, start, end = _bare(text)
    if _has_tag(text, start, end):
        return not text[text.rindex(_OPEN) :].partition(_CLOSE)[2].strip()
    return bool(bare) and (text[end:].startswith("{") or not text[end:].strip())


def endpoint_calls(tool_calls: Sequence[ToolCall]) -> list[WrittenCall]:
    """The calls that an endpoint gives beside the text."""
    out = []
    for call in tool_calls:
        arguments, fault = _decoded(call.arguments)
        out.append(WrittenCall(call.name, arguments, fault, call.id))
    return out


def _has_tag(text: str, start: int, end: int) -> bool:
    """Whether a tag stands outside the bare calls, whose strings may hold one."""
    return _OPEN in text[:start] or _OPEN in text[end:]


def _tagged(text: str) -> list[WrittenCall]:
    out = []
    at = text.find(_OPEN)
    while at >= 0:
        start = at + len(_OPEN)
        call, end = _json_call(text, start) if text[start:].lstrip().startswith("{") else _glm_call(text, start)
        out.append(call)
        at = text.find(_OPEN, end)
    return out


def _json_call(text: str, start: int) -> tuple[WrittenCall, int]:
    """A Hermes call, and where it ends. The JSON itself says where: its strings may hold the closing tag."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        close = text.find(_CLOSE, start)
        return WrittenCall("", fault=_no_json(error)), close if close >= 0 else len(text)
    if not text[end:].lstrip().startswith(_CLOSE):
        return WrittenCall("", fault=f"its JSON is not followed by {_CLOSE}"), end
    return _of_object(value), end


def _glm_call(text: str, start: int) -> tuple[WrittenCall, int]:
    close = text.find(_CLOSE, start)
    if close < 0:
        return WrittenCall("", fault=f"it is not closed by {_CLOSE}"), len(text)
    name, tag, rest = text[start:close].partition("<arg_key>")
    rest = tag + rest
    arguments: dict[str, Any] = {}
    while (match := _GLM_ARGUMENT.match(rest)) is not None:
        arguments[match[1].strip()] = _value(match[2])
        rest = rest[match.end() :]
    if rest.strip():
        fault = f"the arguments of {name.strip()!r} are not pairs of <arg_key> and <arg_value>: {_shown(rest)}"
        return WrittenCall(name.strip(), fault=fault), close
    if not re.fullmatch(r"[\w.-]+", name.strip()):
        return WrittenCall("", fault=f"{_shown(name)} is neither a JSON object nor a function's name"), close
    return WrittenCall(name.strip(), arguments), close


def _value(text: str) -> Any:
    """GLM writes strings as they are, everything else as JSON."""
    try:
        return _JSON.decode(text.strip())
    except (ValueError, RecursionError):
        return text


def _bare(text: str) -> tuple[list[WrittenCall], int, int]:
    """Bare JSON objects one after the other, parted by nothing, space or semicolons; and where they begin and end: in
    front of the last where that one cannot be read."""
    begun = _BARE.search(text)
    if begun is None:
        return [], 0, 0
    out: list[WrittenCall] = []
    at = begun.end()
    while text.startswith("{", at):
        try:
            value, end = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            out.append(WrittenCall("", fault=_no_json(error)))
            break
        out.append(_of_object(value))
        at = end + len(text[end:]) - len(text[end:].lstrip(" \t\r\n;,"))
    return out, begun.start(), at


def _of_object(value: Any) -> WrittenCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return WrittenCall("", fault=f'it needs "name" and "arguments", and {_shown(json.dumps(value))} lacks them')
    given = value.get("arguments", value.get("parameters"))
    arguments, fault = _decoded(given) if isinstance(given, str) else (given, None)
    return WrittenCall(value["name"], {} if arguments is None else arguments, fault)


def _decoded(arguments: str) -> tuple[Any, str | None]:
    if not arguments.strip():
        return {}, None
    try:
        return _JSON.decode(arguments), None
    except (ValueError, RecursionError) as error:
        return None, _no_json(error)


def _no_json(error: Exception) -> str:
    return f"its JSON cannot be read: {error}"


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 80 else text[:80] + "…")
