"""An exported task is the same task: its shell runs give the in-process outputs and grade."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from evaluation.tasksets.harbor_export import WORKDIR, export_harbor
from evaluation.tasksets.trail import TrailSettings, TrailTask, trail_tasks

TASK = trail_tasks(TrailSettings(), "train", 1, seed=5)[0]


def prepared(task: TrailTask, folder: Path) -> tuple[Path, Path]:
    """(exported folder, a root laid out as the Dockerfile does)"""
    exported = export_harbor(task, folder / "tasks")
    root = folder / "root"
    shutil.copytree(exported / "environment" / "files", root / WORKDIR.lstrip("/"))
    return exported, root


def sh(root: Path, script: str | Path, *, text: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", str(script)] if text else ["sh", str(script)],
        cwd=root / WORKDIR.lstrip("/"),
        env={"PATH": os.environ["PATH"], "LC_ALL": "C", "TRAIL_ROOT": str(root)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def real_grade(exported: Path, root: Path) -> float:
    verifier = sh(root, exported / "tests" / "test.sh")
    assert verifier.returncode == 0, verifier.stdout
    return float((root / "logs/verifier/reward.txt").read_text())


def test_the_folder_is_a_harbor_task(tmp_path: Path) -> None:
    exported, root = prepared(TASK, tmp_path)
    assert exported.name == TASK.id
    config = tomllib.loads((exported / "task.toml").read_text())
    assert config["schema_version"] == "1.4"
    assert config["task"]["name"] == f"compactionrl/{TASK.id}"
    assert config["environment"]["workdir"] == WORKDIR
    assert (exported / "instruction.md").read_text() == TASK.instruction
    assert {p.name: p.read_text() for p in (root / "trail").iterdir()} == dict(TASK.files)
    for script in ("tests/test.sh", "solution/solve.sh"):
        assert os.access(exported / script, os.X_OK)
    seen_by_agent = [p for p in (exported / "environment").rglob("*") if p.is_file()]
    assert not any(" ".join(TASK.answer) in p.read_text() for p in seen_by_agent)


def test_the_solution_earns_the_reward_and_doing_nothing_does_not(tmp_path: Path) -> None:
    exported, root = prepared(TASK, tmp_path)
    assert real_grade(exported, root) == 0.0
    assert sh(root, exported / "solution" / "solve.sh").returncode == 0
    assert real_grade(exported, root) == 1.0


def test_an_existing_folder_is_not_mixed_with_another_task(tmp_path: Path) -> None:
    export_harbor(TASK, tmp_path)
    with pytest.raises(FileExistsError):
        export_harbor(TASK, tmp_path)


names = st.sampled_from([*TASK.path, "nope", TASK.out])
facts = st.lists(st.sampled_from([*TASK.answer, "z9"]), max_size=3).map(" ".join)
commands = st.one_of(
    names.map("cat {}".format),
    st.just("ls"),
    st.tuples(facts, names).map(lambda t: f"grep -n '{t[0]}' {t[1]} {TASK.start}"),
    st.tuples(facts, st.sampled_from([">", ">>"]), names).map(lambda t: f"echo {t[0]} {t[1]} {t[2]}"),
    st.sampled_from([">", ">>"]).map(lambda operator: f"echo {' '.join(TASK.answer)} {operator} {TASK.out}"),
    st.sampled_from(["\\n", "\\t", "  "]).map(lambda gap: f"echo '{gap.join(TASK.answer)}{gap}' > {TASK.out}"),
    st.just(f'echo "{" ".join(TASK.answer)} *" > {TASK.out}'),
)


@seed(20240608)
@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(commands, min_size=1, max_size=6))
def test_a_real_shell_gives_the_same_outputs_and_the_same_grade(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    exported, root = prepared(TASK, tmp_path_factory.mktemp("harbor"))

    async def compare() -> float:
        environment = TASK.open()
        await environment.start()
        for line in lines:
            ours = await environment.execute(line)
            real = sh(root, line, text=True)
            assert (ours.output, ours.exit_code) == (real.stdout, real.returncode), line
        return await environment.grade()

    assert asyncio.run(compare()) == real_grade(exported, root)
