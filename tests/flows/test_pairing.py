"""A model is used under another pairing than it was trained with: said before anything runs, and only then."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compaction.pairing import PAIRING, pairing_of, write_pairing
from flows.cli import app
from flows.experiment import load_experiment
from tasks.model_card import card_text
from tasks.provenance import trained_stage

AGENT = load_experiment("smoke").agent
AS_IT_IS = ("--variants", "zero-shot")


@pytest.fixture
def model(small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that was trained as `smoke` trains."""
    monkeypatch.setenv("COMPACTIONRL_HOME", str(tmp_path / "home"))
    folder = tmp_path / "my-model"
    shutil.copytree(small_checkpoint, folder)
    write_pairing(folder, pairing_of(AGENT, None, [trained_stage("ppo", "the trail world", 4, 0, {})]))
    return folder


def dry_run(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--dry-run", "--json"])
    assert result.exit_code == code, result.output
    plan: dict[str, Any] = json.loads(result.stdout)
    return plan


def sweep(model: Path, *more: str) -> list[str]:
    """The warnings of a sweep at one setting, that of training unless said otherwise."""
    return dry_run("sweep", "--preset", "smoke", "--model", str(model), *AS_IT_IS, *ONE_CELL, *more)["warnings"]


ONE_CELL = ("--windows", "128", "--caps", "4", "--keep-recent", "1")


def test_the_pairing_of_its_training_is_no_warning(model: Path) -> None:
    assert sweep(model) == []


def test_a_model_without_a_pairing_and_a_new_one_are_no_warning(model: Path) -> None:
    (model / PAIRING).unlink()
    assert sweep(model, "--threshold", "40") == []
    assert dry_run("reproduce", "--preset", "smoke")["warnings"] == []


def test_each_difference_is_one_warning(model: Path) -> None:
    got = sweep(model, "--threshold", "40", "--windows", "256", "--prompt-pack", "nine-items")
    assert got == [
        "my-model: threshold: trained with 48, here 40",
        "my-model: window: trained with 128, here 256",
        "my-model: prompt_pack: trained with pack tiny, here nine-items; "
        "other texts: system, summary_instruction, resume, summary_pattern",
    ]


def test_what_is_swept_on_purpose_is_one_warning_for_all_cells(model: Path) -> None:
    got = sweep(model, "--windows", "96,128,192", "--caps", "0,1,4", "--keep-recent", "0,1")
    assert got == [
        "my-model: swept beyond its training: window 96, 192 (trained with 128); cap 0, 1 (trained with 4); "
        "keep_recent 0 (trained with 1)"
    ]


def test_reproduce_warns_too_and_people_read_it_below_the_plan(model: Path) -> None:
    arguments = ["reproduce", "--preset", "smoke", "--model", str(model), "--set", "agent.compaction.summary_cap=20"]
    assert "my-model: summary_cap: trained with 22, here 20" in dry_run(*arguments)["warnings"]
    printed = CliRunner().invoke(app, [*arguments, "--dry-run"]).stdout
    assert "warning: my-model: summary_cap: trained with 22, here 20\n" in printed


def test_a_damaged_pairing_is_bad_input(model: Path) -> None:
    (model / PAIRING).write_text("{}")
    said = dry_run("sweep", "--preset", "smoke", "--model", str(model), *AS_IT_IS, code=2)["error"]
    assert re.search(rf"--model: .*{PAIRING} is no pairing .*mend it, or remove it", said)


def test_the_commands_of_a_card_evaluate_under_its_pairing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    agent = AGENT.model_copy(update={"thinking": False})
    pairing = pairing_of(agent, None, [trained_stage("ppo", "the trail world", 4, 0, {})])
    write_pairing(model, pairing)
    commands = re.findall(r"^compactionrl (.*?)^```", card_text(pairing).replace("\\\n", " "), re.M | re.S)
    endpoint, here = (shlex.split(command) for command in commands)
    plan = dry_run(*here)
    assert plan["warnings"] == ["my-model: swept beyond its training: cap 0 (trained with 4)"]
    assert len(plan["cells"]) == 2
    endpoint[endpoint.index("DATASET")] = "bench12"
    plan = dry_run(*endpoint)
    assert [cell.split(" · ")[2:4] for cell in plan["cells"]] == [["window 128", "cap 0"], ["window 128", "cap 4"]]
    planned = plan["experiment"]["agent"]
    kept = ("threshold", "max_response", "min_response", "summary_cap", "keep_task")
    assert {name: planned["compaction"][name] for name in kept} == {name: getattr(pairing, name) for name in kept}
    assert planned["scaffold"] == pairing.scaffold
    assert plan["experiment"]["endpoint"]["request_extra"] == {"chat_template_kwargs": {"enable_thinking": False}}
    assert planned["compaction"]["prompt_pack"] == PAIRING
