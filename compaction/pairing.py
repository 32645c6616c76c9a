"""The pairing: a model that was trained to compact holds only for the scaffold, prompts and window it was trained with.

It is kept beside the weights as `compaction.json`, for programs; the model card says the same to people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from compaction.files import write_durably
from compaction.settings import AgentSettings, Settings
from compaction.summaries import PromptPack, load_prompt_pack

PAIRING = "compaction.json"
CARD = "README.md"
"""A model's card, beside it"""
FIXED = ("scaffold", "thinking", "threshold", "summary_cap", "keep_task")
SWEPT = ("window", "cap", "keep_recent")
TEXTS = ("system", "summary_instruction", "resume", "summary_pattern")


class TrainedStage(Settings):
    """One stage of training that the weights have been through."""

    stage: str = Field(description="sft, critic or ppo")
    data: str = Field(description="what it read, in words")
    steps: int = Field(ge=0, description="optimiser steps, of ppo policy updates")
    seed: int = Field(description="training seed")
    settings: dict[str, Any] = Field(description="how it learned")
    git_commit: str | None = Field(description="commit of this code; null outside a checkout")
    versions: dict[str, str] = Field(description="packages that decide the numbers")


class Pairing(Settings):
    """What a user of the weights must keep, and where they come from. Sizes are tokens."""

    scaffold: str = Field(description="how the agent acts")
    thinking: bool | None = Field(description="whether it thinks before each action; null = as its chat template says")
    prompt_pack: PromptPack = Field(description="the pack with its texts")
    window: int = Field(description="C")
    threshold: int = Field(description="T_comp: compact when fewer tokens than this are free")
    max_response: int = Field(description="most tokens of an action")
    min_response: int = Field(description="a rollout without compactions left ends below this much room")
    summary_cap: int = Field(description="most tokens of a summary")
    cap: int = Field(description="most compactions per rollout; 0 = one window")
    keep_recent: int = Field(description="k: recent turns kept verbatim")
    keep_task: bool = Field(description="whether the task message is repeated after a compaction")
    temperature: float = Field(description="sampling temperature")
    base_model: str | None = Field(description="folder or hub name; null = a new model of random weights")
    training: tuple[TrainedStage, ...] = Field(description="stages in order, those of the base model first")


def pairing_of(agent: AgentSettings, base_model: str | None, training: Sequence[TrainedStage]) -> Pairing:
    """The pairing of weights that were trained as `agent`."""
    compaction = agent.compaction.model_dump(exclude={"prompt_pack", "summary_retries"})
    return Pairing(
        scaffold=agent.scaffold,
        thinking=agent.thinking,
        prompt_pack=load_prompt_pack(agent.compaction.prompt_pack),
        temperature=agent.temperature,
        base_model=base_model,
        training=tuple(training),
        **compaction,
    )


def write_pairing(folder: Path, pairing: Pairing) -> Path:
    """Writes `compaction.json` beside the weights. Raises OSError (disk full)."""
    return write_durably(folder / PAIRING, pairing.model_dump_json(indent=2) + "\n")


def read_pairing(folder: Path) -> Pairing | None:
    """The pairing of the weights in `folder`; None where nothing is said. Raises ValueError for a damaged file."""
    path = folder / PAIRING
    if not path.is_file():
        return None
    try:
        return Pairing.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{path} is no pairing ({place}: {first['msg']}); mend it, or remove it to go without"
        ) from error


def pairing_differences(trained: Pairing, agent: AgentSettings, evaluated: Mapping[str, Sequence[int]]) -> list[str]:
    """One line per setting in which `agent` is not what the model was trained as.

    `evaluated`: per name of SWEPT the values that are used here. Those of which there are several are swept on purpose:
    all of them together are one line.
    """
    here: dict[str, Any] = {"scaffold": agent.scaffold, "thinking": agent.thinking, **agent.compaction.model_dump()}
    here |= {name: values[0] for name, values in evaluated.items() if len(values) == 1}
    single = [*FIXED, *(name for name in SWEPT if len(evaluated[name]) == 1)]
    lines = [
        f"{name}: trained with {getattr(trained, name)}, here {here[name]}"
        for name in single
        if here[name] != getattr(trained, name)
    ]
    pack = load_prompt_pack(agent.compaction.prompt_pack)
    if texts := [name for name in TEXTS if getattr(pack, name) != getattr(trained.prompt_pack, name)]:
        names = f"trained with pack {trained.prompt_pack.name}, here {pack.name}"
        lines.append(f"prompt_pack: {names}; other texts: {', '.join(texts)}")
    left = []
    for name in SWEPT:
        others = [str(value) for value in evaluated[name] if value != getattr(trained, name)]
        if others and len(evaluated[name]) > 1:
            left.append(f"{name} {', '.join(others)} (trained with {getattr(trained, name)})")
    return [*lines, f"swept beyond its training: {'; '.join(left)}"] if left else lines
