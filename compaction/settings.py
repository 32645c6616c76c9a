"""Settings of a rollout: how the window is kept, and how the agent is run in it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Base of every settings model: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CompactionSettings(Settings):
    """The context window and what happens when it fills (paper section "Method"; design "The window").

    All sizes are tokens. Defaults are the paper's 30B setting.
    """

    window: int = Field(65_536, ge=1, description="C: the context window the agent works in, in tokens")
    threshold: int = Field(10_240, ge=1, description="T_comp: compact when fewer than this many tokens are free")
    max_response: int = Field(10_240, ge=1, description="most tokens one action may have")
    min_response: int = Field(256, ge=1, description="a rollout without compactions left stops below this much room")
    summary_cap: int = Field(4_096, ge=1, description="most tokens one summary may have; always kept in reserve")
    cap: int = Field(3, ge=0, description="most compactions per rollout; 0 = one window")
    keep_recent: int = Field(2, ge=0, description="k: recent turns kept verbatim in the resumed window")
    keep_task: bool = Field(False, description="repeat the task message after a compaction (the paper does not)")
    prompt_pack: str = Field("nine-items", description="name or file of the summary instruction, resume text and form")
    summary_retries: int = Field(2, ge=0, description="in evaluation, how often a rejected summary is sampled again")

    @model_validator(mode="after")
    def _responses_are_ordered(self) -> CompactionSettings:
        if self.min_response > self.max_response:
            raise ValueError(
                f"min_response={self.min_response} is larger than max_response={self.max_response}; lower min_response"
            )
        return self


class AgentSettings(Settings):
    """How an agent is run: its window, its scaffold and how it samples."""

    compaction: CompactionSettings = CompactionSettings()
    scaffold: str = Field(
        "bash-block", description="how the agent acts: bash-block, tools (native calls), or shell-line (tiny)"
    )
    thinking: bool | None = Field(
        None, description="let the model think before each action: the chat template's enable_thinking; null = its own"
    )
    temperature: float = Field(1.0, ge=0, description="sampling temperature of actions and summaries; 0 = greedy")
    max_turns: int = Field(250, ge=1, description="turn limit of a rollout")
    mode: Literal["training", "evaluation"] = Field(
        "evaluation", description="training never resamples a summary: a bad one ends the rollout and is learned from"
    )
