"""Stage `evaluate`: the trials of one cell, on a worker that serves all cells of one checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from compaction.rollout import Rollout
from compaction.settings import AgentSettings
from compaction.storage import write_rollouts
from evaluation.grid import Cell
from evaluation.results import CellResult, summarize_cell
from evaluation.tasksets.trail import Split, TrailSettings, TrailTask, trail_tasks
from evaluation.trial import TrialKey, TrialResult, trial_result
from rl.requests import RolloutRequest, rollout_seed
from tasks.caching import StageOutcome, StageSpec
from tasks.cluster import Cluster
from tasks.stages import Body, StageRun
from tasks.tracking import log_cell_result
from tasks.wiring import ROLLOUT_SOURCES

SOURCES = (
    *ROLLOUT_SOURCES,
    "evaluation/grid.py",
    "evaluation/results.py",
    "evaluation/trial.py",
    "evaluation/analysis/statistics.py",
    "rl/models.py",
    "tasks/evaluate.py",
    "tasks/wiring.py",
)
TASK_SEED = 0
"""The evaluation tasks are the same for every variant, training seed and cell: comparisons are paired"""
KEPT_ROLLOUTS = 12
TRACED_ROLLOUTS = 3
CHUNK = 128
"""Trials handed to the worker at a time: progress is told after each"""
TRIALS = TypeAdapter(list[TrialResult])


def spec(
    cell: Cell, policy: StageSpec, agent: AgentSettings, world: TrailSettings, split: Split, n_tasks: int, repeats: int
) -> StageSpec:
    """The cell's name by content. The policy comes in as its stage's digest."""
    return StageSpec(
        stage="evaluate",
        label=cell.name,
        settings={
            "cell": {"window": cell.window, "cap": cell.cap, "keep_recent": cell.keep_recent},
            "variant": cell.variant,
            "seed": cell.seed,
            "agent": cell_agent(cell, agent).model_dump(mode="json"),
            "world": world.model_dump(mode="json"),
            "split": split,
            "n_tasks": n_tasks,
            "repeats": repeats,
        },
        parents={"policy": policy.digest},
        packages=SOURCES,
    )


def cell_agent(cell: Cell, agent: AgentSettings) -> AgentSettings:
    """The agent as this cell evaluates it."""
    return agent.model_copy(
        update={"compaction": cell.settings(agent.compaction), "temperature": cell.temperature, "mode": "evaluation"}
    )


def params(cell: Cell, agent: AgentSettings, n_tasks: int, repeats: int) -> dict[str, Any]:
    """What every cell's MLflow run holds, under the same keys."""
    return {
        "variant": cell.variant,
        "seed": cell.seed,
        "window": cell.window,
        "cap": cell.cap,
        "keep_recent": cell.keep_recent,
        "n_tasks": n_tasks,
        "repeats": repeats,
        "agent": cell_agent(cell, agent).model_dump(mode="json"),
    }


class EvaluationWorker:
    """The rollout worker of one checkpoint, started for the first cell that has to run."""

    def __init__(
        self, checkpoint: Path, cluster: Cluster, *, slots: int, max_length: int, rollout_timeout: float
    ) -> None:
        self._checkpoint, self._cluster = checkpoint, cluster
        self._slots, self._max_length, self._rollout_timeout = slots, max_length, rollout_timeout
        self._worker: Any = None

    async def rollouts(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        self._cluster.ensure()
        from rl.workers import RolloutWorker, TorchServing

        if self._worker is None:
            serving = TorchServing(self._checkpoint, self._slots, self._max_length)
            self._worker = RolloutWorker(serving, slots=self._slots, rollout_timeout=self._rollout_timeout)
        rollouts: list[Rollout] = await self._worker.rollouts(requests)
        return rollouts

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()


def body(
    cell: Cell,
    agent: AgentSettings,
    world: TrailSettings,
    split: Split,
    n_tasks: int,
    repeats: int,
    worker: EvaluationWorker,
) -> Body:
    """Writes `trials.json` and a sample of rollouts; the result is the cell's CellResult."""

    async def run(stage: StageRun) -> dict[str, Any]:
        settings = cell_agent(cell, agent)
        trials = [
            (cell.trial_key(f"trail/{split}", task.id, repeat), task)
            for task in trail_tasks(world, split, n_tasks, TASK_SEED)
            for repeat in range(repeats)
        ]
        requests = [
            RolloutRequest(f"{key.task}-{key.repeat}", task, rollout_seed("evaluate", cell.seed, key.repeat), settings)
            for key, task in trials
        ]
        rollouts: list[Rollout] = []
        for start in range(0, len(requests), CHUNK):
            rollouts += await worker.rollouts(requests[start : start + CHUNK])
            stage.progress.update(len(rollouts), _so_far(rollouts))
        return _record(cell, trials, rollouts, stage)

    return run


def _so_far(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards = [r.outcome.reward for r in rollouts if r.outcome.reward is not None]
    return {"pass_at_1": sum(rewards) / len(rewards)} if rewards else {}


def _record(
    cell: Cell, trials: Sequence[tuple[TrialKey, TrailTask]], rollouts: Sequence[Rollout], stage: StageRun
) -> dict[str, Any]:
    from tasks.traces import log_rollouts

    results = [trial_result(key, rollout) for (key, _), rollout in zip(trials, rollouts, strict=True)]
    summary = summarize_cell(cell, results, mlflow_run_id=stage.tracked.run_id)
    (stage.folder / "trials.json").write_bytes(TRIALS.dump_json(results))
    sample = _sample(rollouts)
    write_rollouts(stage.folder / "rollouts.parquet", sample)
    log_cell_result(stage.tracked, summary)
    log_rollouts(stage.tracked, sample[:TRACED_ROLLOUTS])
    dumped: dict[str, Any] = json.loads(summary.model_dump_json())
    return dumped


def _sample(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """A few to read: the most compacted first, failures and successes alike."""
    by_outcome: dict[bool, list[Rollout]] = {True: [], False: []}
    for rollout in sorted(rollouts, key=lambda r: (-r.n_compactions, r.id)):
        by_outcome[bool(rollout.outcome.reward)].append(rollout)
    half = KEPT_ROLLOUTS // 2
    mixed = [r for pair in zip(by_outcome[True][:half], by_outcome[False][:half], strict=False) for r in pair]
    rest = [r for group in by_outcome.values() for r in group if r not in mixed]
    return (mixed + rest)[:KEPT_ROLLOUTS]


def cell_result(outcome: StageOutcome) -> CellResult:
    """The result that a finished cell carries."""
    return CellResult.model_validate(outcome.result)
