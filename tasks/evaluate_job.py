"""Stage `evaluate` on real tasks: a job of trials in sandboxes, resumable trial by trial.

The stage keeps the cell's result; the trials themselves are below `jobs/`, in Harbor's layout, and stay there.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from compaction.engines.endpoint_settings import EndpointSettings
from compaction.rollout import Rollout
from compaction.settings import AgentSettings
from compaction.storage import read_rollouts
from compaction.summaries import load_prompt_pack
from evaluation.grid import Cell
from evaluation.job import Job, JobOutcome, JobProgress, Trial, read_detail
from evaluation.settings import DatasetSettings, JobSettings
from evaluation.tasksets.datasets import Dataset, ensure_images
from evaluation.tasksets.task_folder import FolderTask
from evaluation.trial import TrialKey
from rl.requests import RolloutRequest, rollout_seed
from tasks.caching import StageSpec, sha256_json
from tasks.errors import CommandError
from tasks.evaluate import cell_agent, record, worth_reading
from tasks.policies import Policy
from tasks.stages import Body, StageRun, Unfinished


@dataclass(frozen=True)
class CellJob:
    """All that decides the trials of one cell."""

    cell: Cell
    agent: AgentSettings
    """As the experiment has it; the cell changes window, cap, keep_recent and temperature"""
    dataset: Dataset
    settings: DatasetSettings
    repeats: int
    policy: dict[str, Any]
    """Who acts: the settings of an endpoint, or the digest of a checkpoint's stage"""
    name: str | None = None
    """The job's name, where the user gave it one: such a job has trials of its own"""

    def decides(self) -> dict[str, Any]:
        """What a trial's result depends on. More tasks or repeats change no trial."""
        return {
            "cell": {"window": self.cell.window, "cap": self.cell.cap, "keep_recent": self.cell.keep_recent},
            "variant": self.cell.variant,
            "seed": self.cell.seed,
            "policy": self.policy,
            "agent": cell_agent(self.cell, self.agent).model_dump(mode="json"),
            "prompts": load_prompt_pack(self.agent.compaction.prompt_pack).model_dump(),
            "dataset": self.dataset.name,
            "sandbox": self.settings.sandbox.model_dump(mode="json"),
        }

    def spec(self) -> StageSpec:
        """The cell's name by content. No source is part of it: a trial that was paid for stays valid."""
        chosen = {"tasks": self.dataset.digest, "repeats": self.repeats, "job": self.name}
        return StageSpec("evaluate", self.cell.name, self.decides() | chosen)

    def folder(self, jobs: Path) -> Path:
        """The job's folder: below the name that the user gave, or below one that follows from the settings."""
        decides = self.decides()
        del decides["cell"], decides["agent"]["compaction"], decides["agent"]["temperature"]
        compaction = self.agent.compaction.model_dump(exclude={"window", "cap", "keep_recent"})
        digest = sha256_json([decides, compaction])[:8]
        return (
            jobs / (self.name or f"{_slug(self.dataset.name)}-{_slug(self.cell.variant)}-{digest}") / self._cell_name()
        )

    def trials(self) -> list[Trial]:
        return [
            Trial(
                key=self.cell.trial_key(self.dataset.name, task.id, repeat),
                task=task,
                seed=rollout_seed("evaluate", self.cell.seed, repeat),
                checksum=task.folder.checksum,
                task_path=task.folder.path,
            )
            for task in self.dataset.tasks
            for repeat in range(self.repeats)
        ]

    def _cell_name(self) -> str:
        c = self.cell
        keep = "" if c.keep_recent is None else f"-keep{c.keep_recent}"
        greedy = "-greedy" if c.greedy else ""
        return f"{_slug(c.variant)}-seed{c.seed}-window{c.window}-cap{c.cap}{keep}{greedy}"


def endpoint_identity(endpoint: EndpointSettings) -> dict[str, Any]:
    """What of an endpoint decides a reply: not where it happens to run, how often it is asked, or what it costs."""
    return endpoint.model_dump(mode="json", include={"model", "request_extra", "tokenizer", "reasoning"})


def body(job: CellJob, policy: Policy, folder: Path, settings: JobSettings) -> Body:
    """Runs the trials that have no valid result; the result is the cell's CellResult, Unfinished while any lacks."""

    async def run(stage: StageRun) -> dict[str, Any] | Unfinished:
        trials, outcome = await run_trials(job, policy, folder, settings, stage)
        kept = [kept_rollout(trials, outcome.results[i].key) for i in worth_reading(outcome.results)]
        result = record(job.cell, outcome.results, kept, stage)
        if outcome.complete:
            return result
        return Unfinished(result, why_unfinished(trials, outcome))

    return run


async def run_trials(
    job: CellJob, policy: Policy, folder: Path, settings: JobSettings, stage: StageRun
) -> tuple[Job, JobOutcome]:
    """Runs what has no valid result. Raises CommandError where not one trial could be run."""
    trials = Job(folder, job.decides(), job.trials(), concurrency=settings.concurrency, attempts=settings.attempts)
    agent = cell_agent(job.cell, job.agent)

    async def attempt(trial: Trial, evidence: Path) -> Rollout:
        task = replace(cast(FolderTask, trial.task), evidence=evidence)
        return await policy.rollout(RolloutRequest(evidence.name, task, trial.seed, agent))

    def on_progress(progress: JobProgress) -> None:
        stage.progress.update(progress.done, progress.shown())

    if job.settings.sandbox.kind == "docker":
        await asyncio.to_thread(ensure_images, job.dataset)
    await policy.ready()
    outcome = await trials.run(attempt, on_progress)
    if not outcome.results:
        raise CommandError(f"no trial could be run. {outcome.stopped}")
    return trials, outcome


def why_unfinished(job: Job, outcome: JobOutcome) -> str:
    """How many trials have no reward, and what most of them met."""
    errored = [r for r in outcome.results if r.reward is None]
    missing = len(job.trials) - len(outcome.results) + len(errored)
    text = f"{missing} of {len(job.trials)} trials have no reward"
    if outcome.stopped is not None:
        return f"{text} ({outcome.stopped})"
    most, count = Counter(r.error_class for r in errored).most_common(1)[0]
    first = next(r for r in errored if r.error_class == most)
    detail = read_detail(job.paths.trial(first.key.task, first.key.repeat))
    return f"{text}; {count} of them {most}, such as {first.key.task}: {detail}"


def kept_rollout(job: Job, key: TrialKey) -> Rollout:
    (rollout,) = read_rollouts(job.paths.trial(key.task, key.repeat).rollout)
    return rollout


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "unnamed"
