"""Whole commands against real services: a Prefect server that is started once, MLflow on SQLite."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.prefect_api import ask_prefect
from tests.processes import PATIENCE

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time, typer
sys.path.insert(0, {root!r})
from flows.session import run_flow

def flow(experiment, options):
    if options.dry_run:
        return {{"stages": []}}
    import prefect
    from prefect import flow as prefect_flow
    from tasks.tracking import Tracker
    services = options.services

    @prefect_flow
    def body():
        print("noise on stdout")
        os.system("echo noise of a subprocess")
        with Tracker.open(services.mlflow_uri, preset="t", config={{}}, config_digest=options.run.name,
                          artifacts=options.home.mlflow_artifacts, name="n", tags={{}}) as tracker:
            options.run.update(mlflow_run_id=tracker.parent.run_id, prefect=services.prefect_url,
                               prefect_flow_run=prefect.runtime.flow_run.id)
            {body}
        return 1
    body()
    return {{"status": {status!r}, "stages": [], "results": []}}

try:
    sys.exit(run_flow(flow, "smoke", [], {{}}, dry_run=False, json_output=True))
except typer.Exit as ending:  # Typer does this for a command
    sys.exit(ending.exit_code)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    yield home
    for process in processes_of(home):  # none, unless a test failed half-way
        process.kill()


def start(home: Path, body: str = "pass", status: str = "ok", **environment: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "PREFECT_HOME")}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(root=str(ROOT), body=body, status=status)],
        env={**kept, "COMPACTIONRL_HOME": str(home), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(home: Path) -> list[dict]:
    found = [json.loads(path.read_text()) for path in home.glob("runs/*/run.json")]
    return sorted(found, key=lambda record: record["created"])


def wait_for(condition, process: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.1)


def processes_of(home: Path) -> list[psutil.Process]:
    return [
        p
        for p in psutil.process_iter(["environ"])
        if (p.info["environ"] or {}).get("PREFECT_HOME") == str(home / "prefect")
    ]


def mlflow_status(home: Path, run_id: str) -> str:
    from tasks.tracking import client_for

    return str(client_for(f"sqlite:///{home / 'mlflow' / 'mlflow.db'}").get_run(run_id).info.status)


def leaves_alone_what_the_user_runs(home: Path, prefect_url: str) -> None:
    """A command on another home that is told to use this Prefect and a database of the user's starts nothing."""
    own = home.with_name("own-home")
    database = home.with_name("theirs.db")
    shutil.copy(home / "mlflow" / "mlflow.db", database)
    guest = start(own, PREFECT_API_URL=prefect_url, MLFLOW_TRACKING_URI=f"sqlite:///{database}")
    out, err = guest.communicate(timeout=PATIENCE)
    assert guest.returncode == 0, err
    assert json.loads(out)["services"].startswith(
        f"Prefect: {prefect_url} (PREFECT_API_URL) · MLflow: sqlite:///{database} (MLFLOW_TRACKING_URI)"
    )
    assert list((own / "prefect").iterdir()) == []
    assert not (own / "mlflow" / "mlflow.db").exists()
    flows = ask_prefect("POST", f"{prefect_url}/flow_runs/filter", {}).json()
    assert records(own)[0]["prefect_flow_run"] in {flow["id"] for flow in flows}


@pytest.mark.xdist_group("prefect-server")
def test_commands_share_one_server_and_leave_none_behind(home: Path) -> None:
    marker = home / "go"
    hold = f"[time.sleep(0.1) for _ in iter(lambda: os.path.exists({str(marker)!r}), True)]"
    first = start(home, hold)
    wait_for(lambda: any("prefect" in r for r in records(home)), first, "the first command's flow")
    interrupted = start(home, "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    failing = start(home, "raise ValueError('a bug')")
    out, err = failing.communicate(timeout=PATIENCE)
    assert failing.returncode == 1, err
    assert json.loads(out)["error"].startswith("ValueError: a bug\nThis is a bug; the traceback is in")
    assert "Traceback" not in err
    assert "a bug" in (home / "last-error.log").read_text()
    out, err = interrupted.communicate(timeout=PATIENCE)
    assert interrupted.returncode == 130, err
    assert first.poll() is None
    leaves_alone_what_the_user_runs(home, records(home)[0]["prefect"])
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 143, err
    assert json.loads(out)["exit_code"] == 143
    ended = [r for r in records(home) if "mlflow_run_id" in r]
    assert len({r["prefect"] for r in ended}) == 1
    assert sorted(r["status"] for r in ended) == ["failed", "killed", "killed"]
    assert sorted(mlflow_status(home, r["mlflow_run_id"]) for r in ended) == ["FAILED", "KILLED", "KILLED"]
    assert processes_of(home) == []
    assert not (home / "prefect" / "server.json").exists()


@pytest.mark.xdist_group("prefect-server")
def test_json_is_the_only_thing_on_stdout_and_a_killed_command_is_cleaned_up_after(home: Path) -> None:
    before = len(records(home))
    killed = start(home, "time.sleep(600)")
    wait_for(lambda: any("prefect" in record for record in records(home)[before:]), killed, "the flow to kill")
    killed.kill()
    killed.communicate()
    assert processes_of(home)
    partial = start(home, status="partial")
    out, err = partial.communicate(timeout=PATIENCE)
    assert partial.returncode == 3, err
    result = json.loads(out)
    assert result["status"] == "partial"
    assert "(local server)" in result["services"]
    assert any("noise of a subprocess" in path.read_text() for path in home.glob("runs/*/logs/output.log"))
    first, second = records(home)[before:]
    assert (first["status"], second["status"]) == ("killed", "partial")
    assert mlflow_status(home, first["mlflow_run_id"]) == "KILLED"
    assert processes_of(home) == []


def test_a_server_the_user_named_but_did_not_start_is_one_message(home: Path) -> None:
    process = start(home, PREFECT_API_URL="http://127.0.0.1:9/api")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Prefect does not answer at http://127.0.0.1:9/api/health (from PREFECT_API_URL" in json.loads(out)["error"]
    assert "Traceback" not in err


OUTLIVES = """
import asyncio, json, os, signal, sys
sys.path.insert(0, {root!r})
from flows import cli, reproduce

async def run_plan(plan, options):
    from prefect import task

    @task
    async def stage():
        await asyncio.sleep(0.1)

    await stage()
    os.kill(json.loads((options.home.prefect / "server.json").read_text())["process"]["pid"], signal.SIGKILL)
    for _ in range(20):  # Prefect's events of these would hold the process up for minutes
        await stage()
    options.run.results.write_text(json.dumps({{"status": "ok", "stages": [], "results": []}}))
    options.run.update(status="ok")

reproduce.run_plan = run_plan
cli.app(["reproduce", "--preset", "smoke", "--json"])
"""


@pytest.mark.xdist_group("prefect-server")
def test_a_run_outlives_its_prefect_server(home: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "PREFECT_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", OUTLIVES.format(root=str(ROOT))],
        env={**kept, "COMPACTIONRL_HOME": str(home), "PREFECT_CLIENT_MAX_RETRIES": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "ok"
    assert records(home)[-1]["status"] == "ok"
    log = max(home.glob("runs/*/logs/run.log"), key=lambda path: path.stat().st_mtime).read_text()
    assert "Prefect did not hear of the end (" in log
    assert processes_of(home) == []
