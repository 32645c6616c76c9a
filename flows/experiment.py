"""What a run is made of: a preset, composed from the settings models that live beside the code reading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from compaction.engines.endpoint_settings import EndpointSettings, check_thinking
from compaction.scaffolds import load_scaffold
from compaction.settings import AgentSettings, Settings
from compaction.summaries import load_prompt_pack
from evaluation.settings import DatasetSettings, JobSettings
from evaluation.tasksets.trail import Split, TrailSettings
from flows.presets_loader import load_settings
from rl.settings import PPOSettings, SampledBy, TrainerSettings
from tasks.collect import CollectSettings
from tasks.errors import UserError
from tasks.ppo import LoopSettings, Training
from tasks.warmstart import WarmstartSettings

S = TypeVar("S", bound=Settings)

PRESETS = Path(__file__).parent / "presets"

Engine = Literal["torch", "vllm", "openai"]
ENDPOINT_FIELDS = {"endpoint", "summary_endpoint"}
TRAINING_FIELDS = {
    *("seeds", "variants", "world", "dataset", "long_window", "group_size", "collect", "sft", "critic_steps", "ppo"),
    *("trainer", "loop"),
}
Variant = Literal[
    "zero-shot",
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

UNTRAINED: tuple[Variant, ...] = ("zero-shot", "base")
"""Policies without PPO: the pretrained model as it is, and the warm start"""
GROUP = {"advantage": {"estimator": "group"}, "overlong_mask": True}
CHANGES: dict[Variant, dict[str, dict[str, Any]]] = {
    "compactionrl": {},
    "no-summary-loss": {"ppo": {"train_summaries": False}},
    "no-compaction": {"compaction": {"cap": 0}},
    "no-compaction-long": {"compaction": {"cap": 0, "window": "long"}},
    "segment-mean": {"trainer": {"loss": {"mean": "segment"}}},
    "no-cross-segment": {"ppo": {"advantage": {"cross_segment": "none"}}},
    "exact-cross-segment": {"ppo": {"advantage": {"cross_segment": "exact"}}},
    "supo": {"ppo": GROUP},
    "grpo": {"ppo": GROUP | {"overlong_mask": False}, "compaction": {"cap": 0}},
    "sao": {"trainer": {"loss": {"clip": "double_sided", "eps_low": 0.8, "eps_high": 3.0}}, "compaction": {"cap": 0}},
}
"""What each trained variant changes in the preset; `compactionrl` is the preset itself."""


def _listed(value: Any) -> Any:
    """`a,b` as people write it on a command line."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(value, int) else value


def _variants(value: Any) -> Any:
    return ALL_VARIANTS if value == "all" else _listed(value)


