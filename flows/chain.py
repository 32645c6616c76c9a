"""The stages of an experiment and how they hang together: sft → critic → ppo → cells, per seed and variant.

Names of stages follow from settings alone, so the whole plan is known before anything runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from evaluation.grid import Cell, greedy_cell, one_factor_cells, product_cells
from evaluation.job import set_aside
from evaluation.tasksets.datasets import Dataset
from flows.experiment import UNTRAINED, Experiment, Variant
from tasks import evaluate, evaluate_job, ppo, warmstart
from tasks.caching import Hit, StageOutcome, StageSpec, StageStore
from tasks.endpoint_policy import BudgetUsedUp, EndpointPolicy
from tasks.errors import CommandError
from tasks.evaluate_job import CellJob, endpoint_identity
from tasks.model_card import write_card
from tasks.policies import CheckpointPolicy
from tasks.real_tasks import open_dataset
from tasks.stages import StageRunner, explained
from tasks.wiring import engine_identity, served


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

    def sft(self, seed: int) -> StageSpec:
        e = self.experiment
        return warmstart.spec(e.warmstart, e.world, e.agent, seed)

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
        if variant in UNTRAINED:
            return [self.policy(variant, seed)]
        return [self.sft(seed), *(s for s in (self.critic(variant, seed),) if s), self.policy(variant, seed)]

    def look_up(self, store: StageStore, *, force: bool) -> list[Planned]:
        """What is there and what would run."""
        planned = []
        for spec in self.stages:
            found = store.lookup(spec, force=force)
            cached = isinstance(found, Hit)
            planned.append(Planned(spec, cached, "unchanged" if isinstance(found, Hit) else found.why))
        return planned

    def _critic_label(self, training: ppo.Training) -> str:
        compaction = training.agent.compaction
        return f"cap {compaction.cap} window {compaction.window} seed {training.seed}"


class Chain:
    """Runs a plan: each stage once, whoever asks first; independent ones side by side."""

    def __init__(self, plan: Plan, runner: StageRunner, jobs: Path) -> None:
        """`jobs`: where the trials on real tasks are kept."""
        self.plan, self.runner, self.jobs, self.experiment = plan, runner, jobs, plan.experiment
        self._running: dict[str, asyncio.Task[StageOutcome]] = {}
        self.results: dict[Cell, StageOutcome] = {}
        self.errors: list[Exception] = []
        self._evaluations = asyncio.Semaphore(os.cpu_count() or 1)
        """Bounds how many checkpoints are served at once, and so the memory of many variants and seeds"""

    @property
    def jobs_folder(self) -> Path:
        """Where this sweep's jobs are: the folder that holds those of its first policy."""
        variant, seed = self.plan.policies[0]
        first = self.plan.cells(variant, seed)[0]
        return self.plan.job(first).folder(self.jobs).parent

    async def run(self) -> None:
        """All seeds and variants. A failure ends what depends on it; `errors` holds what went wrong."""
        try:
            async with asyncio.TaskGroup() as group:
                for variant, seed in self.plan.policies:
                    group.create_task(self._evaluate(variant, seed))
        except BaseExceptionGroup as group_error:  # a signal that arrived in the middle of a stage's own code
            raise group_error.exceptions[0] from None
        finally:
            for task in self._running.values():
                task.cancel()
            # An interrupted stage ends its MLflow run and its actors itself, while there is still a cluster.
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _evaluate(self, variant: Variant | str, seed: int) -> None:
        """The variant's policy, then its cells one after another."""
        cells = self.plan.cells(variant, seed)
        try:
            if self.experiment.endpoint is not None:
                await self._cells(cells, await self._endpoint(cells))
                return
            policy = await self._policy(variant, seed)  # type: ignore[arg-type]
        except Exception as error:
            self._failed(error)
            return
        async with self._evaluations:
            await self._cells(cells, self._checkpoint(policy, cells))

    def _checkpoint(self, policy: StageOutcome, cells: Sequence[Cell]) -> CheckpointPolicy:
        """One engine for all cells of a checkpoint."""
        loop, longest = self.experiment.loop, max(cell.window for cell in cells)
        serving = partial(
            served, self.experiment.sampled_by, policy.folder / "checkpoint", loop.vllm, loop.slots, longest
        )
        return CheckpointPolicy(serving, self.runner.cluster, slots=loop.slots, rollout_timeout=loop.rollout_timeout)

    async def _endpoint(self, cells: Sequence[Cell]) -> EndpointPolicy:
        """The endpoint, checked for all cells before the first trial, unless every cell is there already."""
        e = self.experiment
        assert e.endpoint is not None
        assert self.plan.dataset is not None
        with explained("endpoint"):
            policy = EndpointPolicy(
                e.endpoint,
                e.summary_endpoint,
                e.job,
                temperature=e.agent.temperature,
                longest_window=max(cell.window for cell in cells),
            )
            found = [self.runner.store.lookup(self.plan.cell(c), force=self.runner.force) for c in cells]
            to_run = [cell for cell, hit in zip(cells, found, strict=True) if not isinstance(hit, Hit)]
            if to_run:
                texts = [task.instruction for task in self.plan.dataset.tasks]
                kept = [cell.settings(e.agent.compaction) for cell in to_run]
                policy.check_room(texts, [e.agent.model_copy(update={"compaction": one}) for one in kept])
                await policy.ready()
        return policy

    async def _cells(self, cells: Sequence[Cell], policy: CheckpointPolicy | EndpointPolicy) -> None:
        try:
            for cell in cells:
                try:
                    outcome = self.results[cell] = await self._cell(cell, policy)
                    if outcome.unfinished:
                        self._failed(CommandError(f"{cell.name}: {outcome.unfinished}"))
                except BudgetUsedUp as error:
                    self._failed(error)
                    break
                except Exception as error:
                    self._failed(error)
        finally:
            await policy.close()

    async def _cell(self, cell: Cell, policy: CheckpointPolicy | EndpointPolicy) -> StageOutcome:
        e, own = self.experiment, self.experiment.evaluation
        if self.plan.dataset is not None:
            job = self.plan.job(cell)
            folder = job.folder(self.jobs)
            if self.runner.force:
                with explained(cell.name):
                    set_aside(folder)
            body = evaluate_job.body(job, policy, folder, e.job)
        else:
            assert isinstance(policy, CheckpointPolicy)
            body = evaluate.body(cell, e.agent, e.world, own.split, own.n_tasks, own.repeats, policy)
        return await self.runner.run(
            self.plan.cell(cell),
            body,
            total=self.plan.n_tasks * own.repeats,
            unit="trials",
            tags={"stage": "evaluate", "variant": cell.variant, "dataset": self.plan.dataset_name},
            params=evaluate.params(cell, e.agent, self.plan.dataset_name, self.plan.n_tasks, own.repeats),
        )

    async def _policy(self, variant: Variant, seed: int) -> StageOutcome:
        """The variant's checkpoint, with a card beside its weights."""
        if variant == "zero-shot":
            return await self._zero_shot()
        spec = self.plan.policy(variant, seed)
        outcome = await (self._sft(seed) if variant == "base" else self._once(spec, self._train(variant, seed, spec)))
        write_card(outcome.folder / "checkpoint")
        return outcome

    async def _zero_shot(self) -> StageOutcome:
        e, spec = self.experiment, self.plan.zero_shot()
        body = warmstart.body(e.as_it_is, e.world, e.agent, 0, self.runner.cluster)
        tags = {"variant": "zero-shot"}
        return await self._once(spec, self.runner.run(spec, body, total=None, unit="steps", tags=tags))

    async def _sft(self, seed: int) -> StageOutcome:
        e = self.experiment
        spec = self.plan.sft(seed)
        body = warmstart.body(e.warmstart, e.world, e.agent, seed, self.runner.cluster)
        total = sum(stage.steps for stage in e.warmstart.sft.stages)
        tags = {"variant": "base", "seed": seed}
        return await self._once(spec, self.runner.run(spec, body, total=total, unit="steps", tags=tags))

    async def _train(self, variant: Variant, seed: int, spec: StageSpec) -> StageOutcome:
        sft = await self._sft(seed)
        critic = await self._critic(variant, seed, sft)
        training = self.experiment.training(variant, seed)
        return await self.runner.run(
            spec,
            ppo.ppo_body(training, sft, critic, self.runner.cluster),
            total=training.ppo.steps,
            unit="updates",
            tags={"variant": variant, "seed": seed},
        )

    async def _critic(self, variant: Variant, seed: int, sft: StageOutcome) -> StageOutcome | None:
        training, spec = self.plan.critic_training(variant, seed), self.plan.critic(variant, seed)
        if training is None or spec is None:
            return None
        body = ppo.critic_body(training, sft, self.runner.cluster)
        stage = self.runner.run(spec, body, total=training.ppo.steps, unit="steps", tags={"seed": seed})
        return await self._once(spec, stage)

    async def _once(self, spec: StageSpec, stage: Any) -> StageOutcome:
        """Whoever asks first runs the stage; the others wait for the same outcome."""
        if spec.digest in self._running:
            stage.close()
        else:
            self._running[spec.digest] = asyncio.create_task(stage)
        return await asyncio.shield(self._running[spec.digest])

    def _failed(self, error: Exception) -> None:
        if not any(error is known for known in self.errors):
            self.errors.append(error)


def in_order(results: dict[Cell, StageOutcome], plan: Plan) -> list[StageOutcome]:
    """Cells' outcomes in the plan's order."""
    variants = dict.fromkeys(variant for variant, _ in plan.policies)
    policies = [(v, seed) for v in variants for variant, seed in plan.policies if v == variant]
    cells = [cell for variant, seed in policies for cell in plan.cells(variant, seed)]
    return [results[cell] for cell in cells if cell in results]
