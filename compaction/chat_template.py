"""A chat template taken apart into the text around each message's content, found by rendering probes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from jinja2 import TemplateError

from compaction.protocols import Tools

_PROBE = "\u241f"
"""A symbol no template contains: marks where a message's content stands in the rendered template"""
_AWKWARD = f' a{_PROBE}"\nB{_PROBE} '
"""A content that shows whether it is written as it is"""
_DAY = date(2024, 7, 26)
"""The day it always is, for templates that print it: the one they name themselves where none is given"""
_REPLY = f"{_PROBE}A"
"""A reply's content, told apart from the messages around it"""
_NO_ROLE = "toolish"
"""A word that no template knows"""
_SAMPLE: Tools = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    },
)


class TemplateNotSupported(ValueError):
    """The chat template cannot be rendered message by message. The message says where it breaks."""


def _as_it_is(text: str) -> str:
    return text


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_WAYS: tuple[Callable[[str], str], ...] = (_as_it_is, str.strip, _as_json)
"""How templates write a content"""


@dataclass(frozen=True)
class Frame:
    """The template's text around a message's content."""

    before: str
    after: str
    written: Callable[[str], str] = _as_it_is
    """The content as the template writes it: stripped, for one"""
    between: str = ""
    """What parts two contents of one message, where it may hold several (tool results)"""

    def around(self, *contents: str) -> str:
        return self.before + self.between.join(map(self.written, contents)) + self.after


