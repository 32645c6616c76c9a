from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from evaluation.analysis.tables import headline_metrics
from evaluation.grid import Cell
from evaluation.results import CellResult
from tasks.errors import CommandError
from tasks.processes import ProcessId
from tasks.tracking import (
    TAGS,
    Tracker,
    client_for,
    end_dead_runs,
    git_state,
    initialise_database,
    log_cell_result,
)
from tests.evaluation.synthetic import PRESET, make_cell

CONFIG = {"name": "t", "agent": {"compaction": {"window": 512, "cap": 2}}, "seeds": [0, 1]}


def opened(uri: str, tmp_path: Path, digest: str = "abc", **tags: str | None) -> AbstractContextManager[Tracker]:
    return Tracker.open(
        uri,
        preset="t",
        config=CONFIG,
        config_digest=digest,
        artifacts=tmp_path / "artifacts",
        name="run",
        tags=tags,
    )


def status(uri: str, run_id: str) -> str:
    return str(client_for(uri).get_run(run_id).info.status)


def history(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client_for(uri).get_metric_history(run_id, name)]


def cell_result(**changes: object) -> CellResult:
    values: dict[str, object] = {
        "variant": "compactionrl", "seed": 0, "window": 512, "cap": 2, "keep_recent": 1, "temperature": 1.0,
        "repeats": 1, "n_tasks": 4, "n_trials": 4, "scored": 4, "errored": 0, "error_classes": {},
        "pass_at_1": 0.75, "pass_at_1_std": None, "ci_low": 0.25, "ci_high": 1.0, "pass_at_1_compacted": 0.5,
        "pass_at_1_uncompacted": 1.0, "compacted_share": 0.5, "compactions_per_rollout": 0.5, "summary_tokens": 21.5,
        "rejected_summaries": 0, "turns": 6.0, "generated_tokens": 40.0, "coverage": 1.0, "commands": 5.0,
            "repeated_commands": 0.0, "prompt_tokens": 90.0, "cached_tokens": 0.0, "cost": None,
            "count_sources": {"exact": 4}, "stop_reasons": {"finished": 4},
        "task_scores": {"a": 0.75}, "task_summary_tokens": {"a": 21.5},
    }  # fmt: skip
    return CellResult.model_validate(values | changes)


def test_parent_stage_and_cell_are_nested_and_finish(mlflow_uri: str, tmp_path: Path) -> None:
    with opened(mlflow_uri, tmp_path, prefect_flow_run_id="f-1", dataset=None) as tracker:
        with tracker.stage("ppo", "compactionrl/seed 0", {"variant": "compactionrl"}) as stage:
            stage.log_step(0, {"train/reward": 0.5})
        with tracker.cell("compactionrl 512", {"window": 512}) as cell:
            pass
    client = client_for(mlflow_uri)
    parent = client.get_run(tracker.parent.run_id)
    assert parent.info.status == "FINISHED"
    assert client.get_experiment(parent.info.experiment_id).name == "compactionrl/t"
    assert parent.data.params["agent.compaction.window"] == "512"
    assert parent.data.tags["prefect_flow_run_id"] == "f-1"
    assert "dataset" not in parent.data.tags
    for run in (stage, cell):
        data = client.get_run(run.run_id)
        assert data.data.tags["mlflow.parentRunId"] == tracker.parent.run_id
        assert data.data.tags["config_digest"] == "abc"
        assert data.info.status == "FINISHED"
    assert client.get_run(stage.run_id).data.tags["variant"] == "compactionrl"
    config = client.download_artifacts(tracker.parent.run_id, "config.yaml")
    assert "window: 512" in Path(config).read_text()


@pytest.mark.parametrize(
    ("error", "expected"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")]
)
def test_what_ends_a_run_decides_its_status(
    mlflow_uri: str, tmp_path: Path, error: type[BaseException], expected: str
) -> None:
    with pytest.raises(error), opened(mlflow_uri, tmp_path) as tracker, tracker.stage("sft", "") as stage:
        raise error
    assert status(mlflow_uri, tracker.parent.run_id) == expected
    assert status(mlflow_uri, stage.run_id) == expected


def test_a_resume_reopens_parent_and_stage_and_logs_each_step_once(mlflow_uri: str, tmp_path: Path) -> None:
    def first_attempt() -> None:
        for step in range(4):
            stage.log_step(step, {"train/reward": step / 10})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), opened(mlflow_uri, tmp_path) as first, first.stage("ppo", "s0") as stage:
        first_attempt()
    with opened(mlflow_uri, tmp_path) as second, second.stage("ppo", "s0") as again:
        for step in range(2, 6):
            again.log_step(step, {"train/reward": step / 10})
    assert (second.parent.run_id, again.run_id) == (first.parent.run_id, stage.run_id)
    assert [step for step, _ in history(mlflow_uri, stage.run_id, "train/reward")] == list(range(6))
    assert status(mlflow_uri, stage.run_id) == "FINISHED"


def test_a_finished_run_and_one_of_another_configuration_are_not_reopened(mlflow_uri: str, tmp_path: Path) -> None:
    with opened(mlflow_uri, tmp_path) as first:
        pass
    with pytest.raises(ZeroDivisionError), opened(mlflow_uri, tmp_path, digest="other") as other:
        raise ZeroDivisionError
    with opened(mlflow_uri, tmp_path) as second:
        pass
    assert len({first.parent.run_id, other.parent.run_id, second.parent.run_id}) == 3


def test_a_run_that_is_still_going_is_not_taken_over(mlflow_uri: str, tmp_path: Path) -> None:
    with opened(mlflow_uri, tmp_path) as first, opened(mlflow_uri, tmp_path) as second:
        assert first.parent.run_id != second.parent.run_id


