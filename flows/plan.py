"""The stages of an experiment and how they hang together: (collect →) sft → critic → ppo → cells, per seed and variant.

Names of stages follow from settings alone, so the whole plan is known before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from evaluation.grid import Cell, greedy_cell, one_factor_cells, product_cells
from evaluation.tasksets.datasets import Dataset
from flows.experiment import Experiment, Variant
from tasks import collect, evaluate, ppo, warmstart
from tasks.caching import Hit, StageSpec, StageStore
from tasks.evaluate_job import CellJob, endpoint_identity
from tasks.real_tasks import open_dataset
from tasks.wiring import engine_identity


@dataclass(frozen=True)
class Planned:
    """One stage before it runs."""

    spec: StageSpec
    cached: bool
    why: str


class Plan:
    """Every stage's name, from the experiment alone."""

    def __init__(self, experiment: Experiment, *, full_product: bool = False) -> None:
        """`full_product`: all combinations of window, cap and keep_recent (sweep); else one factor at a time."""
        self.experiment = experiment
        self.full_product = full_product

    @cached_property
    def collect_job(self) -> CellJob | None:
        """The trials of the stronger model, if one is asked."""
        e = self.experiment
        return None if e.collect is None else collect.collect_job(e.collect, e.agent, e.job.name)

    def collect(self) -> StageSpec | None:
        """One for all seeds."""
        asked, job = self.experiment.collect, self.collect_job
        return None if asked is None or job is None else collect.spec(job, asked.min_reward)

    def sft(self, seed: int) -> StageSpec:
        e = self.experiment
        return warmstart.spec(e.warmstart, e.world, e.agent, seed, self.collect())

    def zero_shot(self) -> StageSpec:
        """The pretrained model as a checkpoint: the same for every seed."""
        e = self.experiment
        return replace(warmstart.spec(e.as_it_is, e.world, e.agent, 0), label="none, zero-shot")

    def critic_training(self, variant: Variant, seed: int) -> ppo.Training | None:
        """Critic pretraining sees the variant's rollouts and none of its loss: those that roll out alike share it."""
        training = self.experiment.training(variant, seed)
        if training.ppo.advantage.estimator == "group":
            return None
        plain = self.experiment.ppo.model_copy(update={"steps": self.experiment.critic_steps})
        return replace(training, ppo=plain, trainer=self.experiment.trainer)

    def critic(self, variant: Variant, seed: int) -> StageSpec | None:
        training = self.critic_training(variant, seed)
        return ppo.critic_spec(training, self._critic_label(training), self.sft(seed)) if training else None

    def policy(self, variant: Variant, seed: int) -> StageSpec:
        """The stage that makes the variant's checkpoint: `sft` for base, else its `ppo`."""
        if variant == "zero-shot":
            return self.zero_shot()
        if variant == "base":
            return self.sft(seed)
        training = self.experiment.training(variant, seed)
        return ppo.ppo_spec(training, f"{variant} seed {seed}", self.sft(seed), self.critic(variant, seed))

    def cells(self, variant: Variant | str, seed: int) -> list[Cell]:
        """What the variant is evaluated on."""
        e, point = self.experiment.evaluation, self.experiment.agent.compaction
        axes = (e.windows or (point.window,), e.caps or (point.cap,), e.keep_recents or (point.keep_recent,))
        if self.full_product:
            return product_cells(*axes, variant=variant, seed=seed, temperature=self.experiment.agent.temperature)
        cells = one_factor_cells(
            point, *axes, variant=variant, seed=seed, temperature=self.experiment.agent.temperature
        )
        if e.greedy:
            cells.append(greedy_cell(cells[0]))
        if self.experiment.endpoint is None and "no-compaction-long" in self.experiment.variants:
            cells.append(Cell(variant, seed, self.experiment.long_window, 0, None, self.experiment.agent.temperature))
        return list(dict.fromkeys(cells))

    @cached_property
    def policies(self) -> list[tuple[Variant | str, int]]:
        """(variant, training seed), or an endpoint's model alone."""
        if self.experiment.endpoint is not None:
            return [(self.experiment.endpoint.model, 0)]
        return [(variant, seed) for seed in self.experiment.seeds for variant in self.experiment.variants]

    @cached_property
    def dataset(self) -> Dataset | None:
        """The real tasks to evaluate on; None = the trail world. Raises UserError for a dataset that is not one."""
        settings = self.experiment.evaluation.dataset
        return None if settings is None else open_dataset(settings)

    @property
    def dataset_name(self) -> str:
        return self.dataset.name if self.dataset else f"trail/{self.experiment.evaluation.split}"

    @property
    def n_tasks(self) -> int:
        return len(self.dataset.tasks) if self.dataset else self.experiment.evaluation.n_tasks

    def job(self, cell: Cell) -> CellJob:
        """A cell on real tasks."""
        e, settings = self.experiment, self.experiment.evaluation.dataset
        assert self.dataset is not None
        assert settings is not None
        if e.endpoint is None:
            policy: dict[str, Any] = {
                "checkpoint": self.policy(cell.variant, cell.seed).digest,  # type: ignore[arg-type]
                "engine": engine_identity(e.sampled_by, e.loop.vllm),
            }
        else:
            policy = {"endpoint": endpoint_identity(e.endpoint)}
            if e.summary_endpoint is not None:
                policy["summary_endpoint"] = endpoint_identity(e.summary_endpoint)
        return CellJob(cell, e.agent, self.dataset, settings, e.evaluation.repeats, policy, e.job.name)

    def cell(self, cell: Cell) -> StageSpec:
        if self.dataset is not None:
            return self.job(cell).spec()
        e = self.experiment
        policy, own = self.policy(cell.variant, cell.seed), e.evaluation  # type: ignore[arg-type]
        engine = engine_identity(e.sampled_by, e.loop.vllm)
        return evaluate.spec(cell, policy, e.agent, e.world, own.split, own.n_tasks, own.repeats, engine)

    @cached_property
    def stages(self) -> list[StageSpec]:
        """All stages in an order in which they could run, each once."""
        found: dict[str, StageSpec] = {}
        for variant, seed in self.policies:
            specs = [] if self.experiment.endpoint else self._training_stages(variant, seed)  # type: ignore[arg-type]
            specs += [self.cell(cell) for cell in self.cells(variant, seed)]
            found |= {spec.digest: spec for spec in specs}
        return list(found.values())

    def _training_stages(self, variant: Variant, seed: int) -> list[StageSpec]:
        if variant == "zero-shot":
            return [self.zero_shot()]
        critic = None if variant == "base" else self.critic(variant, seed)
        return [s for s in (self.collect(), self.sft(seed), critic, self.policy(variant, seed)) if s is not None]

    def look_up(self, store: StageStore, *, force: bool) -> list[Planned]:
        """What is there and what would run."""
        return look_up(self.stages, store, force=force)

    def _critic_label(self, training: ppo.Training) -> str:
        compaction = training.agent.compaction
        return f"cap {compaction.cap} window {compaction.window} seed {training.seed}"


def look_up(stages: Sequence[StageSpec], store: StageStore, *, force: bool) -> list[Planned]:
    """Each stage with whether it is there."""
    found = [(spec, store.lookup(spec, force=force)) for spec in stages]
    return [
        Planned(spec, isinstance(hit, Hit), "unchanged" if isinstance(hit, Hit) else hit.why) for spec, hit in found
    ]
