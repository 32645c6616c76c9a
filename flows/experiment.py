"""What a run is made of: a preset, composed from the settings models that live beside the code reading them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from compaction.settings import AgentSettings, Settings
from flows.presets_loader import load_settings

PRESETS = Path(__file__).parent / "presets"

Variant = Literal[
    "base",
    "compactionrl",
    "no-summary-loss",
    "no-compaction",
    "no-compaction-long",
    "segment-mean",
    "no-cross-segment",
    "exact-cross-segment",
    "supo",
    "grpo",
    "sao",
]
ALL_VARIANTS: tuple[Variant, ...] = (
    "base",
    "compactionrl",
    "no-summary-loss",
    "no-compaction",
    "no-compaction-long",
    "segment-mean",
)
"""What `variants: all` stands for; the other names run when they are named."""


def _listed(value: Any) -> Any:
    """`a,b` as people write it on a command line."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(value, int) else value


def _variants(value: Any) -> Any:
    return ALL_VARIANTS if value == "all" else _listed(value)


class EvaluationSettings(Settings):
    """What is measured, and how often."""

    n_tasks: int = Field(400, ge=1, description="tasks of the test split")
    repeats: int = Field(1, ge=1, description="attempts per task")
    windows: Annotated[tuple[int, ...], BeforeValidator(_listed)] = Field((), description="windows swept, in tokens")
    caps: Annotated[tuple[int, ...], BeforeValidator(_listed)] = Field((), description="compaction caps swept")
    keep_recents: Annotated[tuple[int, ...], BeforeValidator(_listed)] = Field(
        (), description="numbers of kept turns swept"
    )
    greedy: bool = Field(False, description="also evaluate with temperature 0")


class Experiment(Settings):
    """One experiment: which policies are trained, on what, and how they are evaluated."""

    name: str = Field(description="names the MLflow experiment and the run's folder")
    seeds: Annotated[tuple[int, ...], BeforeValidator(_listed)] = Field(
        (0,), min_length=1, description="training seeds; every trained variant runs once per seed"
    )
    variants: Annotated[tuple[Variant, ...], BeforeValidator(_variants)] = Field(
        ("base", "compactionrl", "no-summary-loss"), min_length=1, description="policies to compare, or `all`"
    )
    world: dict[str, Any] = Field({}, description="the world the tasks are drawn from")
    tiny: dict[str, Any] = Field({}, description="the embedded model and its tokenizer")
    agent: AgentSettings = AgentSettings()
    sft: dict[str, Any] = Field({}, description="supervised warm start")
    critic: dict[str, Any] = Field({}, description="critic pretraining")
    ppo: dict[str, Any] = Field({}, description="reinforcement learning")
    evaluation: EvaluationSettings = EvaluationSettings()


def load_experiment(name_or_path: str = "tiny", overrides: Sequence[str] = ()) -> Experiment:
    """The preset of that name, or the YAML file at that path, with `a.b=c` overrides. Raises UserError."""
    return load_settings(Experiment, PRESETS, name_or_path, overrides)
