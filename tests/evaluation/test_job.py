"""A job runs every trial that has no valid result, once, and loses nothing."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compaction.agent import run_rollout
from compaction.engines.scripted import ScriptedEngine
from compaction.protocols import Completion, EngineError, GenerateRequest
from compaction.rendering import ChatTemplateRenderer
from compaction.rollout import Rollout
from compaction.storage import read_rollouts
from evaluation.failures import failure_policy
from evaluation.grid import Cell
from evaluation.job import Job, JobBusy, JobChanged, JobOutcome, JobProgress, Trial, set_aside
from tests.compaction.parts import FilesTask, make_tokenizer, small_settings

CELL = Cell("scripted", 0, 160, 2, 1)
SETTINGS = {"agent": {"window": 160, "threshold": 60}}
SOLVE, FAIL = ["echo 42 > answer"], ["cat a"]


class Endpoint:
    """A scripted engine per attempt. `faults` maps (task, repeat) to the error classes of its first attempts."""

    def __init__(self, faults: dict[tuple[str, int], list[str]] | None = None, solved: Callable[[str], bool] = bool):
        self.faults, self.solved = faults or {}, solved
        self.started: Counter[tuple[str, int]] = Counter()
        self.running = self.most_running = 0
        self.renderer = ChatTemplateRenderer(make_tokenizer())

    async def attempt(self, trial: Trial, evidence: Path) -> Rollout:
        name = (trial.key.task, trial.key.repeat)
        fault = dict(enumerate(self.faults.get(name, []))).get(self.started[name])
        self.started[name] += 1
        (evidence / "verifier").mkdir()
        (evidence / "verifier" / "reward.txt").write_text(str(self.started[name]))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(0.001)
            actions = iter(SOLVE if self.solved(trial.key.task) else FAIL)
            engine = Faulty(lambda request: next(actions, "exit"), self.renderer)
            engine.fault = fault
            return await run_rollout(
                trial.task, engine, self.renderer, small_settings(), seed=trial.seed, rollout_id=f"{name}",
                grade_after=lambda error_class: failure_policy(error_class).grade,
            )  # fmt: skip
        finally:
            self.running -= 1


class Faulty(ScriptedEngine):
    fault: str | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        if self.fault and self.requests:
            raise EngineError("the endpoint said no", self.fault)
        return await super().generate(request)


def trials(n: int = 4, repeats: int = 2, checksum: str = "c") -> list[Trial]:
    return [
        Trial(CELL.trial_key("set", f"t{i}", repeat), FilesTask(id=f"t{i}"), seed=repeat, checksum=checksum)
        for i in range(n)
        for repeat in range(repeats)
    ]


def job(folder: Path, chosen: list[Trial] | None = None, settings: Any = SETTINGS, attempts: int = 3) -> Job:
    return Job(folder, settings, chosen or trials(), concurrency=3, attempts=attempts)


def run(folder: Path, endpoint: Endpoint, chosen: list[Trial] | None = None, **how: Any) -> JobOutcome:
    return asyncio.run(job(folder, chosen, **how).run(endpoint.attempt, lambda progress: None))


def test_every_trial_runs_once_side_by_side_and_is_found_again(tmp_path: Path):
    endpoint = Endpoint(solved=lambda task: task != "t3")
    seen: list[dict[str, float]] = []
    outcome = asyncio.run(job(tmp_path).run(endpoint.attempt, lambda progress: seen.append(progress.shown())))
    assert outcome.complete
    assert [r.reward for r in outcome.results] == [1.0] * 6 + [0.0] * 2
    assert set(endpoint.started.values()) == {1}
    assert endpoint.most_running == 3
    assert seen[0] == {"passed": 0, "failed": 0, "errored": 0, "left": 8}
    assert seen[-1] == {"passed": 6, "failed": 2, "errored": 0, "left": 0}
    again = Endpoint()
    assert run(tmp_path, again) == outcome
    assert not again.started


def test_a_trial_is_kept_as_trajectory_and_as_tokens(tmp_path: Path):
    run(tmp_path, Endpoint(), trials(1, 1))
    trajectory = json.loads((tmp_path / "t0__0/agent/trajectory.json").read_text())
    assert [step["source"] for step in trajectory["steps"]] == ["system", "user", "agent", "agent"]
    (rollout,) = read_rollouts(tmp_path / "t0__0/agent/rollout.parquet")
    assert (rollout.task_id, rollout.outcome.reward) == ("t0", 1.0)
    result = json.loads((tmp_path / "t0__0/result.json").read_text())
    assert result["verifier_result"] == {"rewards": {"reward": 1.0}}
    assert result["exception_info"] is None
    stats = json.loads((tmp_path / "result.json").read_text())["stats"]
    assert stats["evals"]["compactionrl__scripted__set"]["metrics"] == [{"mean": 1.0}]


def test_what_infrastructure_failed_is_tried_again_and_the_first_attempt_stays_to_be_read(tmp_path: Path):
    endpoint = Endpoint({("t1", 0): ["rate_limit", "connection"]})
    outcome = run(tmp_path, endpoint)
    assert outcome.complete
    assert endpoint.started[("t1", 0)] == 3
    assert sum(endpoint.started.values()) == 10
    first = tmp_path / "t1__0/attempts/1"
    assert (first / "verifier/reward.txt").read_text() == "1"
    assert json.loads((first / "result.json").read_text())["exception_info"]["exception_type"] == "rate_limit"
    assert (tmp_path / "t1__0/attempts/2/agent/trajectory.json").exists()
    assert (tmp_path / "t1__0/verifier/reward.txt").read_text() == "3"


def test_a_trial_that_stays_without_a_reward_is_never_a_zero_and_is_run_when_the_job_is_resumed(tmp_path: Path):
    outcome = run(tmp_path, Endpoint({("t0", 1): ["server_error"] * 2}), attempts=2)
    assert not outcome.complete
    assert outcome.stopped is None
    errored = next(r for r in outcome.results if r.reward is None)
    assert (errored.key.task, errored.key.repeat, errored.error_class) == ("t0", 1, "server_error")
    assert "as it stood, the verifier gave 1" in (tmp_path / "t0__1/result.json").read_text()
    again = Endpoint()
    assert run(tmp_path, again).complete
    assert dict(again.started) == {("t0", 1): 1}
    assert (tmp_path / "t0__1/attempts/2/result.json").exists()


def test_verifier_and_agent_failures_are_not_tried_again(tmp_path: Path):
    endpoint = Endpoint({("t0", 0): ["bad_request"]})
    assert not run(tmp_path, endpoint).complete
    assert endpoint.started[("t0", 0)] == 1


@pytest.mark.parametrize("error_class", ["authentication", "model_not_found", "budget_exceeded"])
def test_what_would_fail_every_trial_stops_the_job_and_the_rest_is_left_for_later(tmp_path: Path, error_class: str):
    endpoint = Endpoint({("t0", 0): [error_class]})
    outcome = run(tmp_path, endpoint)
    assert error_class in str(outcome.stopped)
    assert not outcome.complete
    assert len(outcome.results) == sum(endpoint.started.values()) < 8
    again = Endpoint()
    assert run(tmp_path, again).complete
    finished = {(r.key.task, r.key.repeat) for r in outcome.results if r.reward is not None}
    assert finished.isdisjoint(again.started)
    assert len(again.started) == 8 - len(finished)


def test_other_settings_are_refused_with_the_difference_and_nothing_is_touched(tmp_path: Path):
    run(tmp_path, Endpoint())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(JobChanged, match=r"agent.threshold 60 → 40"):
        run(tmp_path, Endpoint(), settings={"agent": {"window": 160, "threshold": 40}})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_task_that_has_changed_is_refused_by_name(tmp_path: Path):
    run(tmp_path, Endpoint())
    with pytest.raises(JobChanged, match="task t0 has changed"):
        run(tmp_path, Endpoint(), trials(checksum="other"))


def test_more_tasks_and_repeats_extend_a_job(tmp_path: Path):
    run(tmp_path, Endpoint(), trials(2, 1))
    endpoint = Endpoint()
    assert len(run(tmp_path, endpoint, trials(3, 2)).results) == 6
    assert len(endpoint.started) == 4


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"compactionrl": {}}', '{"compactionrl": {"trial": {}}}', "\udcff"]
)
def test_a_damaged_result_is_run_again_and_kept(tmp_path: Path, content: str):
    run(tmp_path, Endpoint())
    (tmp_path / "t2__1/result.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    endpoint = Endpoint()
    assert run(tmp_path, endpoint).complete
    assert dict(endpoint.started) == {("t2", 1): 1}
    kept = (tmp_path / "t2__1/attempts/1/result.json").read_bytes()
    assert kept == content.encode("utf-8", "surrogateescape")


def test_a_job_that_is_cancelled_goes_on_where_it_was(tmp_path: Path):
    async def cancelled() -> None:
        endpoint = Endpoint()

        def on_progress(progress: JobProgress) -> None:
            if progress.done == 3:
                task.cancel()

        task = asyncio.create_task(job(tmp_path).run(endpoint.attempt, on_progress))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    finished = {path.parent.name for path in tmp_path.glob("*/result.json")}
    endpoint = Endpoint()
    assert run(tmp_path, endpoint).complete
    assert {f"{task}__{repeat}" for task, repeat in endpoint.started}.isdisjoint(finished)
    assert len(endpoint.started) == 8 - len(finished)


def test_two_commands_do_not_run_one_job(tmp_path: Path):
    async def both() -> None:
        first = asyncio.create_task(job(tmp_path).run(Endpoint().attempt, lambda progress: None))
        await asyncio.sleep(0.005)
        with pytest.raises(JobBusy, match="another command"):
            await job(tmp_path).run(Endpoint().attempt, lambda progress: None)
        await first

    asyncio.run(both())


def test_a_job_that_is_run_anew_leaves_the_old_one_beside_it_but_not_while_it_runs(tmp_path: Path):
    folder = tmp_path / "cell"

    async def refused_while_it_runs() -> None:
        running = asyncio.create_task(job(folder).run(Endpoint().attempt, lambda progress: None))
        await asyncio.sleep(0.005)
        with pytest.raises(JobBusy, match="another command"):
            set_aside(folder)
        await running

    asyncio.run(refused_while_it_runs())
    set_aside(folder)
    endpoint = Endpoint()
    run(folder, endpoint)
    assert len(endpoint.started) == 8
    (old,) = [path for path in tmp_path.iterdir() if path != folder]
    assert len(list(old.glob("*/result.json"))) == 8


def test_starts_can_be_counted_afterwards(tmp_path: Path):
    run(tmp_path, Endpoint({("t1", 0): ["connection"]}))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    started = Counter((e["task"], e["repeat"]) for e in lines if e["event"] == "started")
    assert started[("t1", 0)] == 2
    assert sum(started.values()) == 9
    assert [e["attempt"] for e in lines if e["task"] == "t1" and e["repeat"] == 0] == [1, 1, 2, 2]
