"""Messages to token ids through a chat template, each message once and on its own, and ids back to text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from compaction.chat_template import ChatTemplate, Frame, TemplateNotSupported
from compaction.protocols import CountSource, FinishReason, Tools

_OF_REPLIES = re.compile(r"</?(think|tool_call|arg_key|arg_value)>")
"""Tokens that stand in a well-formed reply, even where a tokenizer marks them special"""


class ChatTemplateRenderer:
    """Renders with a `transformers` tokenizer's chat template, message by message, replies as they were sampled.

    The text around a message's content comes from the template and may hold special tokens; the content is encoded
    apart, so that text in it that looks like a token of the template stays text.

    Raises TemplateNotSupported at construction where that cannot be done (see `ChatTemplate`), or where no token that
    ends a reply is known. `rewrites` says what the template itself would do to earlier messages, one sentence each.
    """

    def __init__(
        self,
        tokenizer: Any,
        count_source: CountSource = "exact",
        *,
        ends: Sequence[int] = (),
        thinking: bool | None = None,
    ) -> None:
        """`count_source`: "tokenizer" where the engine renders by itself and these ids only count for it.

        `ends`: tokens that end a reply beside the tokenizer's eos_token (a generation_config.json lists them).
        `thinking`: the template's enable_thinking; None leaves it to the template.
        """
        self.count_source: CountSource = count_source
        self._tokenizer, self._ends = tokenizer, tuple(ends)
        if not tokenizer.chat_template or tokenizer.eos_token_id is None:
            raise TemplateNotSupported("the tokenizer needs a chat template and an eos_token; set both in its folder")
        self._template = ChatTemplate(tokenizer, thinking)
        self.rewrites = self._template.rewrites
        self.takes_tools, self.takes_results = self._template.takes_tools, self._template.results is not None
        self.opens_thinking: bool | None = self._template.generation_prompt.rstrip().endswith("<think>")
        self.special_ids = _special_ids(tokenizer)
        self._reply = _backend(tokenizer)
        self._content = _backend(tokenizer, _markup(tokenizer))
        self._controls: dict[str, list[int]] = {}
        self.generation_prompt = tuple(self._control(self._template.generation_prompt))
        self.end_ids, self._closing = self._reply_end()
        self._variants = {thinking: self}

    def with_thinking(self, thinking: bool | None) -> ChatTemplateRenderer:
        if thinking not in self._variants:
            made = ChatTemplateRenderer(self._tokenizer, self.count_source, ends=self._ends, thinking=thinking)
            self._variants[thinking] = made
        return self._variants[thinking]

    def message(self, role: Literal["system", "user"], text: str, tools: Tools = ()) -> list[int]:
        return self._rendered(self._template.system(tools) if role == "system" else self._template.user, text)

    def results(self, texts: Sequence[str]) -> list[int]:
        if self._template.results is None:
            raise ValueError("the chat template has no messages of role tool; give results as a user message")
        return self._rendered(self._template.results, *texts)

    def calling(self, said: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str | None:
        """A reply that says something and then makes these calls (name, arguments), in the model's own form; None where
        the template has none for them."""
        written = self._template.calling(said, calls)
        return written if said or written is None else written.lstrip("\n")

    def close(self, sampled: Sequence[int] | np.ndarray, finish_reason: FinishReason) -> list[int]:
        return list(self._closing[1:] if self._ended(sampled) else self._closing)

    def follow(
        self, sampled: Sequence[int] | np.ndarray, finish_reason: FinishReason, message: Sequence[int]
    ) -> list[int]:
        closing = self.close(sampled, finish_reason)
        is_open = not closing and self._ended(sampled) and int(sampled[-1]) == message[0]
        return [*closing, *(message[1:] if is_open else message)]

    def encode(self, text: str) -> list[int]:
        return list(self._reply.encode(text, add_special_tokens=False).ids) if text else []

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        kept = [int(i) for i in (token_ids[:-1] if self._ended(token_ids) else token_ids)]
        return str(self._reply.decode(kept, skip_special_tokens=False))

    def _ended(self, sampled: Sequence[int] | np.ndarray) -> bool:
        return len(sampled) > 0 and int(sampled[-1]) in self.end_ids

    def _rendered(self, frame: Frame, *contents: str) -> list[int]:
        out = list(self._control(frame.before))
        for number, content in enumerate(contents):
            written = frame.written(content)
            out += self._control(frame.between) if number else []
            out += self._content.encode(written, add_special_tokens=False).ids if written else []
        return out + self._control(frame.after)

    def _control(self, text: str) -> list[int]:
        """Ids of text that is the template's own."""
        if text not in self._controls:
            self._controls[text] = list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []
        return self._controls[text]

    def _reply_end(self) -> tuple[tuple[int, ...], list[int]]:
        """(tokens that end a reply, the template's own first; what closes a reply that was cut).

        Templates like GLM's put nothing behind a reply: there the model ends it with what opens the next message, and
        the next message closes it.
        """
        ends = tuple(dict.fromkeys((int(self._tokenizer.eos_token_id), *self._ends)))
        tail = self._control(self._template.reply_end)
        own = next((i for i in tail if i in ends), None)
        closing = [] if own is None else tail[tail.index(own) :]
        if own is None and not tail:
            opener = self._control(self._template.user.before)[:1]
            own = next((i for i in opener if i in self._ends), None)
        if own is None:
            raise TemplateNotSupported(
                f"the template closes an assistant message with {self._template.reply_end!r}, which lacks the end "
                f"token {self._tokenizer.eos_token!r}; set eos_token to the token that ends a reply, or list it in "
                "generation_config.json as eos_token_id"
            )
        return (own, *(i for i in ends if i != own)), closing


def _special_ids(tokenizer: Any) -> frozenset[int]:
    marked = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    ids = {int(i) for i in (*tokenizer.all_special_ids, *marked)}
    return frozenset(i for i in ids if not _OF_REPLIES.fullmatch(tokenizer.convert_ids_to_tokens(i)))


def _markup(tokenizer: Any) -> frozenset[str]:
    """Tokens that are not special, but that the template writes: <tool_response>, for one."""
    source = str(tokenizer.chat_template)
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if not token.special)
    return frozenset(text for text in added if text in source)


def _backend(tokenizer: Any, as_text: frozenset[str] = frozenset()) -> Tokenizer:
    """The tokenizer's own backend, far faster than the wrapper, to which special tokens inside a text are text, and so
    are the tokens `as_text`."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in described["added_tokens"]:
        token["special"] = token["special"] or token["content"] in as_text
    backend = Tokenizer.from_str(json.dumps(described))
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def load_renderer(
    folder: str | Path, count_source: CountSource = "exact", *, thinking: bool | None = None
) -> ChatTemplateRenderer:
    """The renderer of a checkpoint folder's tokenizer. Raises FileNotFoundError naming a missing folder."""
    from transformers import AutoTokenizer  # not at import: the ground floor stays light

    if not Path(folder).is_dir():
        raise FileNotFoundError(f"checkpoint folder {folder} does not exist")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    return ChatTemplateRenderer(tokenizer, count_source, ends=_listed_ends(Path(folder)), thinking=thinking)


def _listed_ends(folder: Path) -> tuple[int, ...]:
    """End tokens as an engine finds them: those of the generation config, else of the config."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if ends is not None:
            return (ends,) if isinstance(ends, int) else tuple(ends)
    return ()