class ChatTemplate:
    """The parts of a `transformers` tokenizer's chat template.

    System, user and tool messages are taken as the template writes them. Of an assistant message only what opens a
    reply (`generation_prompt`) and what ends it (`reply_end`) is: between them stands what was sampled. Where the
    template would write a reply differently later on, `rewrites` says so, and the reply stays as it was all the same.

    Raises TemplateNotSupported at construction where the template refuses a conversation of system, user and assistant
    messages, shows one of these contents not once, or writes it differently alone and among others.
    """

    def __init__(self, tokenizer: Any, thinking: bool | None = None) -> None:
        """`thinking`: the template's `enable_thinking`; None leaves it to the template."""
        self._tokenizer = tokenizer
        self._fixed: dict[str, Any] = {
            "date_string": _DAY.strftime("%d %b %Y"),
            "strftime_now": _DAY.strftime,
            "tools_in_user_message": False,  # a resumed window has another first user message
        }
        if thinking is not None:
            self._fixed["enable_thinking"] = thinking
        self._systems: dict[str, Frame] = {}
        system, self.user = self.system(), self._frame("user", [_message("system")])
        self._lead = [_message("system"), _message("user")]
        self.reply_end = self._reply_end()
        self.generation_prompt = self._generation_prompt()
        self._check_append_only(system)
        self.results = self._results()
        """Around the results of the tool calls of one reply; None where the template has no messages of role tool"""
        self.takes_tools = self._takes_tools()
        self.rewrites = tuple(self._rewrites(system))

    def system(self, tools: Tools = ()) -> Frame:
        """Around the system message, `tools` defined in it. Only for tools that the template takes."""
        key = json.dumps(tools)
        if key not in self._systems:
            self._systems[key] = self._frame("system", [], tools)
        return self._systems[key]

    def calling(self, said: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str | None:
        """A reply that says something and makes these calls (name, arguments), as the template writes it; None where
        it cannot."""
        made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
        try:
            whole = self._render([*self._lead, {**_message("assistant", _REPLY), "tool_calls": made}])
        except (TemplateNotSupported, TypeError):  # TypeError: arguments that it cannot work with
            return None
        opening = self._render(self._lead) + self.generation_prompt
        shown = whole.count(_REPLY)
        if shown > 1 or not whole.endswith(self.reply_end) or (not shown and not whole.startswith(opening)):
            return None
        whole = whole.removesuffix(self.reply_end)
        written = whole.partition(_REPLY)[2] if shown else "\n" + whole.removeprefix(opening)
        return said + written if written.strip() else None

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools = (), generation: bool = False, **own: Any
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=generation,
                    **{**self._fixed, **own},
                )
            )  # fmt: skip
        except TemplateError as error:
            roles = [m["role"] for m in messages]
            raise TemplateNotSupported(f"the chat template refuses messages of roles {roles}: {error}") from error

    def _frame(self, role: str, lead: list[dict[str, str]], tools: Tools = ()) -> Frame:
        before_it = self._render(lead, tools) if lead else ""

        def own(content: str) -> str:
            whole = self._render([*lead, _message(role, content)], tools)
            if not whole.startswith(before_it):
                raise TemplateNotSupported(f"the chat template rewrites earlier messages when a {role} message follows")
            return whole.removeprefix(before_it)

        return _framed(role, own)

    def _reply_end(self) -> str:
        whole = self._render([*self._lead, _message("assistant", _REPLY)])
        shown = whole.count(_REPLY)
        if shown != 1:
            raise TemplateNotSupported(f"the chat template shows the content of an assistant message {shown} times")
        return whole.partition(_REPLY)[2]

    def _generation_prompt(self) -> str:
        closed, opened = self._render(self._lead), self._render(self._lead, generation=True)
        if not opened.startswith(closed) or opened == closed:
            raise TemplateNotSupported("the chat template adds no generation prompt after the messages")
        return opened.removeprefix(closed)

    def _check_append_only(self, system: Frame) -> None:
        """Whatever becomes of replies, the messages around them are written as they are alone."""
        contents = [f"{_PROBE}{n}" for n in range(6)]
        messages = [
            _message(role, c) for role, c in zip(["system", *["user", "assistant"] * 3], contents, strict=False)
        ]
        expected = re.escape(system.around(contents[0]) + self.user.around(contents[1]))
        for reply, follow in ((2, 3), (4, 5)):
            own = contents[reply] + self.reply_end + self.user.around(contents[follow])
            expected += ".*?" + re.escape(own)
            shown = self._render(messages[: follow + 1], generation=True)
            if not re.fullmatch(expected + re.escape(self.generation_prompt), shown, re.DOTALL):
                raise TemplateNotSupported("the chat template renders earlier messages differently when others follow")

    def _results(self) -> Frame | None:
        """Around the results of a reply's tool calls; None where the template has no messages of role tool."""
        try:
            alone = _framed("tool", lambda content: self._behind_reply("tool", content))
            two = self._behind_reply("tool", f"{_PROBE}1", f"{_PROBE}2")
            between = two.partition(f"{_PROBE}1")[2].partition(f"{_PROBE}2")[0]
            frame = Frame(alone.before, alone.after, alone.written, between)
            three = [f"{_PROBE}{n}" for n in range(3)]
            if self._behind_reply("tool", *three) != frame.around(*three):
                return None
        except TemplateNotSupported:
            return None
        try:
            of_any_role = self._behind_reply(_NO_ROLE, _PROBE) == frame.around(_PROBE).replace("tool", _NO_ROLE)
        except TemplateNotSupported:
            of_any_role = False
        return None if of_any_role else frame  # what writes any role was never trained with one named tool

    def _behind_reply(self, role: str, *contents: str) -> str:
        """What the template writes behind a reply for messages of that role."""
        messages = [*self._lead, _message("assistant", _REPLY), *(_message(role, c) for c in contents)]
        _, found, behind = self._render(messages).partition(_REPLY + self.reply_end)
        if not found:
            raise TemplateNotSupported(f"the chat template ends a reply differently when a {role} message follows")
        return behind

    def _takes_tools(self) -> bool:
        """Whether the template defines tools in the system message, and nothing else changes by it."""
        try:
            frame = self.system(_SAMPLE)
        except TemplateNotSupported:
            return False
        shown = _SAMPLE[0]["function"]["name"] in frame.before + frame.after
        return shown and self._render(self._lead, _SAMPLE) == frame.around(_PROBE) + self.user.around(_PROBE)

    def _rewrites(self, system: Frame) -> Iterator[str]:
        """What the template does to earlier messages that per-message rendering leaves undone, one sentence each."""
        begun = system.around(_PROBE) + self.user.around(_PROBE)
        followed = [*self._lead, _message("assistant", f"<think>\n{_REPLY}\n</think>\n\nb"), _message("user")]
        if _REPLY not in self._render(followed):
            yield (
                "The template drops the thinking of replies before the last user message; here it stays in the window, "
                "as it was sampled."
            )
        replied = [*self._lead, _message("assistant", _REPLY)]
        appended = begun + self.generation_prompt + _REPLY + self.reply_end
        again = [(replied, appended), ([*replied, _message("user")], appended + self.user.around(_PROBE))]
        if any(self._render(messages) != text for messages, text in again):
            yield (
                "The template writes replies again in another form, an empty thinking block added or taken away; here "
                "they stay as they were sampled."
            )
        if self.takes_tools and self._render(self._lead, _SAMPLE) != self._as_of_itself():
            yield (
                "The template puts tool definitions into the first user message; here they stand in the system message."
            )
        if self._render(self._lead) != self._render(self._lead, date_string=_NO_ROLE, strftime_now=lambda _: _NO_ROLE):
            yield f"The template prints the day's date; here it is always {self._fixed['date_string']}."

    def _as_of_itself(self) -> str | None:
        """The sample tools and a task where the template puts them of itself; None where it refuses that."""
        try:
            return self._render(self._lead, _SAMPLE, tools_in_user_message=True)
        except TemplateNotSupported:
            return None


def _message(role: str, content: str = _PROBE) -> dict[str, str]:
    return {"role": role, "content": content}


def _framed(role: str, own: Callable[[str], str]) -> Frame:
    """The frame of a message whose own text, with a content in it, is `own(content)`."""
    shown = own(_PROBE)
    if shown.count(_PROBE) != 1:
        raise TemplateNotSupported(
            f"the chat template shows the content of a {role} message {shown.count(_PROBE)} times"
        )
    before, after = shown.split(_PROBE)
    awkward = own(_AWKWARD)
    for written in _WAYS:
        frame = Frame(before, after, written)
        if frame.around(_AWKWARD) == awkward:
            return frame
    raise TemplateNotSupported(f"the chat template changes the content of a {role} message: {awkward!r}")
