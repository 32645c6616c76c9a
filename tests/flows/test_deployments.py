"""Flows as Prefect sees them, without a server: their form, what a filled-in form means, the file for work pools."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from typer.testing import CliRunner

from evaluation.tasksets.datasets import SHIPPED
from flows import deployments
from flows.cli import app
from flows.deployments import flags_of, reproduce, sweep
from flows.experiment import Experiment, Variant
from flows.plan import Plan
from flows.session import Request, portable_file
from tasks.errors import UserError

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


STARTED = {
    "sft.model": '"model"',
    "agent.compaction.prompt_pack": '"mine.yaml"',
    "dataset.path": '"tasks"',
    "evaluation.dataset.path": '"tasks"',
    "dataset.sandbox.kind": "local",
    "evaluation.dataset.sandbox.kind": "local",
    "seeds": "0,1",
}
COMMANDS: list[tuple[Flow[..., Any], dict[str, str], tuple[str, ...]]] = [
    (reproduce, {}, ()),
    (reproduce, STARTED, ("ppo.steps=3",)),
    (reproduce, STARTED | {"dataset.sandbox.kind": "docker"}, ('evaluation.dataset.path="bench12"',)),
    (sweep, {"evaluation.windows": "96,128", "evaluation.repeats": "2"}, ()),
    (sweep, {"evaluation.dataset.path": '"tasks"', "engine": "openai", "endpoint.base_url": '"http://h/v1"',
             "endpoint.model": '"m"', "job.max_tokens": "5"}, ()),
]  # fmt: skip


def asked(monkeypatch: pytest.MonkeyPatch, flow: Flow[..., Any], **fields: Any) -> Request:
    """What a flow that Prefect starts with these fields makes of them."""
    seen: list[Request] = []

    @contextmanager
    def deployed_run(request: Request) -> Iterator[None]:
        seen.append(request)
        raise UserError("seen")
        yield

    monkeypatch.setattr(deployments, "deployed_run", deployed_run)
    asyncio.run(flow.fn(**fields))
    return seen[0]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model, a prompt pack and a set of tasks beside each other, named from their own folder."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model", "config.json").write_text('{"model_type": "llama"}')
    shutil.copy(ROOT / "compaction" / "prompts" / "nine-items.yaml", "mine.yaml")
    shutil.copytree(SHIPPED["bench12"] / "access-report", Path("tasks") / "access-report")


def contents(experiment: Experiment, folder: Path) -> str:
    """The settings, paths below `folder` named from there."""
    return json.dumps(experiment.config()).replace(f"{folder}/", "")


@pytest.mark.parametrize(("flow", "options", "overrides"), COMMANDS)
def test_a_run_of_the_command_line_is_the_same_when_it_is_started_again_from_prefect(
    files: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: Flow[..., Any], options: dict[str, str],
    overrides: tuple[str, ...],
) -> None:  # fmt: skip
    flags = tuple(f"{name}={value}" for name, value in options.items())
    original = Request(flow.name, "smoke", flags, overrides).experiment()
    fields = deployments._parameters(flow, original)
    beside = (*deployments.beside_the_form(fields, flags), *overrides)
    if not any("tasks" in override or "mine" in override for override in beside):
        monkeypatch.chdir("/")
    again = asked(monkeypatch, flow, preset="smoke", overrides=beside, **fields).experiment()
    assert contents(again, tmp_path) == contents(original, tmp_path)


def test_what_is_typed_into_the_form_holds_against_what_the_command_gave(
    files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [f"{name}={value}" for name, value in STARTED.items()]
    fields = deployments._parameters(reproduce, Request("reproduce", "smoke", tuple(flags)).experiment())
    assert deployments.beside_the_form(fields, flags) == []
    typed = {"prompt_pack": "nine-items", "dataset": "bench12", "env": "docker", "model": "", "seeds": (5,)}
    again = asked(monkeypatch, reproduce, preset="smoke", **fields | typed).experiment()
    assert (again.agent.compaction.prompt_pack, again.seeds) == ("nine-items", (5,))
    for dataset in (again.dataset, again.evaluation.dataset):
        assert dataset is not None
        assert (dataset.path, dataset.sandbox.kind) == ("bench12", "docker")
    assert again.sft is not None
    assert again.sft.model is None


def test_a_preset_file_is_named_so_that_another_folder_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: smoke\nname: mine\n")
    assert portable_file("mine.yaml") == str(tmp_path / "mine.yaml")
    assert str(tmp_path) in shlex.join(Request("reproduce", "mine.yaml").command)
    assert portable_file("smoke") == "smoke"


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
