"""One reply and what answers it, in all the forms that others want: ids, chat messages, records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from compaction.history import ids
from compaction.protocols import ChatMessage, Completion, Renderer, ToolCall
from compaction.rollout import CallRecord
from compaction.scaffolds import Action


@dataclass(frozen=True)
class Exchange:
    """A reply as text, as sampled and as parsed. It is answered by one text, or by one for each of its calls."""

    reply: str
    completion: Completion
    action: Action
    renderer: Renderer

    @property
    def by_role(self) -> bool:
        """Whether the answers are messages of role tool: never beside a reply whose calls an endpoint did not see."""
        seen = self.completion.text is None or bool(self.completion.tool_calls)
        return bool(self.action.calls) and self.renderer.takes_results and seen

    def follow(self, answers: Sequence[str]) -> list[int]:
        """Ids behind the sampled ones: what closes the reply, and its answers."""
        renderer, sampled = self.renderer, self.completion
        message = renderer.results(answers) if self.by_role else renderer.message("user", self._together(answers))
        return renderer.follow(sampled.token_ids, sampled.finish_reason, ids(message).tolist())

    def messages(self, answers: Sequence[str]) -> tuple[ChatMessage, ...]:
        """Reply and answers as chat messages."""
        reply: ChatMessage = {"role": "assistant", "content": self.reply}
        if self.completion.reasoning is not None:
            reply["reasoning_content"] = self.completion.reasoning
        if not self.by_role:
            return reply, {"role": "user", "content": self._together(answers)}
        if not self.completion.tool_calls:
            return (reply, *({"role": "tool", "content": answer} for answer in answers))
        reply["tool_calls"] = [_sent_back(call) for call in self.completion.tool_calls]
        named = zip(self.action.calls, answers, strict=True)
        return (reply, *({"role": "tool", "tool_call_id": call.id, "content": answer} for call, answer in named))

    def records(self, answers: Sequence[str]) -> tuple[CallRecord, ...]:
        """The reply's calls; without `answers`, as they stood when something ended the rollout."""
        given = answers if len(answers) == len(self.action.calls) else [""] * len(self.action.calls)
        return tuple(
            CallRecord(call.id, call.name, call.arguments, call.commands, answer)
            for call, answer in zip(self.action.calls, given, strict=True)
        )

    def _together(self, answers: Sequence[str]) -> str:
        if not self.action.calls:
            return "".join(answers)
        return "\n".join(f"<tool_response>\n{answer}\n</tool_response>" for answer in answers)


def _sent_back(call: ToolCall) -> ChatMessage:
    """A call as the endpoint gave it. Servers refuse arguments that are no JSON object, the model's own ones too."""
    try:
        whole = isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        whole = False
    arguments = call.arguments if whole else json.dumps({"malformed": call.arguments})
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
