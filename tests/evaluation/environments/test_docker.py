"""Task folders in containers of a real Docker engine, and what happens when the engine goes away."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from compaction.protocols import EnvironmentFailure
from evaluation.environments import sandbox as sandbox_module
from evaluation.environments.docker import RUN_LABEL, DockerEnvironment
from evaluation.environments.docker_images import IMAGE_LABEL, content_digest
from evaluation.environments.docker_leftovers import OWNER_LABEL, reap_dead_containers
from evaluation.environments.owners import Owner
from tests.evaluation.environments.sandbox_contract import SandboxContract

pytestmark = [pytest.mark.xdist_group("docker"), pytest.mark.usefixtures("docker_engine")]


def containers(engine: Any, label: str = OWNER_LABEL) -> list[Any]:
    found: list[Any] = engine.containers.list(all=True, filters={"label": label}, ignore_removed=True)
    return found


class Proxy:
    """A daemon that can be killed: passes connections on until `die`."""

    def __init__(self, path: Path, target: str) -> None:
        self.host = f"unix://{path}"
        self._target = target.removeprefix("unix://")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._open: list[socket.socket] = [self._server]
        self.deaf = threading.Event()
        """Set: nothing is passed on any more, and no connection closed"""
        threading.Thread(target=self._accept, daemon=True).start()

    def die(self) -> None:
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                daemon = socket.socket(socket.AF_UNIX)
                daemon.connect(self._target)
                self._open += [client, daemon]
                for pair in ((client, daemon), (daemon, client)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.deaf.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(docker_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path / "docker.sock", os.environ["DOCKER_HOST"])
    monkeypatch.setenv("DOCKER_HOST", proxy.host)
    yield proxy
    proxy.die()


class TestDocker(SandboxContract):
    kind = DockerEnvironment

    def test_a_plain_shell_is_enough(self) -> None:
        sandbox = self.sandbox({"environment/Dockerfile": 'FROM local/busybox\nWORKDIR /app\nENTRYPOINT ["false"]\n'})
        results = self.run("export X='a\nb'; mkdir d; cd d; exit 4", 'pwd; echo "$X"; if', "echo $0", sandbox=sandbox)
        assert [r.exit_code for r in results] == [4, 2, 0]
        assert results[2].output == "sh\n"
        assert self.graded(self.sandbox({"environment/Dockerfile": "FROM local/busybox\n"})) == 1

    def test_a_ready_image_is_taken_as_it_is(self) -> None:
        (execution,) = self.run("pwd; ls /bin/busybox", sandbox=self.sandbox(docker_image="local/busybox"))
        assert execution.output == "/\n/bin/busybox\n"

    def test_an_image_that_cannot_be_had_is_named(self) -> None:
        sandbox = self.sandbox(docker_image="localhost:1/no/such:image")
        with pytest.raises(EnvironmentFailure, match="docker pull localhost:1/no/such:image") as raised:
            self.run(sandbox=sandbox)
        assert raised.value.error_class == "environment_start"

    def test_a_failing_build_shows_its_last_lines(self) -> None:
        files = {"environment/Dockerfile": "FROM local/debian\nRUN echo about to fail; exit 9\n"}
        with pytest.raises(EnvironmentFailure, match=r"(?s)about to fail.*code: 9") as raised:
            self.run(sandbox=self.sandbox(files))
        assert raised.value.error_class == "environment_build"

    def test_a_build_that_hangs_is_given_up(self, docker_engine: Any) -> None:
        files = {"environment/Dockerfile": "FROM local/debian\nRUN sleep 611\n"}
        began = time.monotonic()
        with pytest.raises(EnvironmentFailure, match=r"stopped answering|did not end within") as raised:
            self.run(sandbox=self.sandbox(files, build_timeout=5.0))
        assert raised.value.error_class == "environment_build"
        assert time.monotonic() - began < 120
        for _ in range(600):
            if not any(
                "611" in str(c.attrs["Config"]["Cmd"]) for c in docker_engine.containers.list(ignore_removed=True)
            ):
                return
            time.sleep(0.1)
        pytest.fail("the build's container still runs")

    def test_equal_environments_build_once_also_at_the_same_time(self, docker_engine: Any) -> None:
        files = {"environment/Dockerfile": f"FROM local/debian\nRUN date +%N >/stamp; : {time.time_ns()}\n"}
        sandboxes = [self.sandbox(files) for _ in range(3)]
        tag = f"compactionrl/task:{content_digest(self.place / 'environment')}"

        async def together() -> set[str]:
            try:
                await asyncio.gather(*(s.start() for s in sandboxes))
                return {(await s.execute("cat /stamp")).output for s in sandboxes}
            finally:
                await asyncio.gather(*(s.stop() for s in sandboxes))

        try:
            assert len(asyncio.run(together())) == 1
            assert IMAGE_LABEL in docker_engine.images.get(tag).labels
        finally:
            docker_engine.images.remove(tag, force=True)

    def test_another_user_works_and_another_grades(self) -> None:
        files = {
            "environment/Dockerfile": "FROM local/debian\nRUN useradd -m ann && useradd bob && install -d -o ann /app\n"
            "WORKDIR /app\nUSER bob\n",
            "tests/test.sh": "id -un; [ $(stat -c %U done) = ann ] && echo 1 >/logs/verifier/reward.txt",
        }
        assert self.graded(self.sandbox(files, agent_user="ann"), "touch done") == 1
        assert (self.place.parent / "evidence/verifier/test-stdout.txt").read_text() == "bob\n"

    def test_limits_and_labels_are_on_the_container(self, docker_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COMPACTIONRL_RUN", "/home/runs/x")
        sandbox = self.sandbox(settings={"pids": 77, "file_mb": 3}, memory_mb=50, cpus=0.5, network="no-network")

        async def inspect() -> dict[str, Any]:
            try:
                await sandbox.start()
                (container,) = [c for c in containers(docker_engine) if c.labels[RUN_LABEL] == "/home/runs/x"]
                attributes: dict[str, Any] = container.attrs
                return attributes
            finally:
                await sandbox.stop()

        attributes = asyncio.run(inspect())
        host = attributes["HostConfig"]
        assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (50 << 20, 50 << 20, 77)
        assert (host["CpuQuota"] / host["CpuPeriod"], host["NetworkMode"], host["Init"]) == (0.5, "none", True)
        assert attributes["Config"]["Labels"][OWNER_LABEL] == str(Owner.current())

    def test_a_command_that_ends_everything_leaves_a_sandbox_that_works(self) -> None:
        _, ended, after = self.run("cd data; export X=1", "kill -9 -1; sleep 5", "pwd; echo $X; cat one.txt")
        assert "ended" in ended.note + after.note
        assert after.output == "/app/data\n1\none\n"

    def test_a_container_that_memory_took_down_is_an_error_of_its_own(self) -> None:
        # Many small hogs, and the keep-alive as the kernel's first choice, once its shell has become a sleep.
        hogs = "for i in 1 2 3 4 5 6; do python3 -c 'x = b\"1\" * (8 << 20); import time; time.sleep(30)' & done; wait"
        there = "until grep -qs sleep /proc/[0-9]*/comm; do :; done"
        first = "for p in /proc/[0-9]*; do grep -q sleep $p/comm && echo 1000 >$p/oom_score_adj; done"
        sandbox: Any = self.sandbox(memory_mb=32)

        async def both() -> None:
            for command in (f"{there}; {first}; {hogs}", "true"):
                await sandbox.execute(command)

        async def go() -> None:
            try:
                await sandbox.start()
                with pytest.raises(EnvironmentFailure, match="32 MiB") as raised:
                    await both()
                assert raised.value.error_class == "sandbox_oom"
                # A daemon that heard of the end first no longer puts the cause into the state.
                sandbox._container.attrs["State"]["OOMKilled"] = False
                with pytest.raises(EnvironmentFailure, match="32 MiB"):
                    sandbox._revive()
            finally:
                await sandbox.stop()

        asyncio.run(go())

    def test_a_container_that_is_gone_is_an_error(self, docker_engine: Any) -> None:
        sandbox = self.sandbox(env={"MARK": "gone"})

        async def go() -> None:
            try:
                await sandbox.start()
                for container in containers(docker_engine):
                    if "MARK=gone" in container.attrs["Config"]["Env"]:
                        container.remove(force=True)
                await sandbox.execute("true")
            finally:
                await sandbox.stop()

        with pytest.raises(EnvironmentFailure, match="No such container") as raised:
            asyncio.run(go())
        assert raised.value.error_class == "environment"

    def test_nothing_is_left_behind(self, docker_engine: Any) -> None:
        before = {c.id for c in containers(docker_engine)}
        self.run("true")
        assert {c.id for c in containers(docker_engine)} <= before

    # The engine goes away

    def test_a_daemon_that_does_not_answer_is_explained(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
        with pytest.raises(
            EnvironmentFailure, match=r"is Docker running\? DOCKER_HOST=.*none.sock.*--env local"
        ) as raised:
            self.run(sandbox=self.sandbox())
        assert raised.value.error_class == "environment_start"

    def test_a_daemon_killed_in_mid_command_is_an_infrastructure_error(self, proxy: Proxy, docker_engine: Any) -> None:
        before = {c.id for c in containers(docker_engine)}
        sandbox = self.sandbox()

        async def go() -> float:
            await sandbox.start()
            command = asyncio.create_task(sandbox.execute("sleep 30"))
            await asyncio.sleep(0.5)
            proxy.die()
            began = time.monotonic()
            with pytest.raises(EnvironmentFailure) as raised:
                await command
            assert raised.value.error_class == "environment"
            await sandbox.stop()
            return time.monotonic() - began

        try:
            assert asyncio.run(go()) < 10
        finally:
            for container in containers(docker_engine):
                if container.id not in before:
                    container.remove(force=True)

    def test_a_stop_that_hangs_is_left(
        self, proxy: Proxy, docker_engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(sandbox_module, "STOP_SECONDS", 1.0)
        before = {c.id for c in containers(docker_engine)}
        sandbox = self.sandbox()

        async def go() -> float:
            await sandbox.start()
            proxy.deaf.set()
            began = time.monotonic()
            await sandbox.stop()
            seconds = time.monotonic() - began
            proxy.die()
            return seconds

        try:
            assert asyncio.run(go()) < 5
            assert "left behind" in caplog.text
        finally:
            for container in containers(docker_engine):
                if container.id not in before:
                    container.remove(force=True)

    def test_what_nobody_stopped_goes_with_its_driver(self, docker_engine: Any) -> None:
        self.sandbox()
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.evaluation.environments.driver", "docker", str(self.place)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with driver:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "running\n"
            driver.send_signal(signal.SIGINT)
        assert [c for c in containers(docker_engine) if f"_{driver.pid}_" in c.labels[OWNER_LABEL]] == []

    def test_what_a_killed_driver_leaves_is_removed_at_the_next_start(self, docker_engine: Any) -> None:
        self.sandbox()
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.evaluation.environments.driver", "docker", str(self.place)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert driver.stdout is not None
        assert driver.stdout.readline() == "running\n"
        mine = [c for c in containers(docker_engine) if f"_{driver.pid}_" in c.labels[OWNER_LABEL]]
        assert len(mine) == 1
        reap_dead_containers(docker_engine)
        assert mine[0].id in {c.id for c in containers(docker_engine)}
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        driver.stdout.close()
        reap_dead_containers(docker_engine)
        assert mine[0].id not in {c.id for c in containers(docker_engine)}
