"""Stage `evaluate` on the trail world: the trials of one cell, with a policy that serves all cells of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from compaction.rollout import Rollout
from compaction.settings import AgentSettings
from compaction.storage import write_rollouts
from compaction.summaries import load_prompt_pack
from evaluation.grid import Cell
from evaluation.results import CellResult, summarize_cell
from evaluation.tasksets.trail import Split, TrailSettings, trail_tasks
from evaluation.trial import TrialResult, trial_result
from rl.requests import RolloutRequest, rollout_seed
from tasks.caching import StageOutcome, StageSpec
from tasks.policies import CheckpointPolicy
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
    "tasks/policies.py",
    "tasks/wiring.py",
)
TASK_SEED = 0
"""The evaluation tasks are the same for every variant, training seed and cell: comparisons are paired"""
KEPT_ROLLOUTS = 12
TRACED_ROLLOUTS = 3
CHUNK = 128
"""Trials handed to the worker at a time: the score so far is told after each"""
TRIALS = TypeAdapter(list[TrialResult])


def spec(
    cell: Cell,
    policy: StageSpec,
    agent: AgentSettings,
    world: TrailSettings,
    split: Split,
    n_tasks: int,
    repeats: int,
    engine: dict[str, Any],
) -> StageSpec:
    """The cell's name by content. The policy comes in as its stage's digest; `engine` says what serves it."""
    return StageSpec(
        stage="evaluate",
        label=cell.name,
        settings={
            "cell": {"window": cell.window, "cap": cell.cap, "keep_recent": cell.keep_recent},
            "variant": cell.variant,
            "seed": cell.seed,
            "agent": cell_agent(cell, agent).model_dump(mode="json"),
            "prompts": load_prompt_pack(agent.compaction.prompt_pack).model_dump(),
            "world": world.model_dump(mode="json"),
            "split": split,
            "n_tasks": n_tasks,
            "repeats": repeats,
            "engine": engine,
        },
        parents={"policy": policy.digest},
        packages=SOURCES,
    )


def cell_agent(cell: Cell, agent: AgentSettings) -> AgentSettings:
    """The agent as this cell evaluates it."""
    return agent.model_copy(
        update={"compaction": cell.settings(agent.compaction), "temperature": cell.temperature, "mode": "evaluation"}
    )


def params(cell: Cell, agent: AgentSettings, dataset: str, n_tasks: int, repeats: int) -> dict[str, Any]:
    """What every cell's MLflow run holds, under the same keys."""
    return {
        "dataset": dataset,
        "variant": cell.variant,
        "seed": cell.seed,
        "window": cell.window,
        "cap": cell.cap,
        "keep_recent": cell.keep_recent,
        "n_tasks": n_tasks,
        "repeats": repeats,
        "agent": cell_agent(cell, agent).model_dump(mode="json"),
    }


def body(
    cell: Cell,
    agent: AgentSettings,
    world: TrailSettings,
    split: Split,
    n_tasks: int,
    repeats: int,
    policy: CheckpointPolicy,
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
        await policy.ready()
        rollouts: list[Rollout] = []
        for start in range(0, len(requests), CHUNK):
            finished = partial(_show_finished, stage, start)
            rollouts += await policy.rollouts(requests[start : start + CHUNK], finished)
            stage.progress.update(len(rollouts), _so_far(rollouts))
        results = [trial_result(key, rollout) for (key, _), rollout in zip(trials, rollouts, strict=True)]
        return record(cell, results, [rollouts[i] for i in worth_reading(results)], stage)

    return run


def _show_finished(stage: StageRun, before: int, finished: int) -> None:
    stage.progress.update(before + finished)


def _so_far(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards = [r.outcome.reward for r in rollouts if r.outcome.reward is not None]
    return {"pass_at_1": sum(rewards) / len(rewards)} if rewards else {}


def record(cell: Cell, results: Sequence[TrialResult], kept: Sequence[Rollout], stage: StageRun) -> dict[str, Any]:
    """Writes the cell's trials and the rollouts that are kept, logs its result and some traces, and returns it."""
    from tasks.traces import log_rollouts

    summary = summarize_cell(cell, results, mlflow_run_id=stage.tracked.run_id)
    (stage.folder / "trials.json").write_bytes(TRIALS.dump_json(list(results)))
    write_rollouts(stage.folder / "rollouts.parquet", kept)
    log_cell_result(stage.tracked, summary)
    log_rollouts(stage.tracked, kept[:TRACED_ROLLOUTS])
    dumped: dict[str, Any] = json.loads(summary.model_dump_json())
    return dumped


def worth_reading(results: Sequence[TrialResult]) -> list[int]:
    """Numbers of a few trials to read: the most compacted first, failures and successes alike."""
    by_outcome: dict[bool, list[int]] = {True: [], False: []}
    for i in sorted(range(len(results)), key=lambda i: (-results[i].compactions, results[i].key.task)):
        by_outcome[bool(results[i].reward)].append(i)
    half = KEPT_ROLLOUTS // 2
    mixed = [i for pair in zip(by_outcome[True][:half], by_outcome[False][:half], strict=False) for i in pair]
    rest = [i for group in by_outcome.values() for i in group if i not in mixed]
    return (mixed + rest)[:KEPT_ROLLOUTS]


def cell_result(outcome: StageOutcome) -> CellResult:
    """The result that a finished cell carries."""
    return CellResult.model_validate(outcome.result)
