"""Real processes that outlive what started them, a real MLflow database, and a stand-in for Docker's daemon."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from filelock import FileLock
from rich.console import Console
from typer.testing import CliRunner

from flows import doctor
from flows.cli import app
from flows.doctor import examine_home
from flows.leftovers import find_containers
from flows.local_server import LocalServer
from flows.runs import RUN_VARIABLE, RunFolder, create_run
from flows.services import Home, sqlite_uri
from flows.session import _recorded
from flows.standing import Standing, StandingRecord
from tasks.cluster import OWNER, RAY_FOLDERS
from tasks.processes import ProcessId
from tasks.tracking import EXPERIMENT_PREFIX, TAGS, client_for, initialise_database

START = "import subprocess as s, sys; print(s.Popen(sys.argv[1:], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
Start = Callable[..., ProcessId]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name, value in {"DOCKER_HOST": f"unix://{tmp_path}/none.sock", "DOCKER_CONTEXT": "default"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return Home(tmp_path / "home").create()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process whose parent is gone at once."""
    started: list[ProcessId] = []

    def start(*arguments: str, **environment: str) -> ProcessId:
        done = subprocess.run(
            [sys.executable, "-c", START, *SLEEP, *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        started.append(ProcessId.of(int(done.stdout)))
        return started[-1]

    yield start
    for process in started:
        with suppress(psutil.Error):
            if process.alive():
                psutil.Process(process.pid).kill()


@pytest.fixture
def ray_folder() -> Iterator[Callable[..., Path]]:
    made: list[Path] = []

    def make(owner: ProcessId, logs: Path) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=RAY_FOLDERS.name.rstrip("*"), dir=RAY_FOLDERS.parent))
        made.append(folder)
        (folder / OWNER).write_text(json.dumps(asdict(owner) | {"logs": str(logs)}))
        return folder

    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


def dead() -> ProcessId:
    me = ProcessId.current()
    return ProcessId(me.host, me.pid, me.created - 1_000)  # the number was given to another process


def run_of(home: Home, process: ProcessId, status: str = "running") -> RunFolder:
    run = create_run(home, "tiny", "compactionrl reproduce", {})
    run.update(process=asdict(process), status=status)
    return run


