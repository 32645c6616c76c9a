"""`up --serve` for real: links that answer, runs that Prefect starts, ends and cancels, and nothing left behind.

All tests share one `up`, and the last one ends it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from evaluation.results import CellResult
from evaluation.tasksets.harbor_export import export_trail
from flows.experiment import load_experiment
from tests.docker_engine import docker_engine as docker_engine
from tests.prefect_api import ask_prefect
from tests.processes import COMMAND, PATIENCE, processes_of

pytestmark = pytest.mark.xdist_group("up")

SMALL = [
    "sft.corpus_tasks=20",
    "sft.data=[{rollouts: 8, windows: [128], caps: [4], keep_recents: [1]}]",
    "sft.sft.stages=[{steps: 5, tokens_per_step: 500}]",
    "evaluation.n_tasks=2",
    *("evaluation.windows=[]", "evaluation.caps=[]", "evaluation.keep_recents=[]"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    yield home
    for process in processes_of(home):  # none, unless a test failed half-way
        process.kill()


@pytest.fixture(scope="module")
def up(home: Path, docker_engine: Any) -> Iterator[subprocess.Popen[str]]:
    process = start(home, "up", "--serve", "--preset", "smoke", "--cron", "0 3 * * *")
    record = home / "up.json"
    wait_for(lambda: record.exists() and json.loads(record.read_text())["ready"], process)
    deployments = Prefect(home)
    wait_for(lambda: deployments.find("sweep") is not None, process)
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)


def start(home: Path, *arguments: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "PREFECT_HOME")}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        env={**kept, "COMPACTIONRL_HOME": str(home), "PYTHONUNBUFFERED": "1"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def names_of_run(home: Path, flow_run_id: str) -> list[str]:
    """Of the processes of a flow run."""
    found = []
    for process in processes_of(home):
        try:
            if process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run_id:
                found.append(process.name())
        except psutil.Error:
            continue
    return found


class Prefect:
    """The API of the home's server, as its page uses it."""

    def __init__(self, home: Path) -> None:
        self.page = json.loads((home / "up.json").read_text())["prefect"]

    def call(self, method: str, path: str, content: Any = None) -> httpx.Response:
        return ask_prefect(method, f"{self.page}/api{path}", content)

    def find(self, flow: str) -> dict[str, Any] | None:
        answer = self.call("GET", f"/deployments/name/{flow}/served")
        return answer.json() if answer.status_code == 200 else None

    def ask(self, flow: str, **parameters: Any) -> httpx.Response:
        deployment = self.find(flow)
        assert deployment is not None
        content = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return self.call("POST", f"/deployments/{deployment['id']}/create_flow_run", content)

    def start(self, flow: str, **parameters: Any) -> str:
        """The id of the flow run that was asked for."""
        answer = self.ask(flow, **parameters)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def state(self, flow_run_id: str) -> dict[str, Any]:
        return self.call("GET", f"/flow_runs/{flow_run_id}").json()["state"]

    def ended(self, flow_run_id: str) -> dict[str, Any] | None:
        state = self.state(flow_run_id)
        return state if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None

    def of_run(self, what: str, flow_run_id: str) -> list[dict[str, Any]]:
        chosen = {"flow_runs": {"id": {"any_": [flow_run_id]}}}
        return self.call("POST", f"/{what}/filter", chosen).json()


def run_of(home: Path, flow_run_id: str) -> dict[str, Any] | None:
    records = [json.loads(path.read_text()) | {"path": str(path.parent)} for path in home.glob("runs/*/run.json")]
    return next((r for r in records if r.get("prefect_flow_run_id") == flow_run_id), None)


def mlflow_runs(home: Path, parent: str) -> list[Any]:
    """The parent and its children."""
    from tasks.tracking import client_for

    client = client_for(f"sqlite:///{home}/mlflow/mlflow.db")
    run = client.get_run(parent)
    children = client.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'")
    return [run, *children]


def test_links_answer_and_a_second_up_says_where_the_first_is(home: Path, up: subprocess.Popen[str]) -> None:
    standing = json.loads((home / "up.json").read_text())
    for page in (standing["prefect"], f"{standing['prefect']}/api/health", standing["mlflow"]):
        assert httpx.get(page, timeout=60, follow_redirects=True).status_code == 200
    second = start(home, "up")
    out, err = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, err
    assert f"{home} is up already" in out
    assert standing["prefect"] in out
    assert standing["mlflow"] in out
    assert up.poll() is None


def test_a_run_that_prefect_starts_is_one_like_any_other(home: Path, up: subprocess.Popen[str]) -> None:
    prefect = Prefect(home)
    flow_run_id = prefect.start("reproduce", preset="smoke", variants=["base"], overrides=SMALL)
    state = wait_for(lambda: prefect.ended(flow_run_id), up)
    assert (state["type"], state["name"]) == ("COMPLETED", "Completed"), state["message"]
    run = run_of(home, flow_run_id)
    assert run is not None
    assert run["status"] == "ok"
    parent = mlflow_runs(home, run["mlflow_run_id"])[0]
    assert flow_run_id in parent.data.tags["mlflow.note.content"]
    assert parent.data.tags["prefect_flow_run_url"] == f"{prefect.page}/runs/flow-run/{flow_run_id}"
    artifacts = {a["key"]: a for a in prefect.of_run("artifacts", flow_run_id)}
    assert run["mlflow_run_id"] in artifacts["mlflow-run"]["data"]
    assert "| base |" in artifacts["results"]["data"]
    assert artifacts["sft-seed-0"]["type"] == "progress"
    assert float(artifacts["sft-seed-0"]["data"]) == 100.0
    settings = [word for setting in SMALL for word in ("--set", setting)]
    again = start(home, "reproduce", "--preset", "smoke", "--variants", "base", *settings, "--json")
    out, err = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, err
    result = json.loads(out)
    assert all(stage["cached"] for stage in result["stages"])
    assert [CellResult.model_validate(cell).scored for cell in result["results"]] == [2]
    assert result["open"]["mlflow"].endswith(result["mlflow_run_id"])
    assert result["open"]["prefect"].startswith(f"{prefect.page}/runs/flow-run/")


