"""Prompt packs, and what counts as a summary."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import yaml
from pydantic import Field, field_validator

from compaction.protocols import FinishReason
from compaction.scaffolds import Scaffold
from compaction.settings import Settings

TOOL_CALL = re.compile(r"<tool_call>|<function=|<\|tool|\A\s*\{.*\"tool_calls\"", re.IGNORECASE | re.DOTALL)
ROLE_PLAY = re.compile(
    r"<\|(user|assistant|system|im_start)|\A\s*(user|human|assistant)\s*:"  # opens another message
    r"|^(User|Human):.*^Assistant:|^Assistant:.*^(User|Human):",  # a dialogue; one such line may be a quoted file
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)


class PromptPack(Settings):
    """The texts of a compaction. A model holds only for the pack it was trained with: it is recorded with each run."""

    name: str
    system: str = Field(
        description="system prompt of the agent, byte-identical in every window; {act} and {finish} stand for what the "
        "scaffold says of acting and ending"
    )
    summary_instruction: str = Field(description="q_sum: appended to the history to ask for a summary; never trained")
    resume: str = Field(description="u_resume: opens a resumed window; {summary} stands for the summary's body")
    summary_pattern: str = Field(description="regular expression a summary must contain; its group `body` is kept")

    @field_validator("summary_pattern")
    @classmethod
    def _has_a_body(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern, re.DOTALL).groupindex
        except re.error as error:
            raise ValueError(f"summary_pattern {pattern!r} is not a regular expression: {error}") from error
        if "body" not in groups:
            raise ValueError("summary_pattern needs a group named body: (?P<body>…)")
        return pattern

    @field_validator("resume")
    @classmethod
    def _holds_the_summary(cls, text: str) -> str:
        if "{summary}" not in text:
            raise ValueError("resume must contain {summary}")
        return text

    def system_prompt(self, scaffold: Scaffold) -> str:
        return self.system.replace("{act}", scaffold.act).replace("{finish}", scaffold.finish)

    def resume_message(self, body: str) -> str:
        return self.resume.replace("{summary}", body)


@cache
def load_prompt_pack(name: str) -> PromptPack:
    """A shipped pack by name, or by path a pack from a YAML file or from the `compaction.json` beside a model.

    Raises ValueError with what is allowed.
    """
    folder = files("compaction") / "prompts"
    shipped = folder / f"{name}.yaml"
    if shipped.is_file():
        text = shipped.read_text(encoding="utf-8")
    elif Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8")
    else:
        known = sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
        raise ValueError(f"prompt pack {name!r} is neither a file nor a shipped pack ({', '.join(known)})")
    try:
        content = yaml.safe_load(text)  # JSON is YAML
        return PromptPack.model_validate(content.get("prompt_pack", content) if isinstance(content, dict) else content)
    except yaml.YAMLError as error:
        raise ValueError(f"prompt pack {name!r} is not YAML: {error}") from error


@dataclass(frozen=True)
class Verdict:
    """Whether a sampled text is a summary: its body, or why it was rejected."""

    body: str | None
    rejected: str | None = None


def judge_summary(text: str | None, finish_reason: FinishReason, pack: PromptPack, scaffold: Scaffold) -> Verdict:
    """A summary ended by itself, has a body, calls no tool, plays no other role and is not an action.

    `text` is what stands behind the thinking; None where the thinking never ended.
    """
    if finish_reason == "length":
        return Verdict(None, "endless")
    if text is None:
        return Verdict(None, "unclosed_thinking")
    if not text.strip():
        return Verdict(None, "empty")
    if TOOL_CALL.search(text):
        return Verdict(None, "tool_call")
    if ROLE_PLAY.search(text):
        return Verdict(None, "role_play")
    if scaffold.is_action(text):
        return Verdict(None, "action")
    match = re.search(pack.summary_pattern, text, re.DOTALL)
    body = (match.group("body") or "").strip() if match else ""
    return Verdict(body) if body else Verdict(None, "no_body")
