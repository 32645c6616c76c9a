"""Running stages: made once, reused with a link, recorded, bounded; expected errors end as one message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compaction.protocols import EngineError
from compaction.window import WindowTooSmall
from rl.errors import (
    CheckpointError,
    CheckpointNotFound,
    NoUsableRollouts,
    TrainingDiverged,
    TrainingError,
    WorkerLost,
)
from tasks.caching import StageOutcome, StageSpec, StageStore
from tasks.cluster import Cluster
from tasks.errors import CommandError, UserError
from tasks.progress import open_progress
from tasks.stages import EXPECTED, KeptSlot, StageRun, StageRunner, explained
from tasks.tracking import Tracker, client_for

SPEC = StageSpec("ppo", "compactionrl seed 0", {"steps": 2, "ppo": {"lr": 0.1}})


@pytest.fixture
def runner(mlflow_uri: str, tmp_path: Path) -> Iterator[StageRunner]:
    opened = Tracker.open(
        mlflow_uri, preset="t", config={}, config_digest="d", artifacts=tmp_path / "artifacts", name="run", tags={}
    )
    with opened as tracker, open_progress("log") as progress:
        cluster = Cluster(None, "never started", tmp_path / "logs")
        yield StageRunner(StageStore(tmp_path / "stages"), tracker, progress, cluster, asyncio.Semaphore(1))


def make(runner: StageRunner, spec: StageSpec, body: Any, **options: Any) -> StageOutcome:
    """The stage without its Prefect task."""
    params = options.get("params")
    return asyncio.run(runner._outcome(spec, body, 2, "steps", {"seed": 0}, params))


async def two_steps(stage: StageRun) -> dict[str, Any]:
    for done in (1, 2):
        stage.log(done, {"train/reward": done / 4, "train/loss": 0.5}, {"train/reward": done / 4})
    (stage.folder / "policy.txt").write_text("weights")
    return {"curves": [0.25, 0.5]}


def child_runs(runner: StageRunner) -> list[Any]:
    parent = runner.tracker.parent
    runs = parent.client.search_runs([parent.experiment_id])
    return [r for r in runs if r.info.run_id != parent.run_id]


def test_a_stage_is_recorded_and_the_second_time_reused_and_linked(runner: StageRunner) -> None:
    first = make(runner, SPEC, two_steps)
    assert (first.cached, first.why) == (False, "never run")
    assert first.result == {"curves": [0.25, 0.5]}
    assert (first.folder / "policy.txt").read_text() == "weights"
    (child,) = child_runs(runner)
    assert child.info.status == "FINISHED"
    assert child.data.params["ppo.lr"] == "0.1"
    assert {"stage": "ppo", "seed": "0"}.items() <= child.data.tags.items()
    rewards = runner.tracker.parent.client.get_metric_history(child.info.run_id, "train/reward")
    assert [(m.step, m.value) for m in rewards] == [(0, 0.25), (1, 0.5)]

    async def never(stage: StageRun) -> dict[str, Any]:
        raise AssertionError("not run again")

    again = make(runner, SPEC, never)
    assert (again.cached, again.why, again.folder) == (True, "unchanged", first.folder)
    parent = runner.tracker.parent
    assert parent.client.get_run(parent.run_id).data.tags["cached/ppo_compactionrl_seed_0"] == child.info.run_id
    assert len(child_runs(runner)) == 1


def test_a_cell_logs_its_params_and_not_the_settings(runner: StageRunner) -> None:
    make(runner, SPEC, two_steps, params={"window": 128, "cap": 0, "keep_recent": None})
    (child,) = child_runs(runner)
    assert child.data.params == {"window": "128", "cap": "0", "keep_recent": "None"}
    assert child.data.tags["kind"] == "cell"


def test_a_failed_stage_is_not_done_and_goes_on_with_what_it_left(runner: StageRunner) -> None:
    async def dies(stage: StageRun) -> dict[str, Any]:
        stage.log(1, {"train/reward": 0.25}, {})
        (stage.folder / "half").write_text("way")
        raise WorkerLost("the trainer process died (ActorDiedError)")

    with pytest.raises(CommandError, match=r"ppo compactionrl seed 0: the trainer process died .* the same command"):
        make(runner, SPEC, dies)
    (child,) = child_runs(runner)
    assert child.info.status == "FAILED"

    async def goes_on(stage: StageRun) -> dict[str, Any]:
        assert (stage.folder / "half").read_text() == "way"
        return await two_steps(stage)

    outcome = make(runner, SPEC, goes_on)
    assert outcome.why == "never run; continues what was begun"
    (child,) = child_runs(runner)
    assert child.info.status == "FINISHED", "the same MLflow run was reopened"
    history = client_for(runner.tracker.parent.client.tracking_uri).get_metric_history(
        child.info.run_id, "train/reward"
    )
    assert [(m.step, m.value) for m in history] == [(0, 0.25), (1, 0.5)]


def test_a_stage_that_infrastructure_failed_is_attempted_again_without_doubled_steps(runner: StageRunner) -> None:
    attempts: list[int] = []

    async def dies_once(stage: StageRun) -> dict[str, Any]:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            stage.log(1, {"train/reward": 0.25}, {})
            raise WorkerLost("the trainer process died (ActorDiedError)")
        return await two_steps(stage)

    assert make(runner, SPEC, dies_once).result == {"curves": [0.25, 0.5]}
    assert attempts == [0, 1]
    (child,) = child_runs(runner)
    rewards = runner.tracker.parent.client.get_metric_history(child.info.run_id, "train/reward")
    assert [(m.step, m.value) for m in rewards] == [(0, 0.25), (1, 0.5)]


def test_what_another_attempt_would_not_mend_is_attempted_once(runner: StageRunner) -> None:
    attempts: list[int] = []

    async def diverges(stage: StageRun) -> dict[str, Any]:
        attempts.append(len(attempts))
        raise TrainingDiverged("3 steps in a row")

    with pytest.raises(CommandError):
        make(runner, SPEC, diverges)
    assert attempts == [0]


def test_stages_beyond_the_slots_wait_and_reuse_waits_for_nobody(runner: StageRunner) -> None:
    make(runner, SPEC, two_steps)
    events: list[str] = []

    def body(name: str) -> Any:
        async def run(stage: StageRun) -> dict[str, Any]:
            events.append(f"{name} begins")
            await asyncio.sleep(0.05)
            events.append(f"{name} ends")
            return {}

        return run

    async def all_of_them() -> None:
        runner.slots = asyncio.Semaphore(1)
        specs = {name: StageSpec("ppo", name, {}) for name in ("a", "b")}
        made = [runner._outcome(spec, body(name), 1, "steps", {}, None) for name, spec in specs.items()]
        tasks = [asyncio.create_task(coroutine) for coroutine in made]
        await asyncio.sleep(0)
        reused = await runner._outcome(SPEC, two_steps, 2, "steps", {}, None)
        events.append(f"reused {reused.cached}")
        await asyncio.gather(*tasks)

    asyncio.run(all_of_them())
    assert events.index("reused True") < events.index("b ends")
    alone = [event for event in events if event != "reused True"]
    assert alone == ["a begins", "a ends", "b begins", "b ends"]


def test_stages_of_one_engine_keep_its_slot_while_others_wait_for_what_the_engine_holds(runner: StageRunner) -> None:
    """With a slot taken anew for each stage this would never end: the other has it, and waits for the engine."""
    engine_is_free = asyncio.Event()

    async def uses_the_engine(stage: StageRun) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {}

    async def needs_the_engine(stage: StageRun) -> dict[str, Any]:
        await engine_is_free.wait()
        return {}

    async def both() -> None:
        runner.slots = asyncio.Semaphore(1)
        slot = KeptSlot(runner.slots)
        first = asyncio.create_task(
            runner._outcome(StageSpec("evaluate", "1", {}), uses_the_engine, 1, "trials", {}, None, slot)
        )
        await asyncio.sleep(0)
        other = asyncio.create_task(runner._outcome(StageSpec("ppo", "o", {}), needs_the_engine, 1, "steps", {}, None))
        await first
        await runner._outcome(StageSpec("evaluate", "2", {}), uses_the_engine, 1, "trials", {}, None, slot)
        slot.close()
        engine_is_free.set()
        await other
        assert not runner.slots.locked()

    asyncio.run(asyncio.wait_for(both(), 30))


ENDINGS = [
    (
        TrainingDiverged("3 steps in a row were not finite; lower the learning rate"),
        UserError,
        "--set trainer.policy_lr",
    ),
    (NoUsableRollouts("3 batches in a row had no rollout with a reward"), CommandError, "the same command again"),
    (WorkerLost("the trainer process died (ActorDiedError)"), CommandError, "logs/ray"),
    (CheckpointError("could not write checkpoint x. Free space"), CommandError, "Free space"),
    (CheckpointNotFound("x holds no model checkpoint"), UserError, "no model checkpoint"),
    (WindowTooSmall("window 30: 40 tokens are needed"), UserError, "40 tokens are needed"),
    (EngineError("weights are not usable"), CommandError, "the same command again"),
]


@pytest.mark.parametrize(("error", "kind", "advice"), ENDINGS, ids=lambda value: getattr(value, "__name__", ""))
def test_expected_errors_end_as_one_message_with_a_next_step(
    error: Exception, kind: type[CommandError], advice: str
) -> None:
    with pytest.raises(CommandError) as caught, explained("ppo seed 0"):
        raise error
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith(f"ppo seed 0: {str(error).rstrip('.')}")
    assert advice in message
    assert "\n" not in message
    assert caught.value.__cause__ is error


def test_every_training_error_is_expected_and_a_bug_stays_a_bug() -> None:
    assert set(TrainingError.__subclasses__()) <= set(EXPECTED)
    with pytest.raises(KeyError), explained("ppo"):
        raise KeyError("a bug")


@pytest.mark.xdist_group("prefect")
def test_in_a_flow_each_stage_is_a_task_and_told_to_the_run(runner: StageRunner) -> None:
    from prefect import flow
    from prefect.testing.utilities import prefect_test_harness

    told: list[list[str]] = []
    runner.on_record = lambda records: told.append([f"{r.name} {r.label} {r.cached}" for r in records])

    @flow
    async def run() -> None:
        for _ in range(2):
            await runner.run(SPEC, two_steps, total=2, unit="steps", tags={})

    with prefect_test_harness(server_startup_timeout=600):
        asyncio.run(run())
    assert told[-1] == ["ppo compactionrl seed 0 False", "ppo compactionrl seed 0 True"]
    assert [r.seconds for r in runner.records] == [runner.records[0].seconds] * 2
    assert runner.records[0].why == "never run"