def examined(home: Home, *, yes: bool = True) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Exit code, check → (state, what was found), and all that was printed."""
    console = Console(width=250, record=True, file=io.StringIO())
    code = examine_home(home, yes=yes, console=console)
    text = console.export_text()
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in text.splitlines() if line.startswith("│")]
    return code, {name: (state, found) for name, state, found in rows if name}, text


def test_a_home_in_order_is_fine(home: Home) -> None:
    run_of(home, ProcessId.current())
    code, checks, _ = examined(home)
    assert code == 0
    assert {state for state, _ in checks.values()} <= {"ok", "warning"}
    assert checks["containers"] == ("ok", "not checked: no Docker daemon answers")
    assert checks["leftovers"][0] == "ok"
    assert "torch 2" in checks["packages"][1]


def test_a_home_that_does_not_exist_is_not_made(tmp_path: Path, home: Home) -> None:
    code, _, _ = examined(Home(tmp_path / "none"))
    assert code == 0
    assert not (tmp_path / "none").exists()


def test_processes_of_dead_runs_go_and_all_others_stay(home: Home, tmp_path: Path, start: Start) -> None:
    other = Home(tmp_path / "other").create()
    orphan = start(**{RUN_VARIABLE: str(run_of(home, dead()).path)})
    of_removed = start(**{RUN_VARIABLE: str(home.runs / "gone")})
    spared = {
        "of a live run": start(**{RUN_VARIABLE: str(run_of(home, ProcessId.current()).path)}),
        "of a run whose command is ending": start(**{RUN_VARIABLE: str(run_of(home, ProcessId.current(), "ok").path)}),
        "of another home": start(**{RUN_VARIABLE: str(run_of(other, dead()).path)}),
        "a shell that exports the home": start(COMPACTIONRL_HOME=str(home.root)),
    }
    code, checks, _ = examined(home, yes=False)
    assert code == 1
    assert checks["process"][0] == "problem"
    assert checks["process"][1].startswith("2 left over: ")
    assert orphan.alive()
    code, checks, _ = examined(home)
    assert code == 0
    assert checks["process"][0] == "fixed"
    assert not orphan.alive()
    assert not of_removed.alive()
    assert {name: process.alive() for name, process in spared.items()} == dict.fromkeys(spared, True)


def test_a_child_of_a_live_command_stays_whatever_its_environment(home: Home) -> None:
    run = run_of(home, dead())
    child = subprocess.Popen(SLEEP, env={**os.environ, RUN_VARIABLE: str(run.path)})
    try:
        assert "process" not in examined(home)[1]
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_server_that_nobody_holds_is_stopped(home: Home, start: Start) -> None:
    process = start(**{RUN_VARIABLE: str(run_of(home, dead()).path)})
    server = LocalServer("Prefect", "http://127.0.0.1:9/api", process, home.prefect / "server.log")
    (home.prefect / "server.json").write_text(json.dumps(server.to_json()))
    users = home.prefect / "users"
    users.mkdir()
    (users / "live.json").write_text(json.dumps(asdict(ProcessId.current())))
    (users / "dead.json").write_text(json.dumps(asdict(dead())))
    code, checks, _ = examined(home)
    assert code == 0
    assert checks["server users"] == ("fixed", "removed 1 of dead commands; 1 alive")
    assert {"server", "process"}.isdisjoint(checks)
    assert process.alive()
    (users / "live.json").unlink()
    assert examined(home)[1]["server"] == ("fixed", "1 removed: Prefect at http://127.0.0.1:9/api")
    assert not process.alive()
    assert not (home.prefect / "server.json").exists()


def test_the_server_of_the_home_this_one_was_copied_from_stays(home: Home, tmp_path: Path, start: Start) -> None:
    server = LocalServer("Prefect", "http://127.0.0.1:9/api", start(), tmp_path / "original" / "server.log")
    (home.prefect / "server.json").write_text(json.dumps(server.to_json()))
    assert "server" not in examined(home)[1]
    assert server.process.alive()


def test_servers_of_an_up_that_was_killed_are_stopped(home: Home, tmp_path: Path, start: Start) -> None:
    ours = LocalServer("MLflow", "http://127.0.0.1:9", start(), home.mlflow / "server.log")
    copied = LocalServer("Ray", "http://127.0.0.1:9", start(), tmp_path / "original" / "ray.log")
    record = StandingRecord(home.root)
    record.write(Standing(ProcessId.current(), "", "", servers=(ours, copied), ready=True))
    assert "server" not in examined(home)[1]
    record.write(Standing(dead(), "", "", servers=(ours, copied), ready=True))
    assert examined(home)[1]["server"] == ("fixed", "1 removed: MLflow at http://127.0.0.1:9")
    assert (ours.process.alive(), copied.process.alive()) == (False, True)


def test_rays_folders_and_processes_of_dead_commands_go(
    home: Home, tmp_path: Path, start: Start, ray_folder: Callable[..., Path]
) -> None:
    left = ray_folder(dead(), home.runs / "x" / "logs")
    kept = [ray_folder(ProcessId.current(), home.runs / "y" / "logs"), ray_folder(dead(), tmp_path / "other" / "logs")]
    raylet, others = start(f"--dir={left}/session"), [start(f"--dir={folder}/session") for folder in kept]
    code, checks, _ = examined(home)
    assert code == 0
    assert checks["Ray folder"] == ("fixed", f"1 removed: {left}")
    assert not left.exists()
    assert not raylet.alive()
    assert all(folder.is_dir() for folder in kept)
    assert all(process.alive() for process in others)


def test_a_nameless_ray_folder_is_only_told_of(home: Home, ray_folder: Callable[..., Path]) -> None:
    folder = ray_folder(dead(), home.runs)
    (folder / OWNER).unlink()
    assert str(folder) not in examined(home)[2]
    os.utime(folder, (1, 1))
    code, checks, text = examined(home)
    assert code == 0
    assert checks["Ray folders"][0] == "warning"
    assert str(folder) in text
    assert folder.is_dir()


def test_dead_runs_are_ended_on_disk_and_in_mlflow(home: Home) -> None:
    initialise_database(home.mlflow_database, home.mlflow_artifacts)
    client = client_for(sqlite_uri(home.mlflow_database))
    experiment = client.create_experiment(EXPERIMENT_PREFIX + "tiny")
    processes = (dead(), ProcessId.current())
    runs = [run_of(home, process) for process in processes]
    recorded = [
        client.create_run(experiment, tags={TAGS[name]: str(value) for name, value in asdict(process).items()})
        for process in processes
    ]
    code, checks, _ = examined(home, yes=False)
    assert code == 0
    assert checks["runs"] == ("fixed", f"marked killed: {runs[0].name}")
    assert checks["MLflow runs"][0] == "fixed"
    assert [client.get_run(run.info.run_id).info.status for run in recorded] == ["KILLED", "RUNNING"]
    assert [json.loads((run.path / "run.json").read_text())["status"] for run in runs] == ["killed", "running"]


def test_locks_that_nobody_holds_and_no_stage_needs_go(home: Home) -> None:
    locks = home.stages / ".locks"
    for folder in (locks, home.stages / "sft-done", home.stages / ".work" / "ppo-begun"):
        folder.mkdir(parents=True)
    for name in ("sft-done", "ppo-begun", "critic-gone"):
        (locks / f"{name}.lock").touch()
    with FileLock(locks / "ppo-held.lock"):
        code, checks, _ = examined(home)
        assert checks["lock"] == ("fixed", "1 removed: critic-gone.lock")
        assert {path.stem for path in locks.iterdir()} == {"sft-done", "ppo-begun", "ppo-held"}
    assert code == 0
    assert checks["unfinished stages"] == ("ok", "1, 0 B; their commands go on from them")
    assert (home.stages / ".work" / "ppo-begun").is_dir()


def test_what_is_wrong_with_the_machine_is_said_with_what_helps(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(doctor, "requires", lambda name: ["numpy<1", "no-such-package>=2", 'gone; extra == "gpu"'])
    monkeypatch.setattr(doctor, "ENOUGH_SPACE", 2**60)
    home.mlflow_database.write_text("not a database, but long enough to be read as one")
    code, checks, text = examined(home)
    assert code == 1
    assert checks["packages"][0] == "problem"
    assert "but <1 is needed; no-such-package is missing" in checks["packages"][1]
    assert "pip install 'numpy<1' 'no-such-package>=2'" in text
    assert checks["disk"][0] == "warning"
    assert checks["MLflow"][0] == "problem"
    assert checks["Prefect"] == (
        "problem", "http://127.0.0.1:9/api (from PREFECT_API_URL) does not answer (ConnectError)"
    )  # fmt: skip
    assert "start it, or unset PREFECT_API_URL" in text


class Daemon(BaseHTTPRequestHandler):
    """As much of Docker's API as listing and removing takes."""

    containers: ClassVar[dict[str, str]] = {}
    """id → label"""

    def do_GET(self) -> None:
        described = [self._describe(name) for name in self.containers]
        if self.path.endswith("/version"):
            self._answer({"ApiVersion": "1.43", "Version": "24"})
        elif "/containers/json" in self.path:
            self._answer([{"Id": item["Id"]} for item in described])
        else:
            self._answer(next(item for item in described if f"/{item['Id']}/" in self.path))

    def do_DELETE(self) -> None:
        del self.containers[self.path.partition("?")[0].rpartition("/")[2]]
        self._answer(None)

    def _describe(self, name: str) -> dict[str, Any]:
        return {"Id": name, "Name": f"/{name}", "Config": {"Labels": {"compactionrl.run": self.containers[name]}}}

    def _answer(self, content: Any) -> None:
        body = json.dumps(content).encode() if content is not None else b""
        self.send_response(200 if body else 204)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, home: Home) -> Iterator[type[Daemon]]:
    server = HTTPServer(("127.0.0.1", 0), Daemon)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
    yield Daemon
    server.shutdown()
    thread.join()
    server.server_close()


