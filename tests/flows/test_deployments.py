"""Flows as Prefect sees them, without a server: their form, what a filled-in form means, the file for work pools."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from typer.testing import CliRunner

from flows.cli import app
from flows.deployments import beside_the_form, collect, flags_of, reproduce, sweep, tasks_of, texts_of
from flows.experiment import Variant
from flows.plan import Plan
from flows.session import Request

ROOT = Path(__file__).parents[2]
KINDS = {"string", "boolean", "array"}


@pytest.mark.parametrize("flow", [reproduce, sweep])
def test_the_form_is_flat_and_every_field_of_it_is_described(flow) -> None:
    schema = parameter_schema(flow)
    assert schema.required == []
    assert schema.definitions == {}
    for name, field in schema.properties.items():
        assert field["type"] in KINDS, name
        assert field["description"], name
    assert schema.properties["variants"]["items"]["enum"] == list(Variant.__args__)  # type: ignore[attr-defined]


def test_a_filled_in_form_is_the_same_as_the_command_line() -> None:
    flags = flags_of(variants=("base", "compactionrl"), seeds=(0, 1), **{"evaluation.windows": (128,)})
    request = Request("sweep", "smoke", flags, ("ppo.steps=5",), force=True)
    experiment = request.experiment()
    assert (experiment.variants, experiment.seeds) == (("base", "compactionrl"), (0, 1))
    assert (experiment.evaluation.windows, experiment.ppo.steps) == ((128,), 5)
    assert Request("sweep", "smoke", flags_of(variants=(), seeds=())).experiment() == Request("x", "smoke").experiment()
    dry = CliRunner().invoke(app, [*request.command[1:], "--dry-run", "--json"])
    assert dry.exit_code == 0, dry.stderr
    planned = [spec.label for spec in Plan(experiment, full_product=True).stages]
    assert [stage["label"] for stage in json.loads(dry.stdout)["stages"]] == planned


def test_a_filled_in_form_trains_on_real_tasks_as_the_command_line_does() -> None:
    filled = [*texts_of(tasks_of("dataset", "bench12", "local") | tasks_of("evaluation.dataset", "bench12", "local"))]
    form = Request("reproduce", "smoke", tuple(filled)).experiment()
    command = ["reproduce", "--preset", "smoke", "--dataset", "bench12", "--env", "local", "--dry-run", "--json"]
    dry = CliRunner().invoke(app, command)
    assert dry.exit_code == 0, dry.stderr
    assert json.loads(dry.stdout)["experiment"] == form.config()
    assert texts_of({"sft.model": "", "engine": ""} | tasks_of("dataset", "", "local")) == []


@pytest.mark.parametrize(
    ("flow", "beside"),
    [
        (reproduce, ['sft.model="m"', "evaluation.windows=128"]),
        (sweep, ['sft.model="m"']),
        (collect, ["seeds=0,1", 'sft.model="m"', "evaluation.windows=128"]),
    ],
)
def test_options_that_a_form_does_not_show_hold_when_the_run_is_started_again_from_it(flow, beside) -> None:
    assert beside_the_form(flow, ["seeds=0,1", 'sft.model="m"', "evaluation.windows=128"]) == beside


def test_a_preset_file_is_named_so_that_another_folder_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: smoke\nname: mine\n")
    request = Request("reproduce", "mine.yaml")
    assert request.portable_preset == str(tmp_path / "mine.yaml")
    assert str(tmp_path) in shlex.join(request.command)
    assert Request("reproduce", "smoke").portable_preset == "smoke"


def test_the_file_for_work_pools_names_both_flows() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    flows = [load_flow_from_entrypoint(deployment["entrypoint"]) for deployment in deployments]
    assert [flow.name for flow in flows] == ["reproduce", "sweep"]
    for flow, deployment in zip(flows, deployments, strict=True):
        assert set(deployment["parameters"]) <= set(parameter_schema(flow).properties)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ["serve"],
            "start one with `compactionrl up` in another terminal, or both at once with `compactionrl up --serve`",
        ),
        (["up", "--serve", "--cron", "at 3"], "--cron 'at 3' is no schedule"),
        (["up", "--serve", "--preset", "tny"], "did you mean tiny?"),
        (["up", "--cron", "0 3 * * *"], "add --serve"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    arguments: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPACTIONRL_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (1, 2)
    assert part in " ".join(result.stderr.split())
    assert not (tmp_path / "home" / "prefect" / "server.json").exists()
