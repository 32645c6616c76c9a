"""Cells on a real worker: what they leave, the same tasks for all, one worker for all cells of a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compaction.storage import read_rollouts
from evaluation.grid import Cell
from tasks import evaluate
from tasks.caching import StageSpec
from tasks.cluster import Cluster
from tasks.evaluate import TRIALS, cell_agent
from tasks.policies import CheckpointPolicy
from tasks.progress import open_progress
from tasks.stages import StageRun
from tasks.tracking import Tracker
from tests.rl.small import WORLD, agent_settings, serving

pytestmark = pytest.mark.xdist_group("ray")
CELL = Cell("compactionrl", 0, 128, 2, 1)


@pytest.fixture
def tracker(mlflow_uri: str, tmp_path: Path) -> Iterator[Tracker]:
    opened = Tracker.open(
        mlflow_uri, preset="t", config={}, config_digest="d", artifacts=tmp_path / "artifacts", name="run", tags={}
    )
    with opened as tracker:
        yield tracker


def evaluated(
    cell: Cell, checkpoint: Path, policy: CheckpointPolicy, tracker: Tracker, folder: Path
) -> tuple[dict[str, Any], Any]:
    agent = agent_settings(checkpoint)
    folder.mkdir()
    body = evaluate.body(cell, agent, WORLD, "validation", 5, 2, policy)
    with (
        open_progress("log") as progress,
        progress.stage(cell.name, 10, "trials") as shown,
        tracker.cell(cell.name, evaluate.params(cell, agent, "trail/validation", 5, 2)) as run,
    ):
        return asyncio.run(body(StageRun(folder, run, shown))), run


def test_cells_share_tasks_and_worker_and_leave_trials_rollouts_and_metrics(
    small_checkpoint: Path, ray_cluster: Cluster, tracker: Tracker, tmp_path: Path
) -> None:
    policy = CheckpointPolicy(lambda: serving(small_checkpoint), ray_cluster, slots=4, rollout_timeout=60.0)
    result, run = evaluated(CELL, small_checkpoint, policy, tracker, tmp_path / "a")
    other = Cell("compactionrl", 0, 128, 0, None)
    evaluated(other, small_checkpoint, policy, tracker, tmp_path / "b")
    again, _ = evaluated(CELL, small_checkpoint, policy, tracker, tmp_path / "c")
    asyncio.run(policy.close())

    assert (result["n_tasks"], result["n_trials"], result["repeats"]) == (5, 10, 2)
    assert result["mlflow_run_id"] == run.run_id
    assert {**again, "mlflow_run_id": run.run_id} == result, "a cell depends on nothing that ran before it"
    trials, others = (TRIALS.validate_json((tmp_path / name / "trials.json").read_bytes()) for name in "ab")
    assert [(t.key.task, t.key.repeat) for t in trials] == [(t.key.task, t.key.repeat) for t in others]
    assert {t.key.dataset for t in trials} == {"trail/validation"}
    rollouts = read_rollouts(tmp_path / "a" / "rollouts.parquet")
    assert 0 < len(rollouts) <= evaluate.KEPT_ROLLOUTS
    assert {r.settings for r in rollouts} == {cell_agent(CELL, agent_settings(small_checkpoint))}
    metrics = run.client.get_run(run.run_id).data.metrics
    assert (metrics["sweep/window"], metrics["sweep/cap"], metrics["sweep/keep_recent"]) == (128.0, 2.0, 1.0)
    assert metrics["eval/pass_at_1"] == result["pass_at_1"]


def test_a_worker_that_was_never_needed_starts_and_stops_nothing(tmp_path: Path) -> None:
    cluster = Cluster(None, "test", tmp_path / "logs")
    asyncio.run(CheckpointPolicy(lambda: serving(tmp_path), cluster, slots=1, rollout_timeout=60.0).close())
    assert not (tmp_path / "logs").exists()


def test_a_cells_settings_and_policy_name_it(small_checkpoint: Path) -> None:
    agent, policy = agent_settings(small_checkpoint), StageSpec("ppo", "p", {"a": 1})

    def digest(cell: Cell = CELL, policy: StageSpec = policy, n_tasks: int = 5) -> str:
        return evaluate.spec(cell, policy, agent, WORLD, "test", n_tasks, 1, {"name": "torch"}).digest

    assert digest() == digest()
    others = {
        digest(Cell("compactionrl", 0, 128, 1, 1)),
        digest(Cell("compactionrl", 0, 128, 2, 0)),
        digest(policy=StageSpec("ppo", "p", {"a": 2})),
        digest(n_tasks=6),
    }
    assert len(others | {digest()}) == 5


def test_a_cell_is_evaluated_with_retries_at_its_temperature() -> None:
    agent = cell_agent(Cell("base", 0, 100, 0, None, 0.0), agent_settings(Path("x"), keep_recent=2))
    assert (agent.mode, agent.temperature) == ("evaluation", 0.0)
    assert (agent.compaction.window, agent.compaction.cap, agent.compaction.keep_recent) == (100, 0, 2)