def test_containers_of_dead_runs_of_this_home_go(home: Home, tmp_path: Path, daemon: type[Daemon]) -> None:
    gone, live = run_of(home, dead()), run_of(home, ProcessId.current())
    daemon.containers = {
        "a": str(gone.path),
        "b": gone.name,
        "c": str(home.runs / "removed"),
        "d": str(live.path),
        "e": live.name,
        "f": str(tmp_path / "other" / "runs" / gone.name),
        "g": "a-run-of-some-home",
    }
    assert [left.name.partition(" ")[0] for left in find_containers(home)] == ["a", "b", "c"]
    code, checks, _ = examined(home)
    assert code == 0
    assert checks["container"][0] == "fixed"
    assert set(daemon.containers) == {"d", "e", "f", "g"}


def test_what_a_run_starts_carries_its_name(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "before")
    run = run_of(home, ProcessId.current())
    with _recorded(run):
        assert subprocess.check_output(["printenv", RUN_VARIABLE], text=True).strip() == str(run.path)


def test_the_command_prints_one_object(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPACTIONRL_HOME", str(home.root))
    locks = home.stages / ".locks"
    locks.mkdir()
    (locks / "critic-gone.lock").touch()
    done = CliRunner().invoke(app, ["doctor", "--json"])
    result = json.loads(done.stdout)
    assert (done.exit_code, result["status"]) == (1, "problem")
    (problem,) = [check for check in result["checks"] if check["state"] == "problem"]
    assert problem["next_step"] == "compactionrl doctor --yes"
    assert CliRunner().invoke(app, ["doctor", "--json", "--yes"]).exit_code == 0
