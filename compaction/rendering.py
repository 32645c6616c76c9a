"""Messages to token ids through a chat template, each message once and on its own, and ids back to text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from compaction.protocols import FinishReason

_PROBE = "\u241f"
"""A symbol no template contains: marks where a message's content stands in the rendered template."""


class TemplateNotSupported(ValueError):
    """The chat template cannot be rendered message by message. The message says where it breaks."""


class ChatTemplateRenderer:
    """Renders with a `transformers` tokenizer's chat template, which must be append-only per message.

    The text around a message's content comes from the template and may hold special tokens; the content is encoded
    apart, with special tokens split, so that text that looks like a control token stays text.

    Raises TemplateNotSupported at construction when a message renders differently alone and after others.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._around = {role: self._frame(role) for role in ("system", "user", "assistant")}
        self._check_append_only()
        opened = self._template([{"role": "user", "content": _PROBE}], generation=True)
        closed = self._template([{"role": "user", "content": _PROBE}], generation=False)
        self.generation_prompt = tuple(self._control(opened[len(closed) :]))
        self.special_ids = frozenset(int(i) for i in tokenizer.all_special_ids)
        self._eos = int(tokenizer.eos_token_id)
        tail = self._around["assistant"][1]
        if self._eos not in tail:
            raise TemplateNotSupported(
                f"the template closes an assistant message with {tokenizer.decode(tail)!r}, which lacks the end token "
                f"{tokenizer.eos_token!r}; set eos_token to the token that ends a reply"
            )
        self._after_eos = tail[tail.index(self._eos) + 1 :]

    def message(self, role: Literal["system", "user"], text: str) -> list[int]:
        before, after = self._around[role]
        return [*before, *self.encode(text), *after]

    def close(self, sampled: Sequence[int], finish_reason: FinishReason) -> list[int]:
        ended = len(sampled) > 0 and int(sampled[-1]) == self._eos
        return list(self._after_eos) if ended else [self._eos, *self._after_eos]

    def encode(self, text: str) -> list[int]:
        if not text:
            return []
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        kept = [int(i) for i in token_ids]
        if kept and kept[-1] == self._eos:
            kept.pop()
        return str(self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _template(self, messages: list[dict[str, str]], generation: bool) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation))

    def _control(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _frame(self, role: str) -> tuple[list[int], list[int]]:
        """Ids before and after the content of one message of that role."""
        first = [] if role == "system" else [{"role": "system", "content": _PROBE}]
        if role == "assistant":
            first.append({"role": "user", "content": _PROBE})
        lead = self._template(first, generation=False) if first else ""
        whole = self._template([*first, {"role": role, "content": _PROBE}], generation=False)
        own = whole.removeprefix(lead)
        if not whole.startswith(lead) or own.count(_PROBE) != 1:
            raise TemplateNotSupported(f"the chat template rewrites earlier messages when a {role} message follows")
        before, after = own.split(_PROBE)
        return self._control(before), self._control(after)

    def _check_append_only(self) -> None:
        """A later turn must leave the rendering of earlier ones as it was."""
        turns: list[dict[str, str]] = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
        for content in ("c", "d"):
            before = self._template(turns, generation=False)
            turns += [{"role": "assistant", "content": content}, {"role": "user", "content": content}]
            if not self._template(turns, generation=False).startswith(before):
                raise TemplateNotSupported("the chat template changes the rendering of earlier turns")


def load_renderer(folder: str | Path) -> ChatTemplateRenderer:
    """The renderer of a checkpoint folder's tokenizer. Raises FileNotFoundError naming a missing folder."""
    from transformers import AutoTokenizer  # not at import: the ground floor stays light

    if not Path(folder).is_dir():
        raise FileNotFoundError(f"checkpoint folder {folder} does not exist")
    return ChatTemplateRenderer(AutoTokenizer.from_pretrained(str(folder)))
