"""Messages to token ids through a chat template, each message once and on its own, and ids back to text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError
from tokenizers import Tokenizer

from compaction.protocols import CountSource, FinishReason

_PROBE = "\u241f"
"""A symbol no template contains: marks where a message's content stands in the rendered template."""


class TemplateNotSupported(ValueError):
    """The chat template cannot be rendered message by message. The message says where it breaks."""


class ChatTemplateRenderer:
    """Renders with a `transformers` tokenizer's chat template, which must be append-only per message.

    The text around a message's content comes from the template and may hold special tokens; the content is encoded
    apart, with special tokens split, so that text that looks like a control token stays text.

    Raises TemplateNotSupported at construction when the template refuses a conversation of system, user and assistant
    messages, or renders a message differently alone and among others.
    """

    def __init__(self, tokenizer: Any, count_source: CountSource = "exact") -> None:
        """`count_source`: "tokenizer" where the engine renders by itself and these ids only count for it."""
        self.count_source: CountSource = count_source
        self._tokenizer = tokenizer
        self._text = _as_plain_text(tokenizer)
        if not tokenizer.chat_template or tokenizer.eos_token_id is None:
            raise TemplateNotSupported("the tokenizer needs a chat template and an eos_token; set both in its folder")
        frames = {role: self._frame(role) for role in ("system", "user", "assistant")}
        self._check_append_only(frames)
        self._around = {role: (self._control(a), self._control(b)) for role, (a, b) in frames.items()}
        self.generation_prompt = tuple(self._control(self._opening()))
        marked = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.special_ids = frozenset(int(i) for i in (*tokenizer.all_special_ids, *marked))
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

    def close(self, sampled: Sequence[int] | np.ndarray, finish_reason: FinishReason) -> list[int]:
        ended = len(sampled) > 0 and int(sampled[-1]) == self._eos
        return list(self._after_eos) if ended else [self._eos, *self._after_eos]

    def encode(self, text: str) -> list[int]:
        if not text:
            return []
        return list(self._text.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        kept = [int(i) for i in token_ids]
        if kept and kept[-1] == self._eos:
            kept.pop()
        return str(self._text.decode(kept, skip_special_tokens=False))

    def _template(self, messages: list[dict[str, str]], generation: bool = False) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation))
        except TemplateError as error:
            roles = [m["role"] for m in messages]
            raise TemplateNotSupported(f"the chat template refuses messages of roles {roles}: {error}") from error

    def _control(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _opening(self) -> str:
        """The generation prompt's text."""
        asked = [{"role": "system", "content": _PROBE}, {"role": "user", "content": _PROBE}]
        closed, opened = self._template(asked), self._template(asked, generation=True)
        if not opened.startswith(closed) or opened == closed:
            raise TemplateNotSupported("the chat template adds no generation prompt after the messages")
        return opened.removeprefix(closed)

    def _frame(self, role: str) -> tuple[str, str]:
        """The template's text before and after the content of one message of that role."""
        first = [] if role == "system" else [{"role": "system", "content": _PROBE}]
        if role == "assistant":
            first.append({"role": "user", "content": _PROBE})
        lead = self._template(first) if first else ""
        whole = self._template([*first, {"role": role, "content": _PROBE}])
        own = whole.removeprefix(lead)
        if not whole.startswith(lead):
            raise TemplateNotSupported(f"the chat template rewrites earlier messages when a {role} message follows")
        if own.count(_PROBE) != 1:
            raise TemplateNotSupported(
                f"the chat template shows the content of a {role} message {own.count(_PROBE)} times"
            )
        before, after = own.split(_PROBE)
        return before, after

    def _check_append_only(self, frames: dict[str, tuple[str, str]]) -> None:
        """Later messages leave earlier ones as they were, and the frames put together are the whole conversation."""
        framed = {role: before + "b" + after for role, (before, after) in frames.items()}
        start, turn_end = framed["system"] + framed["user"], "b" + frames["assistant"][1] + framed["user"]
        messages = [{"role": "system", "content": "b"}, {"role": "user", "content": "b"}]
        rendered = self._template(messages)
        for _ in range(2):
            messages += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "b"}]
            longer = self._template(messages)
            if not longer.startswith(rendered) or not longer.startswith(start) or not longer.endswith(turn_end):
                raise TemplateNotSupported("the chat template renders earlier messages differently when others follow")
            rendered = longer


def _as_plain_text(tokenizer: Any) -> Tokenizer:
    """The tokenizer's own backend, to which special tokens inside a text are text; far faster than the wrapper."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def load_renderer(folder: str | Path, count_source: CountSource = "exact") -> ChatTemplateRenderer:
    """The renderer of a checkpoint folder's tokenizer. Raises FileNotFoundError naming a missing folder."""
    from transformers import AutoTokenizer  # not at import: the ground floor stays light

    if not Path(folder).is_dir():
        raise FileNotFoundError(f"checkpoint folder {folder} does not exist")
    return ChatTemplateRenderer(AutoTokenizer.from_pretrained(str(folder)), count_source)
