"""What the scripted expert of the trail world gives to fine-tuning: rollouts, and text for a tokenizer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

from pydantic import Field, field_validator

from compaction.agent import run_rollout
from compaction.protocols import Renderer
from compaction.rollout import Rollout
from compaction.scaffolds import load_scaffold
from compaction.settings import AgentSettings, Settings
from compaction.summaries import load_prompt_pack
from evaluation.tasksets.trail import TrailSettings, trail_tasks
from evaluation.tasksets.trail_expert import ExpertSettings, TrailExpert, world_text


class ExpertData(Settings):
    """The expert rollouts that one SFT stage reads: each draws its window, cap and keep_recent from these."""

    rollouts: int = Field(ge=1, description="expert rollouts of this stage")
    world: dict[str, int | float] = Field({}, description="what these rollouts change in the world, by setting")
    follow_flip: float | None = Field(
        None, ge=0, le=1, description="chance that the expert follows a flip; null = the expert's own"
    )
    windows: tuple[int, ...] = Field(min_length=1, description="windows to draw from")
    caps: tuple[int, ...] = Field(min_length=1, description="caps to draw from")
    keep_recents: tuple[int, ...] = Field(min_length=1, description="keep_recent values to draw from")

    def identity(self) -> dict[str, Any]:
        """For a stage's key."""
        return self.model_dump(mode="json")

    def described(self) -> str:
        return f"{self.rollouts:,} expert rollouts on the trail world"

    @field_validator("world")
    @classmethod
    def _are_settings_of_the_world(cls, world: dict[str, int | float]) -> dict[str, int | float]:
        if unknown := sorted(set(world) - set(TrailSettings.model_fields)):
            raise ValueError(
                f"unknown keys {', '.join(unknown)}; allowed: {', '.join(sorted(TrailSettings.model_fields))}"
            )
        return world


def corpus(tasks: int, world: TrailSettings, agent: AgentSettings) -> Iterator[str]:
    """Text that trains the tokenizer: the world's, and the prompt pack's, so that its words are single tokens too."""
    pack = load_prompt_pack(agent.compaction.prompt_pack)
    system = pack.system_prompt(load_scaffold(agent.scaffold))
    yield from [system, pack.summary_instruction] * tasks
    yield from world_text(world, seed=0, n=tasks)


def expert_rollouts(
    data: ExpertData,
    expert_settings: ExpertSettings,
    world: TrailSettings,
    agent: AgentSettings,
    renderer: Renderer,
    seed: int,
    stage: int = 0,
) -> list[Rollout]:
    """The scripted expert on training tasks, through the same agent loop as the policy's rollouts."""
    world = TrailSettings.model_validate(world.model_dump() | data.world)
    if data.follow_flip is not None:
        expert_settings = expert_settings.model_copy(update={"follow_flip": data.follow_flip})
    tasks = trail_tasks(world, "train", data.rollouts, seed=1_000_000 + 1_000 * seed + stage)
    expert = TrailExpert(world, renderer, expert_settings.model_copy(update={"seed": seed}))
    rng = random.Random(f"expert/{seed}/{stage}")

    async def all_rollouts() -> list[Rollout]:
        out = []
        for i, task in enumerate(tasks):
            compaction = agent.compaction.model_copy(
                update={
                    "window": rng.choice(data.windows),
                    "cap": rng.choice(data.caps),
                    "keep_recent": rng.choice(data.keep_recents),
                }
            )
            settings = agent.model_copy(update={"compaction": compaction, "mode": "training"})
            rollout_id = f"expert-{stage}-{i:06d}"
            out.append(await run_rollout(task, expert, renderer, settings, seed=i, rollout_id=rollout_id))
        return out

    return asyncio.run(all_rollouts())
