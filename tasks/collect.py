"""Stage `collect`: a stronger model solves real tasks; what it solved is kept as trajectories for SFT.

The trials are an ordinary job below `jobs/`, which a sweep of the same settings shares: resumable, nothing that was
paid for is lost or run twice. The stage keeps one Parquet file of rollouts and what they cost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from compaction.engines.endpoint_settings import EndpointSettings
from compaction.files import write_durably
from compaction.rollout import Rollout
from compaction.settings import AgentSettings, Settings
from compaction.storage import write_rollouts
from evaluation.grid import product_cells
from evaluation.job import Job
from evaluation.settings import DatasetSettings, JobSettings
from evaluation.trial import TrialResult, total_cost
from tasks.caching import StageSpec
from tasks.errors import CommandError
from tasks.evaluate_job import CellJob, endpoint_identity, kept_rollout, run_trials, why_unfinished
from tasks.policies import Policy
from tasks.real_tasks import open_dataset
from tasks.stages import Body, StageRun, Unfinished

TRAJECTORIES, SUMMARY = "rollouts.parquet", "summary.json"


class CollectSettings(Settings):
    """A stronger model whose solved trials become SFT data. It acts under the experiment's `agent`."""

    endpoint: EndpointSettings = Field(description="the endpoint of the stronger model")
    dataset: DatasetSettings = Field(description="the real tasks that it solves")
    repeats: int = Field(1, ge=1, description="attempts per task")
    min_reward: float = Field(1.0, gt=0, le=1, description="least reward of a trial that is kept; 1 = solved")


def collect_job(settings: CollectSettings, agent: AgentSettings, name: str | None) -> CellJob:
    """The trials: one cell under the agent's own window, cap and keep_recent. Raises UserError for no dataset."""
    compaction = agent.compaction
    (cell,) = product_cells(
        (compaction.window,), (compaction.cap,), (compaction.keep_recent,),
        variant=settings.endpoint.model, seed=0, temperature=agent.temperature,
    )  # fmt: skip
    policy = {"endpoint": endpoint_identity(settings.endpoint)}
    return CellJob(cell, agent, open_dataset(settings.dataset), settings.dataset, settings.repeats, policy, name)


def spec(job: CellJob, min_reward: float) -> StageSpec:
    """The stage's name by content: that of its trials, and which of them are kept."""
    return StageSpec("collect", job.cell.name, {**job.spec().settings, "min_reward": min_reward})


def body(job: CellJob, policy: Policy, folder: Path, settings: JobSettings, min_reward: float) -> Body:
    """Runs the trials that have no valid result; the result is the summary, Unfinished while any lacks."""

    async def run(stage: StageRun) -> dict[str, Any] | Unfinished:
        trials, outcome = await run_trials(job, policy, folder, settings, stage)
        kept = [r for r in outcome.results if r.reward is not None and r.reward >= min_reward]
        summary = summarize(outcome.results, kept, len(trials.trials))
        stage.log(summary["tried"], {f"collect/{k}": v for k, v in summary.items() if v is not None}, {})
        if not kept:
            stopped = f" ({why_unfinished(trials, outcome)})" if not outcome.complete else ""
            raise CommandError(
                f"none of {summary['tried']} trials reached a reward of {min_reward:g}{stopped}: there is nothing to "
                f"train on. The trials are in {folder}. Take a stronger model or easier tasks, try each more often "
                "(--repeats), or keep what is partly solved (--set collect.min_reward=0.5)"
            )
        write_rollouts(stage.folder / TRAJECTORIES, _rollouts(trials, kept))
        write_durably(stage.folder / SUMMARY, json.dumps(summary, indent=1))
        return summary if outcome.complete else Unfinished(summary, why_unfinished(trials, outcome))

    return run


def summarize(results: Sequence[TrialResult], kept: Sequence[TrialResult], trials: int) -> dict[str, Any]:
    """Counts of trials, tokens over all of them, dollars (None where a price is unknown)."""
    scored = [r for r in results if r.reward is not None]
    return {
        "trials": trials,
        "tried": len(results),
        "without_reward": len(results) - len(scored),
        "solved": sum(r.reward == 1 for r in scored),
        "tasks_solved": len({r.key.task for r in scored if r.reward == 1}),
        "kept": len(kept),
        "kept_compacted": sum(r.compactions > 0 for r in kept),
        "prompt_tokens": sum(r.prompt_tokens for r in results),
        "cached_tokens": sum(r.cached_tokens for r in results),
        "generated_tokens": sum(r.generated_tokens for r in results),
        "cost": total_cost(results),
    }


def _rollouts(job: Job, kept: Sequence[TrialResult]) -> list[Rollout]:
    """With the tasks' texts, which trials of earlier versions did not keep."""
    texts = {trial.key: trial.task.instruction for trial in job.trials}
    return [replace(kept_rollout(job, r.key), instruction=texts[r.key]) for r in kept]