def test_a_mistake_in_the_form_is_one_message_and_no_run(home: Path, up: subprocess.Popen[str]) -> None:
    prefect, runs = Prefect(home), len(list(home.glob("runs/*")))
    refused = prefect.ask("reproduce", variants=["bse"])
    assert refused.status_code == 409
    assert "'bse' is not one of ['zero-shot', 'base'" in refused.text
    flow_run_id = prefect.start("sweep", preset="tiny", overrides=["ppo.stpes=1"])
    state = wait_for(lambda: prefect.ended(flow_run_id), up)
    assert state["type"] == "FAILED"
    assert state["message"].startswith("preset tiny: unknown key ppo.stpes; did you mean ppo.steps?")
    logs = prefect.call("POST", "/logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run_id]}}}).json()
    assert not any("Traceback" in line["message"] for line in logs)
    assert len(list(home.glob("runs/*"))) == runs


def test_a_deployment_trains_in_containers_and_sweeps_its_checkpoint_on_real_tasks(
    home: Path, up: subprocess.Popen[str], docker_engine: Any, tmp_path: Path
) -> None:
    trail = export_trail(tmp_path / "trail", load_experiment("smoke").world, "train", 4)
    training = {"path": str(trail), "sandbox": {"kind": "docker"}}
    overrides = [
        *(setting for setting in SMALL if "evaluation." not in setting),
        "sft.tiny.max_positions=4096",
        *("critic_steps=1", "ppo.steps=2", "ppo.batch_size=4", "loop.slots=4"),
        f"dataset={json.dumps(training)}",
        "evaluation.dataset.include=[lost-commit, build-fix]",
    ]
    axes = {"windows": [4096], "caps": [0, 1], "keep_recent": [0]}
    prefect = Prefect(home)
    flow_run_id = prefect.start(
        "sweep", preset="smoke", variants=["compactionrl"], dataset="bench12", **axes, overrides=overrides
    )
    state = wait_for(lambda: prefect.ended(flow_run_id), up)
    assert (state["type"], state["name"]) == ("COMPLETED", "Completed"), state["message"]
    run = run_of(home, flow_run_id)
    assert run is not None
    result = json.loads((Path(run["path"]) / "results.json").read_text())
    assert [stage["name"] for stage in result["stages"]] == ["sft", "critic", "ppo", "evaluate", "evaluate"]
    cells = [CellResult.model_validate(cell) for cell in result["results"]]
    assert [(c.cap, c.scored, c.count_sources) for c in cells] == [(0, 2, {"exact": 2}), (1, 2, {"exact": 2})]
    kinds = [r.data.tags["kind"] for r in mlflow_runs(home, run["mlflow_run_id"])]
    assert sorted(kinds) == ["cell", "cell", "flow", "stage", "stage", "stage"]
    assert "<svg" in (Path(run["path"]) / "report.html").read_text()
    ours = docker_engine.containers.list(all=True, filters={"label": f"compactionrl.run={run['path']}"})
    assert ours == []


def test_cancelling_ends_everything_of_a_run(home: Path, up: subprocess.Popen[str]) -> None:
    prefect = Prefect(home)
    overrides = [*SMALL, "sft.sft.stages=[{steps: 1000000, tokens_per_step: 500}]"]
    flow_run_id = prefect.start("reproduce", preset="smoke", variants=["base"], overrides=overrides)
    wait_for(lambda: any("ray::" in name for name in names_of_run(home, flow_run_id)), up)
    started = time.monotonic()
    prefect.call("POST", f"/flow_runs/{flow_run_id}/set_state", {"state": {"type": "CANCELLING"}})
    state = wait_for(lambda: prefect.ended(flow_run_id), up)
    wait_for(lambda: not names_of_run(home, flow_run_id), up)
    print(f"cancelled in {time.monotonic() - started:.1f} s")
    assert (state["type"], state["name"]) == ("CANCELLED", "Cancelled"), state["message"]
    run = run_of(home, flow_run_id)
    assert run is not None
    assert run["status"] == "killed"
    runs = mlflow_runs(home, run["mlflow_run_id"])
    assert [(r.data.tags["kind"], r.info.status) for r in runs] == [("flow", "KILLED"), ("stage", "KILLED")]


def test_ctrl_c_ends_all_of_it(home: Path, up: subprocess.Popen[str]) -> None:
    schedule = Prefect(home).find("reproduce")["schedules"][0]  # type: ignore[index]
    assert (schedule["schedule"]["cron"], schedule["active"]) == ("0 3 * * *", True)
    up.send_signal(signal.SIGINT)
    out, err = up.communicate(timeout=PATIENCE)
    assert up.returncode == 130, err
    assert out.splitlines()[-1] == "stopped"
    assert "error" not in err
    assert processes_of(home) == []
    assert not (home / "up.json").exists()
    assert not (home / "prefect" / "server.json").exists()
