"""Sixty turns with three compactions in real sandboxes, kept in Harbor's formats as Harbor itself reads them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compaction.agent import run_rollout
from compaction.engines.scripted import ScriptedEngine
from compaction.protocols import EngineError, GenerateRequest
from compaction.rendering import ChatTemplateRenderer
from compaction.rollout import Rollout
from compaction.settings import AgentSettings, CompactionSettings
from compaction.storage import read_rollouts
from evaluation.failures import failure_policy
from evaluation.grid import Cell
from evaluation.job import Job, JobOutcome, Trial
from evaluation.settings import SandboxKind, SandboxSettings
from evaluation.tasksets.task_folder import FolderTask, load_task_folder
from tests.compaction.parts import make_tokenizer
from tests.docker_engine import docker_engine as docker_engine
from tests.flows import memory_agent as memory

pytestmark = pytest.mark.xdist_group("long-trajectories")

TURNS = 60
"""The last of them is `exit`"""
COMPACTIONS = 3
CELL = Cell("scripted", 0, window=1_150, cap=5, keep_recent=2)
THRESHOLD = 200
COUNT = memory.block("echo $TAG >> log; wc -l < log")
ALL_RIGHT, NOT_WRITTEN, NO_ENGINE = "counts", "forgets", "stops"
"""Tasks: one that is done, one whose agent does not do it, one whose engine fails in the middle"""
VERIFY = f'[ "$(grep -c ^kept$ /app/log)" = {TURNS - 2} ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n'


def write_task(folder: Path, base: str) -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "environment/Dockerfile").write_text(f"FROM {base}\nWORKDIR /app\n")
    (folder / "task.toml").write_text('schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n')
    (folder / "instruction.md").write_text("count")
    (folder / "tests").mkdir()
    (folder / "tests/test.sh").write_text(VERIFY)
    return folder


class Played:
    """One job of the three tasks in one kind of sandbox."""

    def __init__(self, root: Path, kind: SandboxKind, base: str) -> None:
        self.folder = root / "job"
        self.renderer = ChatTemplateRenderer(make_tokenizer())
        self.settings = AgentSettings(
            scaffold="bash-block",
            compaction=CompactionSettings(
                window=CELL.window, cap=CELL.cap, keep_recent=CELL.keep_recent or 0, threshold=THRESHOLD,
                max_response=80, min_response=8, summary_cap=48, prompt_pack=str(memory.write_pack(root / "pack.yaml")),
            ),
        )  # fmt: skip
        sandbox = SandboxSettings(kind=kind)
        self.trials = [
            Trial(CELL.trial_key("long", name, 0), FolderTask(load_task_folder(path), sandbox), 0, "c", path)
            for name in (ALL_RIGHT, NOT_WRITTEN, NO_ENGINE)
            for path in [write_task(root / "tasks" / name, base)]
        ]
        job = Job(self.folder, {"kind": kind}, self.trials, concurrency=2, attempts=1)
        self.outcome: JobOutcome = asyncio.run(job.run(self.attempt, lambda progress: None))

    async def attempt(self, trial: Trial, evidence: Path) -> Rollout:
        assert isinstance(trial.task, FolderTask)
        return await run_rollout(
            replace(trial.task, evidence=evidence),
            ScriptedEngine(Script(trial.key.task), self.renderer),
            self.renderer,
            self.settings,
            seed=0,
            rollout_id=evidence.name,
            grade_after=lambda error_class: failure_policy(error_class).grade,
        )

    def trajectory(self, task: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"{task}__0/agent/trajectory.json").read_text())
        return found


class Script:
    """`export`, then a line a turn, then `exit`."""

    def __init__(self, task: str) -> None:
        self.task, self.turn = task, 0

    def __call__(self, request: GenerateRequest) -> str:
        if request.kind == "summary":
            return f"at {self.turn:02d} of {TURNS} code none"
        self.turn += 1
        if self.task == NO_ENGINE and self.turn == TURNS // 2:
            raise EngineError("the server is gone", "connection")
        if self.turn == 1:
            return memory.block(f"export TAG={'lost' if self.task == NOT_WRITTEN else 'kept'}")
        return memory.block("exit") if self.turn == TURNS else COUNT


@pytest.fixture(
    scope="module",
    params=["docker", pytest.param("local", marks=[pytest.mark.may_skip] if sys.platform != "linux" else [])],
)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    base = "local/busybox"
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    elif shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    else:
        base = "debian:bookworm-slim"
    return Played(tmp_path_factory.mktemp(request.param), request.param, base)


def test_sixty_turns_with_three_compactions_are_one_session_of_the_sandbox(played: Played) -> None:
    rewards = {result.key.task: result.reward for result in played.outcome.results}
    assert rewards == {ALL_RIGHT: 1.0, NOT_WRITTEN: 0.0, NO_ENGINE: None}
    (rollout,) = read_rollouts(played.folder / f"{ALL_RIGHT}__0/agent/rollout.parquet")
    assert (len(rollout.turns), rollout.n_compactions) == (TURNS, COMPACTIONS)
    assert len(rollout.segments) == 2 * COMPACTIONS + 1
    seen = [turn.observation.split()[-1] for turn in rollout.turns[1:-1]]
    assert seen == [str(n) for n in range(1, TURNS - 1)]  # file, folder and variable outlive every compaction


def test_a_trajectory_marks_each_compaction_where_it_was(played: Played) -> None:
    trajectory = played.trajectory(ALL_RIGHT)
    steps = trajectory["steps"]
    assert [step["step_id"] for step in steps] == list(range(1, len(steps) + 1))
    assert len(steps) == 2 + TURNS + 2 * COMPACTIONS  # system, task; a summary and a resume message each
    marked = [number for number, step in enumerate(steps) if "compaction" in step.get("extra", {})]
    assert len(marked) == COMPACTIONS
    for number, done in zip(marked, (18, 34, 50), strict=True):
        mark = steps[number]["extra"]["compaction"]
        assert CELL.window - mark["tokens_before"] < THRESHOLD <= CELL.window - mark["tokens_after"]
        assert (mark["kept"], mark["rejected"]) == (2, None)
        assert steps[number]["message"] == f"at {done} of {TURNS} code none"
        assert steps[number + 1] == {
            "step_id": number + 2,
            "source": "user",
            "message": f"resumed at {done} of {TURNS} code none go on",
        }
    assert trajectory["final_metrics"]["extra"]["compactions"] == COMPACTIONS


HARBOR = """
import json, sys
from pathlib import Path
from harbor.models.job.result import JobResult, JobStats
from harbor.models.trajectories.trajectory import Trajectory
from harbor.models.trial.result import TrialResult
from harbor.viewer.scanner import JobScanner

