"""Jobs in containers that are killed, interrupted, or lose Docker in the middle: the same command completes them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from compaction.rendering import load_renderer
from evaluation.environments.docker import RUN_LABEL
from evaluation.environments.docker_leftovers import OWNER_LABEL
from evaluation.failures import failure_policy
from tests.compaction.engines.stub_endpoint import Answer, Call, StubEndpoint
from tests.docker_engine import docker_engine as docker_engine
from tests.flows import memory_agent as memory
from tests.flows.test_sweep_tasks import SETTINGS, Bench
from tests.processes import PATIENCE, processes_of

pytestmark = pytest.mark.xdist_group("job-chaos")

PAGES = (7, 1, 2, 5, 8, 3)
"""Six tasks, of which the agent can do four"""
CELL = ("--windows", "240", "--caps", "3", "--keep-recent", "0", "--repeats", "1", "--concurrency", "2")
SLOW = 0.15
"""Seconds a reply takes while a job is to be caught in the middle"""


class ChaosBench(Bench):
    """Tasks in the smallest image, an endpoint whose pace can be set, and a look at what commands leave behind."""

    def __init__(self, root: Path, endpoint: Paced) -> None:
        super().__init__(root, endpoint.stub, env="docker")
        self.tasks = memory.write_tasks(root / "chaos", PAGES, base="local/busybox", name="chaos")
        self.pace = endpoint
        self.standing = {process.pid for process in processes_of(self.home)}

    @property
    def expected(self) -> float:
        sizes = memory.Sizes.of(load_renderer(self.tokenizer), self.pack)
        return sum(memory.solvable(sizes, SETTINGS, pages) for pages in PAGES) / len(PAGES)

    def begin(self, job: str) -> subprocess.Popen[str]:
        """A command, returned while trials run: when two have a result, one of them a new one."""
        self.pace.seconds = SLOW
        before, started = self.scored(job), self.started(job).total() - len(self.events(job, "finished"))
        command = self.start(*self.arguments(*CELL, "--json", "--job", job))
        while True:
            running = self.started(job).total() - len(self.events(job, "finished")) - started
            if running and len(self.scored(job)) >= max(2, len(before) + 1):
                return command
            assert command.poll() is None, command.communicate()
            time.sleep(0.05)

    def complete(self, job: str) -> None:
        """The same command, now with a fast endpoint, and all that must hold after it."""
        scored, before = self.scored(job), self.started(job)
        self.pace.seconds = 0.0
        result = self.run(*CELL, "--job", job)
        (cell,) = result["results"]
        assert (result["status"], cell["scored"], cell["coverage"]) == ("ok", len(PAGES), 1.0)
        assert cell["pass_at_1"] == self.expected == pytest.approx(4 / 6)
        again = self.started(job) - before
        assert {task for _, task, _ in again}.isdisjoint(scored)
        assert len(again) == len(PAGES) - len(scored)
        assert set(again.values()) == {1}
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        assert self.containers() == []
        assert {process.pid for process in processes_of(self.home)} - self.standing == set()

    def containers(self) -> list[str]:
        """Names of this home's containers, running or not."""
        import docker

        client = docker.from_env(timeout=60)
        try:
            found = client.containers.list(all=True, filters={"label": [OWNER_LABEL, RUN_LABEL]}, ignore_removed=True)
            return [c.name for c in found if c.labels[RUN_LABEL].startswith(f"{self.home}/")]
        finally:
            client.close()

    def scored(self, job: str) -> set[str]:
        """Tasks whose trial has a reward."""
        found = {}
        for path in self.home.glob(f"jobs/{job}/*/*/result.json"):
            trial = json.loads(path.read_text())["compactionrl"]["trial"]
            found[trial["key"]["task"]] = trial["reward"]
        return {task for task, reward in found.items() if reward is not None}

    def events(self, job: str, kind: str) -> list[dict[str, Any]]:
        lines = [
            line for path in self.home.glob(f"jobs/{job}/*/events.jsonl") for line in path.read_text().splitlines()
        ]
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def mlflow_runs(self) -> dict[str, str]:
        """Status of each run, by id."""
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{self.home}/mlflow/mlflow.db")
        experiments = [e.experiment_id for e in client.search_experiments()]
        return {run.info.run_id: run.info.status for run in client.search_runs(experiments, max_results=500)}


