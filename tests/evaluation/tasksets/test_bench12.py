"""The shipped tasks: their own solutions solve all, and nothing less does, in both sandboxes."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import pytest

from compaction.protocols import Environment, Execution
from evaluation.settings import SandboxKind, SandboxSettings
from evaluation.tasksets.datasets import SHIPPED, Dataset, ensure_images, load_dataset
from evaluation.tasksets.task_folder import FolderTask

BENCH = SHIPPED["bench12"]
AGENTS = Path(__file__).parent / "bench12_agents"
IDS = sorted(folder.name for folder in BENCH.iterdir() if (folder / "task.toml").is_file())
COMMON = ("tests/test.sh", "tests/grading.py")
"""The same in every task"""
AT_ONCE = 4

pytest_plugins = ["tests.docker_engine"]


class Solvable(Environment, Protocol):
    async def solve(self) -> Execution: ...


@pytest.fixture(scope="module", params=["docker", "local"])
def bench(request: pytest.FixtureRequest) -> Dataset:
    kind: SandboxKind = request.param
    dataset = load_dataset("bench12", sandbox=SandboxSettings(kind=kind))
    if kind == "docker":
        client: Any = request.getfixturevalue("docker_engine")
        if not client.images.list("debian:bookworm-slim"):
            client.images.get("local/debian").tag("debian", "bookworm-slim")
        ensure_images(dataset)
    elif sys.platform != "linux" or shutil.which("bwrap") is None:
        pytest.skip("the local sandbox needs Linux with bubblewrap")
    return dataset


async def run_solution(environment: Solvable) -> None:
    """A half solution too runs to its end: it is wrong, not broken."""
    execution = await environment.solve()
    assert execution.exit_code == 0, execution.output[-2000:]


async def do_nothing(environment: Solvable) -> None:
    await environment.execute("ls")


async def cheat(environment: Solvable) -> None:
    await environment.upload("/tmp/cheat.sh", (AGENTS / "cheat.sh").read_bytes())
    execution = await environment.execute("bash /tmp/cheat.sh")
    assert execution.exit_code == 0, execution.output


def rewards(dataset: Dataset, agent: Any) -> dict[str, float]:
    """What the verifier gives for each task after the agent."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(task: FolderTask) -> float:
        async with places:
            environment = cast(Solvable, task.open())
            try:
                await environment.start()
                await agent(environment)
                return await environment.grade()
            finally:
                await environment.stop()

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*map(one, dataset.tasks))

    return dict(zip((task.id for task in dataset.tasks), asyncio.run(all_of_them()), strict=True))


@pytest.mark.slow
def test_the_own_solutions_solve_every_task(bench: Dataset) -> None:
    assert rewards(bench, run_solution) == dict.fromkeys(IDS, 1.0)


@pytest.mark.slow
def test_doing_nothing_solves_none(bench: Dataset) -> None:
    assert rewards(bench, do_nothing) == dict.fromkeys(IDS, 0.0)


@pytest.mark.slow
def test_half_solutions_solve_none(bench: Dataset, tmp_path: Path) -> None:
    halves = []
    for task in bench.tasks:
        copy = tmp_path / task.id
        shutil.copytree(task.folder.path, copy)
        (copy / "solution/solve.sh").rename(copy / "solution/full.sh")
        shutil.copy(AGENTS / task.id / "half.sh", copy / "solution/solve.sh")
        halves.append(replace(task, folder=replace(task.folder, path=copy)))
    assert rewards(replace(bench, tasks=tuple(halves)), run_solution) == dict.fromkeys(IDS, 0.0)


@pytest.mark.slow
def test_cheating_solves_none(bench: Dataset) -> None:
    assert rewards(bench, cheat) == dict.fromkeys(IDS, 0.0)


# What the folders look like


def test_twelve_tasks_each_with_a_half_solution() -> None:
    assert len(IDS) == 12
    assert sorted(path.name for path in AGENTS.iterdir() if path.is_dir()) == IDS


@pytest.mark.parametrize("id", IDS)
def test_a_task_says_what_it_needs(id: str) -> None:
    (task,) = load_dataset("bench12", sandbox=SandboxSettings(), include=[id]).tasks
    folder = task.folder
    assert (folder.name, folder.network, folder.cpus, folder.notes) == (id, "no-network", 1, ())
    assert folder.agent_timeout is not None
    assert 600 <= folder.agent_timeout <= 900
    assert folder.memory_mb is not None
    assert 512 <= folder.memory_mb <= 1024
    assert "/app/" in folder.instruction
    steps = [line.split()[0] for line in folder.dockerfile.read_text().splitlines()]
    assert set(steps) <= {"FROM", "ENV", "WORKDIR", "COPY"}
    assert folder.dockerfile.read_text().startswith(f"FROM {(BENCH / 'image/TAG').read_text()}")
    assert sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file()) < 300_000


@pytest.mark.parametrize("name", COMMON)
def test_what_the_tasks_share_is_the_same(name: str) -> None:
    assert len({(BENCH / id / name).read_text() for id in IDS}) == 1


def test_every_script_is_one_for_bash() -> None:
    scripts = [*BENCH.rglob("*.sh"), *AGENTS.rglob("*.sh")]
    assert len(scripts) > 3 * len(IDS)
    for script in scripts:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script


def test_without_its_tools_a_verifier_gives_no_reward(tmp_path: Path) -> None:
    """Run where there is no python3: nothing is written, so the trial counts as unscored and not as 0."""
    text = (BENCH / IDS[0] / "tests/test.sh").read_text().replace("/logs", str(tmp_path))
    (tmp_path / "bin").mkdir()
    for tool in ("dirname", "mkdir", "rm"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    (tmp_path / "verifier").mkdir()
    (tmp_path / "verifier/reward.txt").write_text("1\n")
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", text],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no reward" in done.stderr
    assert list((tmp_path / "verifier").iterdir()) == []
