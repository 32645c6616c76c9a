"""The whole path on the `smoke` preset: real Prefect, Ray, MLflow, engine and trainer, from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.results import CellResult
from flows.experiment import CHANGES, load_experiment
from flows.plan import Plan
from tasks.caching import StageStore
from tests.processes import PATIENCE, processes_of

pytestmark = pytest.mark.xdist_group("reproduce")

SMOKE = ["reproduce", "--preset", "smoke", "--set", "evaluation.n_tasks=6", "--variants", "base,compactionrl"]
COMMAND = """
import atexit, sys
heavy = ("torch", "ray", "transformers")
atexit.register(lambda: print("imported:", *(m for m in heavy if m in sys.modules), file=sys.stderr))
from flows.cli import main
main()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    yield home
    for process in processes_of(home):  # none, unless a test failed half-way
        process.kill()


@pytest.fixture(scope="module")
def first(home: Path) -> dict:
    """The object of the first run."""
    return ended(start(home, *SMOKE, "--json"), 0)


def start(home: Path, *arguments: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "PREFECT_HOME")}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        env={**kept, "COMPACTIONRL_HOME": str(home)},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], code: int) -> dict:
    """The JSON object of a command that must end with `code`."""
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err[-3000:]
    result = json.loads(out)
    result["stderr"] = err
    return result


def test_one_command_trains_evaluates_and_reports(home: Path, first: dict) -> None:
    cells = [CellResult.model_validate(cell) for cell in first["results"]]
    expected = [c for variant in ("base", "compactionrl") for c in Plan(smoke()).cells(variant, 0)]  # type: ignore[arg-type]
    assert [cell.cell for cell in cells] == expected
    assert all(cell.scored == cell.n_trials == 6 for cell in cells)
    assert [stage["name"] for stage in first["stages"]].count("evaluate") == len(cells)
    assert {stage["name"] for stage in first["stages"]} == {"sft", "critic", "ppo", "evaluate"}
    assert not any(stage["cached"] for stage in first["stages"])
    run = next(home.glob("runs/*"))
    assert "<svg" in (run / "report.html").read_text()
    assert json.loads((run / "run.json").read_text())["status"] == "ok"
    assert first["provenance"]["versions"]["torch"]


def test_each_trained_checkpoint_has_a_card_with_its_scores(home: Path, first: dict) -> None:
    cards = {
        path.parents[1].name.split("-")[0]: path.read_text() for path in home.glob("stages/*/checkpoint/README.md")
    }
    assert set(cards) == {"sft", "ppo"}
    for stage, variant in (("sft", "base"), ("ppo", "compactionrl")):
        own = [c for c in map(CellResult.model_validate, first["results"]) if (c.variant, c.window) == (variant, 128)]
        for cap in (0, 4):
            cell = next(c for c in own if c.cap == cap and c.keep_recent in (None, 1))
            assert f"| ×{cap + 1} | {cell.pass_at_1:.3f} [" in cards[stage]
    assert first["warnings"] == []


def own_point(cell: dict) -> bool:
    return (cell["window"], cell["cap"], cell["keep_recent"]) == (128, 4, 1)


def test_mlflow_holds_a_parent_with_a_child_per_stage_and_cell(home: Path, first: dict) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("compactionrl/smoke")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == first["mlflow_run_id"]]
    assert len(children) == len(first["stages"])
    assert {r.info.status for r in runs} == {"FINISHED"}
    cells = [r for r in children if r.data.tags["kind"] == "cell"]
    assert len({frozenset(r.data.params) for r in cells}) == 1  # the same params in every cell
    assert {r.info.run_id for r in cells} == {cell["mlflow_run_id"] for cell in first["results"]}
    assert all("sweep/window" in r.data.metrics and "eval/pass_at_1" in r.data.metrics for r in cells)
    parent = client.get_run(first["mlflow_run_id"]).data.metrics
    scores = {f"pass_at_1/{c['variant']}": c["pass_at_1"] for c in first["results"] if own_point(c)}
    assert {name: parent[name] for name in scores} == pytest.approx(scores)
    gain = parent["pass_at_1/compactionrl"] - parent["pass_at_1/base"]
    assert parent["gain/compactionrl"] == pytest.approx(gain)
    ppo = next(r for r in children if r.data.tags.get("stage") == "ppo")
    history = client.get_metric_history(ppo.info.run_id, "train/logprob_mismatch")
    assert [m.step for m in history] == [0, 1, 2, 3]
    assert max(m.value for m in history) < 1e-5


def test_a_second_run_finds_everything_and_imports_neither_torch_nor_ray(home: Path, first: dict) -> None:
    again = ended(start(home, *SMOKE, "--json"), 0)
    assert all(stage["cached"] for stage in again["stages"])
    assert again["results"] == first["results"]
    assert again["stderr"].strip().endswith("imported:")


def test_what_was_run_can_be_shown_and_reported_again(home: Path, first: dict) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", COMMAND, "show", "latest", "--rollout", "0"],
        env={**os.environ, "COMPACTIONRL_HOME": str(home)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert "task trail-" in shown.stdout
    assert "stopped: " in shown.stdout


def test_a_dry_run_tells_what_is_cached_and_what_would_run_and_why(home: Path, first: dict) -> None:
    plan = Plan(smoke("ppo.steps=5")).look_up(StageStore(home / "stages"), force=False)
    why = {
        planned.spec.stage: planned.why
        for planned in plan
        if planned.spec.label.startswith(("seed", "cap", "compactionrl seed"))
    }
    assert why["sft"] == "unchanged"
    assert "ppo.steps 4 → 5" in why["ppo"]


def smoke(*overrides: str):
    return load_experiment("smoke", ["variants=base,compactionrl", "evaluation.n_tasks=6", *overrides])


@pytest.mark.parametrize("variant", sorted(CHANGES))
def test_every_variant_is_the_preset_with_its_changes(variant: str) -> None:
    experiment = load_experiment("tiny")
    training = experiment.training(variant, 0)  # type: ignore[arg-type]
    changes = CHANGES[variant]  # type: ignore[index]
    assert training.agent.mode == "training"
    assert (training.agent.compaction.cap == 0) == (changes.get("compaction", {}).get("cap") == 0)
    assert training.ppo.train_summaries == (variant != "no-summary-loss")
    assert (training.trainer.loss.mean == "segment") == (variant == "segment-mean")
    assert (training.ppo.group_size > 1) == (training.ppo.advantage.estimator == "group")
    if variant == "no-compaction-long":
        assert training.agent.compaction.window == experiment.long_window
    if variant == "compactionrl":
        assert training.ppo == experiment.ppo


def test_variants_that_roll_out_alike_share_one_critic() -> None:
    plan = Plan(load_experiment("tiny"))
    shared = {plan.critic(v, 0).digest for v in ("compactionrl", "no-summary-loss", "segment-mean")}  # type: ignore[union-attr]
    assert len(shared) == 1
    assert plan.critic("no-compaction-long", 0).digest not in shared  # type: ignore[union-attr]
    assert plan.critic("supo", 0) is None
