"""Runs made by hand, with real cell results and stage manifests."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from evaluation.grid import Cell
from flows.cli import app
from flows.compare import compare_runs
from flows.experiment import load_experiment
from flows.plan import Plan
from flows.reproduce import provenance
from flows.runs import RunFolder, create_run
from flows.services import Home
from tasks.caching import Manifest
from tasks.errors import CommandError, UserError
from tests.evaluation.synthetic import make_cell

REWARDS = {"train/reward": [0.2, 0.5], "rollout/summary_tokens": [9.0, None]}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").create()


def finished(
    home: Home, name: str, score: float, *overrides: str, variants: str = "base", repeats: int = 1, made: str = ""
) -> RunFolder:
    """A run of one seed with a cell per variant and one PPO stage."""
    experiment = load_experiment("smoke", list(overrides))
    run = create_run(home, name, f"compactionrl reproduce --preset {name}", experiment.model_dump(mode="json"))
    cells = [
        make_cell(Cell(v, 0, 512, 3, 1), score, n_tasks=40, repeats=repeats).model_copy(
            update={"mlflow_run_id": f"{made or name}-{v}"}
        )
        for v in variants.split(",")
    ]
    stage = home.stages / f"ppo-{name}"
    stage.mkdir()
    manifest = Manifest("ppo", "compactionrl seed 0", name, {}, {}, "", {}, {"curves": REWARDS}, 1.0, "", None)
    (stage / "manifest.json").write_text(json.dumps(asdict(manifest)))
    record = {"name": "ppo", "label": "compactionrl seed 0", "folder": stage.name, "seconds": 1.0, "cached": False}
    results = {
        "status": "ok",
        "results": [cell.model_dump(mode="json") for cell in cells],
        "stages": [record | {"why": "never run"}],
        "provenance": provenance(Plan(experiment)),
        "mlflow_run_id": f"mlflow-{name}",
    }
    run.results.write_text(json.dumps(results))
    run.update(status="ok", mlflow_run_id=f"mlflow-{name}")
    return run


def compared(home: Home, *runs: RunFolder, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    compare_runs(home, [run.name for run in runs], json_output=True)
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def printed(home: Home, *runs: RunFolder) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    compare_runs(home, [run.name for run in runs], console=console)
    return console.export_text()


def test_only_changed_settings_are_shown_one_column_per_run(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [finished(home, "one", 0.3), finished(home, "two", 0.8, "ppo.steps=7")]
    default = load_experiment("smoke").ppo.steps
    assert compared(home, *runs, capsys=capsys)["settings"] == {"ppo.steps": {"A": default, "B": 7}}
    text = printed(home, *runs)
    assert f"│ ppo.steps │ {default}" in text
    assert "ppo.batch_size" not in text


def test_versions_and_commit_count_as_settings(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [finished(home, "one", 0.3), finished(home, "two", 0.3)]
    results = runs[1].read_results()
    results["provenance"]["versions"]["torch"] = "1.0"
    del results["provenance"]["versions"]["ray"]
    runs[1].results.write_text(json.dumps(results))
    changed = compared(home, *runs, capsys=capsys)["settings"]
    assert changed["versions.torch"]["B"] == "1.0"
    assert set(changed["versions.ray"]) == {"A"}


def test_runs_are_tested_against_the_first_on_common_tasks(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [finished(home, "one", 0.3), finished(home, "two", 0.8), finished(home, "three", 0.8, repeats=2)]
    (point,) = compared(home, *runs, capsys=capsys)["points"]
    assert point["metrics"]["A"]["pass_at_1"] == pytest.approx(0.3)
    gains = point["gains"]
    assert list(gains) == ["B", "C"]
    assert gains["B"]["comparison"]["difference"] == pytest.approx(0.5)
    assert gains["B"]["comparison"]["p"] < 0.001
    assert [gains[run]["comparison"]["test"] for run in gains] == ["mcnemar", "sign-flip"]
    text = printed(home, *runs)
    assert "+0.500 [" in text
    assert "B − A" in text
    assert "Gain in pass@1 over A on common tasks" in text


def test_what_only_one_run_has_is_one_line(home: Home) -> None:
    text = printed(home, finished(home, "one", 0.3, variants="base,supo"), finished(home, "two", 0.8))
    assert "only A has supo · window 512 · cap 3 · keep 1\n" in text


def test_nothing_in_common_still_says_what_there_is(home: Home) -> None:
    text = printed(home, finished(home, "one", 0.3, variants="supo"), finished(home, "two", 0.8))
    assert "share no setting" in text
    assert "only A has supo" in text
    assert "only B has base" in text


def test_tasks_of_another_world_are_not_paired(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [finished(home, "one", 0.3), finished(home, "two", 0.8, "evaluation.split=test")]
    result = compared(home, *runs, capsys=capsys)
    assert result["other_tasks"] == {"B": ["evaluation.split"]}
    assert result["points"][0]["gains"] == {}
    assert "B was evaluated on other tasks than A (evaluation.split): no paired test." in printed(home, *runs)


def test_reused_trials_are_said_once_and_not_tested(home: Home) -> None:
    text = printed(home, finished(home, "one", 0.3, made="x"), finished(home, "two", 0.3, made="x"))
    assert "B reuses A's trials in 1 of 1" in text
    assert "│ A, B │" in text
    assert "Gain" not in text
    assert "No setting differs" in text


def test_curves_are_drawn_below_the_home(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [finished(home, "one", 0.3), finished(home, "two", 0.8)]
    path = Path(compared(home, *runs, capsys=capsys)["curves"])
    assert path.is_relative_to(home.root / "compare")
    assert path.read_bytes().startswith(b"\x89PNG")
    for manifest in home.stages.glob("*/manifest.json"):
        manifest.unlink()
    assert "no training curves" in printed(home, *runs)


def test_markdown_has_the_same_tables(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [finished(home, "one", 0.3), finished(home, "two", 0.8, "ppo.steps=7")]
    compare_runs(home, [run.name for run in runs], markdown=True)
    text = capsys.readouterr().out
    assert "\n| setting | A | B |\n| --- | --- | --- |\n| ppo.steps | " in text
    assert "## Gain in pass@1 over A on common tasks" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.endswith(" |") for line in rows)


def test_names_that_make_no_comparison_are_refused(home: Home) -> None:
    one, two = finished(home, "one", 0.3), finished(home, "two", 0.3)
    with pytest.raises(UserError, match="1 given, but a comparison takes 2 to 26 runs"):
        compare_runs(home, [one.name])
    with pytest.raises(UserError, match=rf"'latest' and '{two.name}' are the same run"):
        compare_runs(home, [two.name, "latest"])
    with pytest.raises(UserError, match="choose one"):
        compare_runs(home, [one.name, two.name], markdown=True, json_output=True)


def test_a_run_without_results_says_how_to_go_on(home: Home) -> None:
    one, two = finished(home, "one", 0.3), finished(home, "two", 0.3)
    two.results.unlink()
    with pytest.raises(CommandError, match="resume it: compactionrl reproduce --preset two"):
        compare_runs(home, [one.name, two.name])
    two.update(status="running")
    with pytest.raises(CommandError, match="still going; wait for it"):
        compare_runs(home, [one.name, two.name])
    two.results.write_text("{")
    with pytest.raises(CommandError, match="unreadable"):
        compare_runs(home, [one.name, two.name])


def test_the_command_prints_one_object_or_one_message(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPACTIONRL_HOME", str(home.root))
    finished(home, "one", 0.3)
    finished(home, "two", 0.8)
    done = CliRunner().invoke(app, ["compare", "mlflow-one", "mlflow-two", "--json"])
    assert done.exit_code == 0, done.stderr
    assert [run["letter"] for run in json.loads(done.stdout)["runs"]] == ["A", "B"]
    failed = CliRunner().invoke(app, ["compare", "mlflow-one", "none", "--json"])
    assert failed.exit_code == 2
    assert json.loads(failed.stdout)["error"].startswith("no run 'none' in")