def test_non_finite_metrics_are_left_out_and_counted(mlflow_uri: str, tmp_path: Path) -> None:
    with opened(mlflow_uri, tmp_path) as tracker, tracker.stage("ppo", "") as stage:
        stage.log_step(0, {"a": math.nan, "b": math.inf, "c": 1.0, "d": None})
    run = client_for(mlflow_uri).get_run(stage.run_id)
    assert run.data.metrics == {"c": 1.0}
    assert run.data.tags["skipped_non_finite"] == "2"


def test_more_params_than_one_batch_takes(mlflow_uri: str, tmp_path: Path) -> None:
    with opened(mlflow_uri, tmp_path) as tracker, tracker.cell("c", {f"p{i}": i for i in range(230)}) as cell:
        pass
    assert len(client_for(mlflow_uri).get_run(cell.run_id).data.params) == 230


def test_a_cell_logs_its_axes_as_params_and_as_metrics(mlflow_uri: str, tmp_path: Path) -> None:
    with opened(mlflow_uri, tmp_path) as tracker:
        with tracker.cell("with", {"cap": 2, "keep_recent": 1}) as cell:
            log_cell_result(cell, cell_result())
        with tracker.cell("without", {"cap": 0, "keep_recent": None}) as single:
            log_cell_result(single, cell_result(cap=0, keep_recent=None, summary_tokens=None))
    client = client_for(mlflow_uri)
    metrics = client.get_run(cell.run_id).data.metrics
    assert {k: metrics[k] for k in ("sweep/window", "sweep/cap", "sweep/keep_recent")} == {
        "sweep/window": 512, "sweep/cap": 2, "sweep/keep_recent": 1,
    }  # fmt: skip
    assert metrics["eval/pass_at_1"] == 0.75
    assert metrics["eval/summary_tokens"] == 21.5
    assert "eval/pass_at_1_std" not in metrics
    params = [set(client.get_run(run.run_id).data.params) for run in (cell, single)]
    assert params[0] == params[1]
    assert "sweep/keep_recent" not in client.get_run(single.run_id).data.metrics


@pytest.mark.parametrize("model", ["/data/models/Qwen3", "./m", "@cf/meta/llama", "claude@2024", "a+b,1", "x" * 300])
def test_a_headline_about_a_model_of_any_name_is_taken(mlflow_uri: str, tmp_path: Path, model: str) -> None:
    cell = make_cell(Cell(model, 0, PRESET.window, PRESET.cap, PRESET.keep_recent), 0.5, n_tasks=2)
    with opened(mlflow_uri, tmp_path) as tracker:
        tracker.parent.log_step(0, headline_metrics([cell], PRESET))
    run = client_for(mlflow_uri).get_run(tracker.parent.run_id)
    assert list(run.data.metrics.values()) == [0.5]


def test_a_reused_stage_is_linked(mlflow_uri: str, tmp_path: Path) -> None:
    with opened(mlflow_uri, tmp_path) as tracker:
        tracker.link_cached("sft seed 0", "old-run")
        tracker.link_cached("critic", None)
    tags = client_for(mlflow_uri).get_run(tracker.parent.run_id).data.tags
    assert tags["cached/sft_seed_0"] == "old-run"
    assert "cached/critic" not in tags


def test_runs_of_dead_processes_are_ended_and_living_ones_left(mlflow_uri: str, tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessId.of(gone.pid)
    gone.communicate()
    with opened(mlflow_uri, tmp_path) as tracker, tracker.stage("ppo", "") as living:
        client = client_for(mlflow_uri)
        dead = client.create_run(tracker.parent.experiment_id).info.run_id
        elsewhere = client.create_run(tracker.parent.experiment_id).info.run_id
        for run_id, host in ((dead, identity.host), (elsewhere, "another-host")):
            client.set_tag(run_id, TAGS["host"], host)
            client.set_tag(run_id, TAGS["pid"], str(identity.pid))
            client.set_tag(run_id, TAGS["created"], repr(identity.created))
        assert end_dead_runs(mlflow_uri) == [dead]
        assert status(mlflow_uri, dead) == "KILLED"
        assert status(mlflow_uri, living.run_id) == status(mlflow_uri, elsewhere) == "RUNNING"
    assert end_dead_runs(mlflow_uri) == []


def test_threads_log_to_the_run_they_name(mlflow_uri: str, tmp_path: Path) -> None:
    with opened(mlflow_uri, tmp_path) as tracker:

        def one(i: int) -> str:
            with tracker.cell(f"cell {i}", {"i": i}) as cell:
                cell.log_step(0, {"value": i})
            return cell.run_id

        with ThreadPoolExecutor(3) as pool:
            ids = list(pool.map(one, range(6)))
    runs = [client_for(mlflow_uri).get_run(run_id) for run_id in ids]
    assert [run.data.metrics["value"] for run in runs] == list(range(6))


def test_a_database_that_is_not_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database, and long enough to be looked at " * 40)
    with pytest.raises(CommandError, match=r"MLflow cannot open .*mlflow\.db"):
        client_for(f"sqlite:///{tmp_path / 'mlflow.db'}")


def test_an_existing_database_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("kept")
    initialise_database(tmp_path / "mlflow.db", tmp_path / "artifacts")
    assert (tmp_path / "mlflow.db").read_text() == "kept"


def test_git_state_of_a_checkout_and_of_none(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {}

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
            check=True,
            capture_output=True,
            env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull},
        )

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    git_state.cache_clear()
    assert git_state(tmp_path)["git_dirty"] == "false"
    (tmp_path / "a").write_text("2")
    git_state.cache_clear()
    assert git_state(tmp_path)["git_dirty"] == "true"
    assert git_state(tmp_path / "below") == {}
