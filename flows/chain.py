"""The stages of a plan, run: each once, as soon as its parents are there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compaction.engines.endpoint_settings import EndpointSettings
from evaluation.grid import Cell
from evaluation.job import set_aside
from evaluation.tasksets.datasets import Dataset
from flows.experiment import Variant
from flows.plan import Plan
from tasks import collect, evaluate, evaluate_job, ppo, warmstart
from tasks.caching import Hit, StageOutcome, StageSpec
from tasks.collect import TRAJECTORIES, CollectSettings
from tasks.endpoint_policy import BudgetUsedUp, EndpointPolicy
from tasks.errors import CommandError
from tasks.evaluate_job import CellJob
from tasks.model_card import write_card
from tasks.policies import CheckpointPolicy
from tasks.stages import KeptSlot, StageRunner, explained
from tasks.wiring import served


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
        e, dataset = self.experiment, self.plan.dataset
        assert e.endpoint is not None
        assert dataset is not None
        return await self._checked(e.endpoint, e.summary_endpoint, dataset, {c: self.plan.cell(c) for c in cells})

    async def _checked(
        self,
        endpoint: EndpointSettings,
        summary_endpoint: EndpointSettings | None,
        dataset: Dataset,
        cells: Mapping[Cell, StageSpec],
    ) -> EndpointPolicy:
        """An endpoint, checked for all cells before the first trial, unless the stage of every cell is there."""
        e = self.experiment
        with explained("endpoint"):
            policy = EndpointPolicy(
                endpoint,
                summary_endpoint,
                e.job,
                temperature=e.agent.temperature,
                longest_window=max(cell.window for cell in cells),
            )
            found = {cell: self.runner.store.lookup(spec, force=self.runner.force) for cell, spec in cells.items()}
            to_run = [cell for cell, hit in found.items() if not isinstance(hit, Hit)]
            if to_run:
                texts = [task.instruction for task in dataset.tasks]
                kept = [cell.settings(e.agent.compaction) for cell in to_run]
                policy.check_room(texts, [e.agent.model_copy(update={"compaction": one}) for one in kept])
                await policy.ready()
        return policy

    async def _cells(self, cells: Sequence[Cell], policy: CheckpointPolicy | EndpointPolicy) -> None:
        slot = KeptSlot(self.runner.slots)
        try:
            for cell in cells:
                try:
                    outcome = self.results[cell] = await self._cell(cell, policy, slot)
                    if outcome.unfinished:
                        self._failed(CommandError(f"{cell.name}: {outcome.unfinished}"))
                except BudgetUsedUp as error:
                    self._failed(error)
                    break
                except Exception as error:
                    self._failed(error)
        finally:
            slot.close()
            await policy.close()

    async def _cell(self, cell: Cell, policy: CheckpointPolicy | EndpointPolicy, slot: KeptSlot) -> StageOutcome:
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
            slot=slot,
        )

    async def _policy(self, variant: Variant, seed: int) -> StageOutcome:
        """The variant's checkpoint, with a card beside its weights."""
        if variant == "zero-shot":
            return await self._zero_shot()
        spec = self.plan.policy(variant, seed)
        outcome = await (self._sft(seed) if variant == "base" else self._once(spec, self._train(variant, seed, spec)))
        write_card(outcome.folder / "checkpoint")
        return outcome

    @property
    def _served(self) -> dict[str, Any]:
        """What fine-tuning must know of the stages behind it."""
        return {"engine": self.experiment.sampled_by, "gpus": self.experiment.loop.trainer_gpus}

    async def _zero_shot(self) -> StageOutcome:
        e, spec = self.experiment, self.plan.zero_shot()
        body = warmstart.body(e.as_it_is, e.world, e.agent, 0, self.runner.cluster, **self._served)
        tags = {"variant": "zero-shot"}
        return await self._once(spec, self.runner.run(spec, body, total=None, unit="steps", tags=tags))

    async def collect(self) -> StageOutcome | None:
        """The trajectories of the stronger model, where the experiment asks one; some may be unfinished."""
        settings, job, spec = self.experiment.collect, self.plan.collect_job, self.plan.collect()
        if settings is None or job is None or spec is None:
            return None
        return await self._once(spec, self._collected(settings, job, spec))

    async def _collected(self, settings: CollectSettings, job: CellJob, spec: StageSpec) -> StageOutcome:
        policy = await self._checked(settings.endpoint, None, job.dataset, {job.cell: spec})
        try:
            return await self.runner.run(
                spec,
                collect.body(job, policy, job.folder(self.jobs), self.experiment.job, settings.min_reward),
                total=len(job.trials()),
                unit="trials",
                tags={"stage": "collect", "variant": job.cell.variant, "dataset": job.dataset.name},
            )
        finally:
            await policy.close()

    async def _sft(self, seed: int) -> StageOutcome:
        return await self._once(self.plan.sft(seed), self._tuned(seed))

    async def _tuned(self, seed: int) -> StageOutcome:
        e, collected = self.experiment, await self.collect()
        if collected is not None and collected.unfinished:
            raise CommandError(
                f"collect: {collected.unfinished}. The same command goes on with it; or train on what "
                "there is: `compactionrl collect` with these settings writes it to a file for sft.data"
            )
        trajectories = None if collected is None else collected.folder / TRAJECTORIES
        return await self.runner.run(
            self.plan.sft(seed),
            warmstart.body(
                e.warmstart, e.world, e.agent, seed, self.runner.cluster, collected=trajectories, **self._served
            ),
            total=sum(stage.steps for stage in e.warmstart.sft.stages),
            unit="steps",
            tags={"variant": "base", "seed": seed},
        )

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