folder = Path(sys.argv[1])
names = sorted(path.parent.name for path in folder.glob("*/result.json"))
trials = {name: TrialResult.model_validate_json((folder / name / "result.json").read_text()) for name in names}
trajectories = {
    name: Trajectory.model_validate_json((folder / name / "agent/trajectory.json").read_text()) for name in names
}
job = JobResult.model_validate_json((folder / "result.json").read_text())
stats = JobStats.from_trial_results(list(trials.values()), n_total_trials=len(names))
scanner = JobScanner(folder.parent)
print(json.dumps({
    "rewards": {name: trial.verifier_result and trial.verifier_result.rewards for name, trial in trials.items()},
    "valid": {name: trial.reward_valid for name, trial in trials.items()},
    "agents": sorted({trial.config.agent.import_path for trial in trials.values()}),
    "steps": {name: len(trajectory.steps) for name, trajectory in trajectories.items()},
    "ours": job.stats.model_dump(mode="json"),
    "theirs": stats.model_dump(mode="json"),
    "listed": scanner.list_trials(folder.name),
    "shown": scanner.get_job_result(folder.name) is not None,
}))
"""


@pytest.mark.may_skip
def test_harbor_reads_trajectories_and_results_and_counts_alike(played: Played) -> None:
    python = Path(os.environ.get("HARBOR_PYTHON", "/tmp/harbor-venv/bin/python"))
    if not python.exists():
        pytest.skip("no Python with Harbor: name it with HARBOR_PYTHON")
    done = subprocess.run([python, "-c", HARBOR, played.folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout)
    good, failed, stopped = (f"{name}__0" for name in (ALL_RIGHT, NOT_WRITTEN, NO_ENGINE))
    assert read["rewards"] == {good: {"reward": 1.0}, failed: {"reward": 0.0}, stopped: None}
    assert read["valid"] == {good: True, failed: True, stopped: False}
    assert read["agents"] == ["evaluation.harbor_agent:CompactionAgent"]
    assert read["steps"][good] == 2 + TURNS + 2 * COMPACTIONS
    assert read["listed"] == sorted([good, failed, stopped])
    assert read["shown"]
    ours, theirs = read["ours"], read["theirs"]
    for stats in (*ours["evals"].values(), *theirs["evals"].values()):
        del stats["metrics"], stats["pass_at_k"]  # which Harbor computes elsewhere
    assert ours == theirs