class Paced:
    """The agent of known memory behind an endpoint that takes its time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.stub = StubEndpoint(self.answer)

    def answer(self, call: Call) -> Answer:
        return replace(memory.act(call), seconds=self.seconds)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, docker_engine: Any) -> Iterator[ChaosBench]:
    """With `up` on its home: the commands share its Prefect server."""
    pace = Paced()
    with pace.stub.serving():
        bench = ChaosBench(tmp_path_factory.mktemp("chaos"), pace)
        up = bench.start("up")
        assert up.stdout is not None
        assert any("Ctrl-C" in line for line in up.stdout), "up ended"
        bench.standing = {process.pid for process in processes_of(bench.home)}
        yield bench
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=PATIENCE)


def test_a_job_that_is_interrupted_terminated_and_killed_goes_on_each_time_and_completes(bench: ChaosBench) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        scored, before = bench.scored("stopped"), bench.started("stopped")
        command = bench.begin("stopped")
        command.send_signal(number)
        out, err = command.communicate(timeout=PATIENCE)
        assert command.returncode == code, err[-2000:]
        assert {task for _, task, _ in bench.started("stopped") - before}.isdisjoint(scored)
        if number == signal.SIGKILL:
            assert bench.containers() != []  # of the trials that ran
            continue
        assert "the same command again continues from here" in out + err
        assert set(bench.mlflow_runs().values()) == {"KILLED"}
        bench.check_nothing_is_left()
    bench.complete("stopped")
    assert set(bench.mlflow_runs().values()) == {"FINISHED"}  # the stopped ones were opened again


@contextmanager
def docker_daemon(place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon of its own, in its own network and mounts: one with `--bridge=none` takes away the bridge of another.

    What it held is there again when it is started again at the same place.
    """
    host = f"unix://{place}/docker.sock"
    arguments = ["--data-root", f"{place}/data", "--exec-root", f"{place}/exec", "--pidfile", f"{place}/docker.pid"]
    apart, network = ["unshare", "--net", "--mount"], ["--bridge=none", "--iptables=false"]
    with (place / "log").open("ab") as log:
        daemon = subprocess.Popen([*apart, "dockerd", "-H", host, *arguments, *network], stdout=log, stderr=log)
    try:
        for _ in range(3000):
            if subprocess.run(["docker", "-H", host, "version"], capture_output=True).returncode == 0:
                break
            assert daemon.poll() is None, (place / "log").read_text()[-2000:]
            time.sleep(0.1)
        else:
            raise AssertionError((place / "log").read_text()[-2000:])
        yield daemon
    finally:
        daemon.terminate()
        daemon.wait(PATIENCE)


@pytest.fixture
def daemon_place() -> Iterator[Path]:
    """Where a daemon may be; what one that was killed leaves running goes in the end. Short, as a socket's path is."""
    place = Path(tempfile.mkdtemp(prefix="crl-d-"))
    yield place
    for process in psutil.process_iter(["cmdline"]):
        if any(argument.startswith(f"{place}/") for argument in process.info["cmdline"] or []):
            process.kill()
            process.wait(10)
    shutil.rmtree(place, ignore_errors=True)


def test_a_job_whose_docker_daemon_dies_scores_nothing_it_has_not_seen_and_completes_when_it_is_back(
    bench: ChaosBench, daemon_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (shutil.which("dockerd") and shutil.which("unshare")) or os.geteuid() != 0:
        pytest.skip("no second Docker daemon can be started here")
    image = subprocess.run(["docker", "save", "local/busybox"], check=True, capture_output=True).stdout
    monkeypatch.setenv("DOCKER_HOST", f"unix://{daemon_place}/docker.sock")
    with docker_daemon(daemon_place) as daemon:
        subprocess.run(["docker", "load"], input=image, check=True, capture_output=True)
        command = bench.begin("daemon")
        daemon.kill()
        out, err = command.communicate(timeout=PATIENCE)
    assert command.returncode == 3, err[-3000:]
    result = json.loads(out)
    (cell,) = result["results"]
    scored = bench.scored("daemon")
    assert cell["scored"] == len(scored) < len(PAGES)
    assert cell["pass_at_1"] > 0
    assert f"{len(PAGES) - len(scored)} of {len(PAGES)} trials have no reward" in result["errors"][0]
    errors = [event for event in bench.events("daemon", "finished") if event["error_class"] is not None]
    assert {failure_policy(event["error_class"]).group for event in errors} == {"sandbox"}
    assert {event["reward"] for event in errors} == {None}
    said = [path.read_text() for path in bench.home.glob("jobs/daemon/*/*/result.json")]
    assert sum("is Docker running? DOCKER_HOST=unix://" in text for text in said) >= 3
    with docker_daemon(daemon_place):
        bench.complete("daemon")