class EvaluationSettings(Settings):
    """What is measured, and how often."""

    dataset: DatasetSettings | None = Field(None, description="real tasks to evaluate on; null = the trail world")
    split: Split = Field("test", description="the world's tasks: tune on validation, run test once")
    n_tasks: int = Field(400, ge=1, description="tasks of that split (of a dataset: dataset.limit)")
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
    engine: Engine = Field(
        "torch",
        description="torch: checkpoints that this experiment trains, sampled in-process; vllm: the same, sampled by "
        "vLLM; openai: an endpoint",
    )
    endpoint: EndpointSettings | None = Field(None, description="the endpoint of engine openai")
    summary_endpoint: EndpointSettings | None = Field(None, description="another model that writes the summaries")
    world: TrailSettings = TrailSettings()
    dataset: DatasetSettings | None = Field(None, description="real tasks to train on; null = the trail world")
    agent: AgentSettings = AgentSettings()
    long_window: int = Field(131_072, ge=1, description="the one window of no-compaction-long, in tokens")
    group_size: int = Field(8, ge=2, description="rollouts per prompt of the group estimator (supo, grpo)")
    collect: CollectSettings | None = Field(None, description="a stronger model that makes trajectories for sft.data")
    sft: WarmstartSettings | None = Field(None, description="the warm start; engine openai has none")
    critic_steps: int = Field(50, ge=1, description="critic pretraining steps (the paper's 50)")
    ppo: PPOSettings = PPOSettings()
    trainer: TrainerSettings = TrainerSettings()
    loop: LoopSettings = LoopSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    job: JobSettings = JobSettings()

    @model_validator(mode="after")
    def _names_are_known(self) -> Experiment:
        load_prompt_pack(self.agent.compaction.prompt_pack)
        load_scaffold(self.agent.scaffold)
        return self

    @model_validator(mode="after")
    def _somebody_acts(self) -> Experiment:
        if self.engine != "openai" and self.sft is None and self.collect is None:
            raise ValueError(
                f"engine {self.engine} trains a model and needs sft: take a preset that has it, such as tiny, or give "
                "what to fine-tune on, --set 'sft.data=[{trajectories: FILE}]'. To ask a stronger model: compactionrl "
                "collect --dataset bench12 --base-url http://HOST:PORT/v1 --model NAME"
            )
        if self.engine != "openai" and (self.endpoint or self.summary_endpoint):
            raise ValueError(
                f"an endpoint is given, but engine is {self.engine}; set engine to openai (--engine openai)"
            )
        if self.engine == "openai" and self.endpoint is None:
            raise ValueError("engine openai needs an endpoint: --base-url http://HOST:PORT/v1 --model NAME")
        if self.engine == "openai" and self.evaluation.dataset is None:
            raise ValueError("engine openai is evaluated on real tasks: --dataset bench12, or a folder of task folders")
        if self.engine == "openai":
            check_thinking(self.agent.thinking, "endpoint.request_extra")
        teacher = None if self.collect is None else self.collect.endpoint
        endpoints = (self.endpoint, self.summary_endpoint, teacher)
        unpriced = [e.model for e in endpoints if e is not None and not e.priced]
        if self.job.max_cost is not None and unpriced:
            raise ValueError(f"job.max_cost needs the prices of {', '.join(unpriced)}: --price INPUT,CACHED,OUTPUT")
        return self

    @model_validator(mode="after")
    def _zero_shot_is_of_a_model(self) -> Experiment:
        if "zero-shot" in self.variants and (self.sft is None or self.sft.model is None):
            raise ValueError("variant zero-shot is a pretrained model as it is: give one with --model")
        return self

    @model_validator(mode="after")
    def _a_new_model_takes_every_window(self) -> Experiment:
        new = None if self.engine == "openai" or self.sft is None or self.sft.model else self.sft.tiny
        if new is not None and self.longest_window > new.max_positions:
            raise ValueError(
                f"a window of {self.longest_window} tokens is longer than the new model takes "
                f"(sft.tiny.max_positions={new.max_positions}); lower the window, or make the model longer"
            )
        return self

    @model_validator(mode="after")
    def _collected_is_read(self) -> Experiment:
        reads = self.sft is not None and self.sft.reads_collected
        if reads and self.collect is None:
            raise ValueError("sft.data reads what stage collect makes, but collect is not set: give collect.endpoint …")
        if self.collect is not None and self.sft is not None and not reads:
            raise ValueError("collect is set, but no entry of sft.data reads it: add {trajectories: collect} there")
        return self

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Experiment:
        grouped = [v for v in self.variants if CHANGES.get(v, {}).get("ppo", {}).get("advantage") == GROUP["advantage"]]
        if grouped and self.ppo.batch_size % self.group_size:
            raise ValueError(
                f"{', '.join(grouped)}: ppo.batch_size={self.ppo.batch_size} does not hold whole groups of "
                f"group_size={self.group_size}; make it a multiple"
            )
        return self

    def training(self, variant: Variant, seed: int) -> Training:
        """What `variant` trains with: the preset with the variant's changes."""
        changes = CHANGES[variant]
        compaction = dict(changes.get("compaction", {}))
        if compaction.get("window") == "long":
            compaction["window"] = self.long_window
        ppo = changed(self.ppo, changes.get("ppo", {}))
        if ppo.advantage.estimator == "group":
            ppo = changed(ppo, {"group_size": self.group_size})
        agent = changed(self.agent, {"compaction": compaction, "mode": "training"})
        trainer = changed(self.trainer, changes.get("trainer", {}) | {"temperature": self.agent.temperature})
        return Training(ppo, trainer, agent, self.world, self.dataset, self.loop, seed, self.sampled_by)

    @property
    def longest_window(self) -> int:
        """Of all that the trained model sees, in tokens."""
        tuned = any(variant != "zero-shot" for variant in self.variants)
        shown = self.sft.longest_window if self.sft and tuned else 0
        long = self.long_window if "no-compaction-long" in self.variants else 0
        return max(self.agent.compaction.window, *self.evaluation.windows, shown, long)

    @property
    def sampled_by(self) -> SampledBy:
        """The engine that serves this experiment's checkpoints."""
        return "vllm" if self.engine == "vllm" else "torch"

    @property
    def warmstart(self) -> WarmstartSettings:
        """Raises UserError for an experiment that only collects trajectories."""
        if self.sft is None:
            raise UserError(f"{self.name} trains nothing: it has no sft; take a preset that has it, such as tiny")
        return self.sft

    @property
    def as_it_is(self) -> WarmstartSettings:
        """The warm start of variant zero-shot: none."""
        return changed(self.warmstart, {"data": ()})

    def config(self) -> dict[str, Any]:
        """The settings that this experiment reads, for every record of it."""
        unread = TRAINING_FIELDS if self.engine == "openai" else ENDPOINT_FIELDS
        return self.model_dump(mode="json", exclude=unread)


def changed(model: S, changes: Mapping[str, Any]) -> S:
    """A copy with nested changes, validated."""
    dumped = model.model_dump()
    for name, value in changes.items():
        field = getattr(model, name)
        dumped[name] = changed(field, value).model_dump() if isinstance(field, Settings) else value
    return type(model).model_validate(dumped)


def load_experiment(name_or_path: str = "tiny", overrides: Sequence[str] = ()) -> Experiment:
    """The preset of that name, or the YAML file at that path, with `a.b=c` overrides. Raises UserError."""
    return load_settings(Experiment, PRESETS, name_or_path, overrides)
