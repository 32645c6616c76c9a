"""Real families of chat models: their own templates, and how each model thinks, calls tools and ends a reply."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from compaction.rendering import ChatTemplateRenderer

DATA = Path(__file__).parents[1] / "data"
CONVERSATION: dict[str, Any] = json.loads((DATA / "conversation.json").read_text(encoding="utf-8"))
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "execute_commands",
            "description": "Runs shell commands.",
            "parameters": {
                "type": "object",
                "properties": {"commands": {"type": "array", "items": {"type": "string"}}},
                "required": ["commands"],
            },
        },
    },
)


@dataclass(frozen=True)
class Family:
    """What is known of a family beside its template."""

    template: str
    special: tuple[str, ...]
    markup: tuple[str, ...]
    """Tokens of their own that its tokenizer does not mark special"""
    eos: str
    listed: tuple[str, ...]
    """End tokens of its generation_config.json"""
    after_calls: str
    """The token it ends a reply with that calls tools"""
    after_text: str
    thought: Callable[[str], str]
    """How a reply begins that thinks first"""
    call: Callable[[dict[str, Any]], str]
    joint: str = "\n"
    """Between text and calls, and between calls"""
    bos: str | None = None

    @property
    def source(self) -> str:
        return (DATA / "templates" / self.template).read_text(encoding="utf-8")

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A small byte-level BPE tokenizer with the family's own tokens, added as its own files add them."""
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator([json.dumps(CONVERSATION), self.source] * 3, trainer)
        backend.add_special_tokens([AddedToken(token, special=True) for token in self.special])
        backend.add_tokens([AddedToken(token, special=False) for token in self.markup])
        made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=self.eos, bos_token=self.bos)
        made.chat_template = self.source
        return made

    def renderer(self, thinking: bool | None = None) -> ChatTemplateRenderer:
        tokenizer = self.tokenizer()
        ends = tokenizer.convert_tokens_to_ids(list(self.listed))
        return ChatTemplateRenderer(tokenizer, ends=ends, thinking=thinking)

    def reply(self, turn: dict[str, Any]) -> str:
        """What the model says in a turn, as it samples it."""
        parts = [turn["said"], *(self.call(c) for c in turn.get("calls", []))]
        return self.thought(turn["thinking"]) + self.joint.join(part for part in parts if part)

    def sampled(self, renderer: ChatTemplateRenderer, turn: dict[str, Any]) -> list[int]:
        """A turn's reply as ids, its end token last."""
        end = self.after_calls if turn.get("calls") else self.after_text
        return [*renderer.encode(self.reply(turn)), renderer._tokenizer.convert_tokens_to_ids(end)]


def _hermes(call: dict[str, Any]) -> str:
    said = f'{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"], ensure_ascii=False)}}}'
    return f"<tool_call>\n{said}\n</tool_call>"


def _glm(gap: str) -> Callable[[dict[str, Any]], str]:
    def written(call: dict[str, Any]) -> str:
        parts = [call["name"]]
        for name, value in call["arguments"].items():
            parts += [f"<arg_key>{name}</arg_key>", f"<arg_value>{json.dumps(value, ensure_ascii=False)}</arg_value>"]
        return "<tool_call>" + gap.join(parts) + gap + "</tool_call>"

    return written


def _llama(call: dict[str, Any]) -> str:
    return json.dumps({"name": call["name"], "parameters": call["arguments"]}, ensure_ascii=False)


_GLM_SPECIAL = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
                "/nothink")  # fmt: skip
_GLM_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
               "</arg_key>", "<arg_value>", "</arg_value>")  # fmt: skip
_GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")

FAMILIES = {
    "qwen3": Family(
        template="Qwen3-0.6B.jinja", special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), markup=_GLM_MARKUP[:6],
        eos="<|im_end|>", listed=("<|im_end|>", "<|endoftext|>"), after_calls="<|im_end|>", after_text="<|im_end|>",
        thought=lambda text: f"<think>\n{text}\n</think>\n\n", call=_hermes,
    ),
    "glm-4.6": Family(
        template="GLM-4.6.jinja", special=_GLM_SPECIAL, markup=_GLM_MARKUP, eos="<|endoftext|>", listed=_GLM_ENDS,
        after_calls="<|observation|>", after_text="<|user|>", thought=lambda text: f"\n<think>{text}</think>\n",
        call=_glm("\n"),
    ),
    "glm-4.7": Family(
        template="GLM-4.7-Flash.jinja", special=_GLM_SPECIAL, markup=_GLM_MARKUP, eos="<|endoftext|>",
        listed=_GLM_ENDS, after_calls="<|observation|>", after_text="<|user|>", thought=lambda text: f"{text}</think>",
        call=_glm(""), joint="",
    ),
    "llama-3.2": Family(
        template="Llama-3.2-layout.jinja",
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
                 "<|eot_id|>", "<|python_tag|>"),
        markup=(), eos="<|eot_id|>", listed=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), after_calls="<|eot_id|>",
        after_text="<|eot_id|>", thought=lambda text: "", call=_llama, bos="<|begin_of_text|>",
    ),
    "smollm2": Family(
        template="SmolLM2-135M-Instruct.jinja", special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), markup=(),
        eos="<|im_end|>", listed=("<|im_end|>",), after_calls="<|im_end|>", after_text="<|im_end|>",
        thought=lambda text: f"<think>{text}</think>", call=_hermes,
    ),
}  # fmt: skip
