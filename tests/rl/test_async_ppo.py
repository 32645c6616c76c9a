"""The asynchronous loop on the real engine and trainer in one process: what overlaps, what is masked, what survives."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compaction.protocols import Task
from compaction.rollout import Outcome, Rollout
from compaction.settings import AgentSettings
from compaction.window import WindowTooSmall
from rl.async_ppo import staleness_metrics
from rl.errors import NoUsableRollouts
from rl.learner import StepResult
from tests.rl.samples import random_segment
from tests.rl.small import BrokenTask, HeldTask, SlowTask, TypedTask, WaitingTask, collect, local_loop


class Events(list[dict[str, Any]]):
    def emit(self, event: str, **fields: Any) -> None:
        self.append({"event": event} | fields)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self if e["event"] == event]


def slow(*numbers: int, seconds: float = 0.05) -> Any:
    def tasks(first: int, n: int) -> list[Task]:
        return [SlowTask(f"t{i}", seconds=seconds if i in numbers else 0.0) for i in range(first, first + n)]

    return tasks


def waiting(until: Callable[[], bool]) -> Any:
    """Task t0 goes on after its first command once `until` says so; the others do not wait."""

    def tasks(first: int, n: int) -> list[Task]:
        return [WaitingTask("t0", until=until) if i == 0 else TypedTask(f"t{i}") for i in range(first, first + n)]

    return tasks


def trained(results: list[StepResult]) -> list[str]:
    return [rollout.id for result in results for rollout in result.rollouts]


def versions(rollout: Rollout) -> set[int]:
    return {int(v) for s in rollout.segments for v in s.versions[s.optimized]}


def test_every_step_trains_a_whole_batch_and_every_started_rollout_is_trained_once(small_checkpoint: Path) -> None:
    events = Events()
    loop, worker, _ = local_loop(small_checkpoint, emit=events.emit, steps=4, max_staleness=2)
    results = collect(loop)
    assert [r.step for r in results] == [0, 1, 2, 3]
    assert [len(r.rollouts) for r in results] == [8] * 4
    assert worker.loaded == [1, 2, 3, 4]
    started = [e["rollout"] for e in events.of("started")]
    assert sorted(trained(results)) == sorted(started)
    assert len(set(started)) == 32
    assert [e["step"] for e in events.of("trained")] == [0, 1, 2, 3]
    assert sorted(r for e in events.of("trained") for r in e["rollouts"]) == sorted(started)


def test_a_slow_environment_holds_up_nobody_and_its_rollout_sees_several_versions(small_checkpoint: Path) -> None:
    tasks = waiting(until=lambda: 2 in worker.loaded)
    loop, worker, _ = local_loop(small_checkpoint, tasks, steps=6, max_staleness=3)
    results = collect(loop)
    late = next(r for result in results for r in result.rollouts if r.task_id == "t0")
    assert late.id not in {r.id for r in results[0].rollouts}
    assert len(versions(late)) > 1
    assert max(result.metrics["queue/staleness_max"] for result in results) > 0


def test_tokens_over_the_bound_are_masked_and_their_rollout_is_trained(small_checkpoint: Path) -> None:
    tasks = waiting(until=lambda: 2 in worker.loaded)
    loop, worker, trainer = local_loop(small_checkpoint, tasks, steps=6, max_staleness=1)
    results = collect(loop)
    step = next(r.step for r in results if "t0" in {rollout.task_id for rollout in r.rollouts})
    rows, _, included = trainer.given("update_policy")[step]
    for row, mask in zip(rows, included or [np.ones(row.n_optimized, bool) for row in rows], strict=True):
        assert np.array_equal(mask, step - row.versions[row.optimized] <= 1)
    late = next(r for r in results[step].rollouts if r.task_id == "t0")
    assert step - min(versions(late)) > 1, "the test is about a rollout that is too old"
    assert results[step].metrics["queue/masked_share"] > 0
    assert late.id in {row.rollout_id for row in rows}
    assert late.id in {row.rollout_id for row in trainer.given("values")[step][0]}, "its values count in every N"


def test_what_is_trained_has_as_many_compactions_as_what_was_started(small_checkpoint: Path) -> None:
    """Compacted rollouts are the slow ones here, as in earnest: a loop that drops late rollouts drops exactly them."""
    events = Events()
    loop, _, _ = local_loop(
        small_checkpoint, slow(*range(64), seconds=0.02), emit=events.emit, steps=8, max_staleness=1
    )
    results = collect(loop)
    finished = Counter(e["compactions"] for e in events.of("finished"))
    assert Counter(r.n_compactions for result in results for r in result.rollouts) == finished
    assert sum(finished.values()) == len(events.of("started")) == 64
    assert len(finished) > 1


def test_the_logprobs_are_those_of_the_version_on_the_token(small_checkpoint: Path) -> None:
    loop, _, _ = local_loop(small_checkpoint, slow(*range(0, 64, 3), seconds=0.02), steps=6, max_staleness=2)
    mismatch = [r.metrics["train/logprob_mismatch"] for r in collect(loop) if "train/logprob_mismatch" in r.metrics]
    assert mismatch
    assert max(mismatch) < 1e-5


def test_pretraining_learns_from_rollouts_of_the_policy_as_it_is(small_checkpoint: Path) -> None:
    loop, worker, trainer = local_loop(small_checkpoint, steps=3, max_staleness=1)
    results = collect(loop, update_policy=False)
    assert {name for name, _ in trainer.calls} == {"values", "update_critic"}
    assert worker.loaded == []
    assert {v for r in results for rollout in r.rollouts for v in versions(rollout)} == {0}


def test_the_group_estimator_gets_whole_groups(small_checkpoint: Path) -> None:
    loop, _, _ = local_loop(
        small_checkpoint, slow(1, 2), steps=3, max_staleness=1, group_size=4, advantage={"estimator": "group"}
    )
    for result in collect(loop):
        assert set(Counter(r.task_id for r in result.rollouts).values()) == {4}


def test_shares_say_where_the_time_went(small_checkpoint: Path) -> None:
    loop, _, _ = local_loop(small_checkpoint, slow(*range(99), seconds=0.02), steps=3, max_staleness=1)
    for result in collect(loop):
        worker = {name: v for name, v in result.metrics.items() if name.startswith("time/worker_0/")}
        assert {name.removeprefix("time/worker_0/") for name in worker} == {
            "generate_share", "environment_share", "wait_share", "sync_share",
        }  # fmt: skip
        assert all(0 <= share <= 1 for share in worker.values())
        trainer = [result.metrics[f"time/trainer/{part}_share"] for part in ("wait", "train", "sync")]
        assert sum(trainer) == pytest.approx(1.0)


# Faults -------------------------------------------------------------------------------------------------------------


def test_a_task_that_always_fails_is_quarantined_and_another_takes_its_place(small_checkpoint: Path) -> None:
    def tasks(first: int, n: int) -> list[Task]:
        return [BrokenTask(f"t{i}") if i == 2 else TypedTask(f"t{i}") for i in range(first, first + n)]

    events = Events()
    loop, _, _ = local_loop(small_checkpoint, tasks, emit=events.emit, steps=2, max_staleness=1, max_attempts=3)
    results = collect(loop)
    assert [len(r.rollouts) for r in results] == [8, 8]
    assert "t2" not in {r.task_id for result in results for r in result.rollouts}
    assert [e["again"] for e in events.of("failed")] == [True, True, False]
    assert [(e["task"], e["why"]) for e in events.of("quarantined")] == [
        ("t2", "environment: the container runtime does not answer")
    ]
    assert results[-1].metrics["queue/quarantined"] == 1


def test_an_environment_that_hangs_ends_at_its_limit_and_the_others_go_on(
    small_checkpoint: Path, tmp_path: Path
) -> None:
    def tasks(first: int, n: int) -> list[Task]:
        held = HeldTask("t3", flag=str(tmp_path / "flag"))
        return [held if i == 3 else TypedTask(f"t{i}") for i in range(first, first + n)]

    events = Events()
    loop, _, _ = local_loop(small_checkpoint, tasks, emit=events.emit, rollout_timeout=2.0, steps=3, max_staleness=1)
    results = collect(loop)
    failures = events.of("failed")  # on a busy machine others may be too slow as well
    assert failures
    assert all(failure["again"] and "longer than 2 s" in failure["why"] for failure in failures)
    assert "t3" in {r.task_id for result in results for r in result.rollouts}, "the second attempt does not hang"


def test_when_every_task_fails_the_run_ends_and_names_the_failure(small_checkpoint: Path) -> None:
    loop, _, _ = local_loop(
        small_checkpoint,
        lambda first, n: [BrokenTask(f"t{i}") for i in range(first, first + n)],
        steps=9,
        max_staleness=1,
        max_empty_batches=2,
    )
    with pytest.raises(
        NoUsableRollouts, match=r"tasks in a row failed 3 times each.*container runtime does not answer"
    ):
        collect(loop)


def test_a_stream_without_enough_good_tasks_ends_the_run(small_checkpoint: Path) -> None:
    loop, _, _ = local_loop(
        small_checkpoint, lambda first, n: [TypedTask(f"t{i}") for i in range(first, min(first + n, 12))],
        steps=2, max_staleness=1,
    )  # fmt: skip
    with pytest.raises(NoUsableRollouts, match="the tasks are used up"):
        collect(loop)


def test_what_a_rollout_raises_before_it_starts_ends_the_run(small_checkpoint: Path) -> None:
    instruction = "word " * 300
    loop, _, _ = local_loop(
        small_checkpoint,
        lambda first, n: [TypedTask(f"t{i}", instruction=instruction) for i in range(first, first + n)],
        max_staleness=1,
    )
    with pytest.raises(WindowTooSmall):
        collect(loop)


def test_a_loop_that_is_left_leaves_no_call_behind(small_checkpoint: Path) -> None:
    loop, _, _ = local_loop(small_checkpoint, slow(*range(99), seconds=5.0), steps=3, max_staleness=1)

    async def run() -> None:
        steps = loop.run()
        waiting = asyncio.ensure_future(anext(steps))
        await asyncio.sleep(0.3)
        assert loop._calls
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not loop._calls

    asyncio.run(run())


# Continuation -------------------------------------------------------------------------------------------------------


def test_a_resumed_loop_trains_what_was_finished_and_starts_again_what_was_in_flight(small_checkpoint: Path) -> None:
    first_loop, _, first = local_loop(small_checkpoint, slow(3, 9, seconds=0.1), steps=5, max_staleness=2)

    async def two_steps() -> tuple[list[StepResult], Any]:
        results = []
        async for result in first_loop.run():
            results.append(result)
            if len(results) == 2:
                while not first_loop.queue.ready:
                    await asyncio.sleep(0.01)
                return results, first_loop.state()
        raise AssertionError("not reached")

    before, (state, queued) = asyncio.run(two_steps())
    assert queued
    events = Events()
    loop, worker, trainer = local_loop(
        small_checkpoint, slow(3, 9, seconds=0.1), emit=events.emit, steps=5, max_staleness=2
    )
    trainer.trainer.version = first.trainer.version
    loop.restore(state, queued)
    asyncio.run(worker.load_weights(first.trainer.weights(), first.trainer.version))
    after = collect(loop, 2)
    assert [r.step for r in after] == [2, 3, 4]
    every = trained(before) + trained(after)
    assert len(every) == len(set(every)) == 40
    assert not {r.id for r in queued} & {e["rollout"] for e in events.of("started")}


# Metrics ------------------------------------------------------------------------------------------------------------


def test_staleness_is_counted_per_token_and_shares_by_number_of_compactions() -> None:
    rng = np.random.default_rng(0)

    def rollout(name: str, version: int, n: int, reason: Any = "finished") -> Rollout:
        segment = random_segment(rng, 0, [n])
        segment.versions[segment.optimized] = version
        return Rollout(name, name, 0, AgentSettings(), (segment,), Outcome(1.0, reason))

    metrics = staleness_metrics([rollout("a", 5, 3), rollout("b", 1, 1, "deadline")], 5, 2)
    assert metrics == {
        "queue/masked_share": 0.25,
        "queue/staleness": 1.0,
        "queue/staleness_max": 4.0,
        "queue/masked_share/compactions_0": 0.25,
        "queue/deadline_share/compactions_0": 0.5,
    }
