"""Admission, whole units, second attempts, quarantine, suspects: the queue without any concurrency around it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction.rollout import Outcome, Rollout
from compaction.settings import AgentSettings
from rl.queue import RolloutQueue
from rl.requests import RequestStream, RolloutRequest
from tests.rl.small import TypedTask

AGENT = AgentSettings()


def stream(batch_size: int = 4, group_size: int = 1, n: int = 10_000) -> RequestStream:
    def tasks(first: int, count: int) -> list[Any]:
        return [TypedTask(f"t{i}") for i in range(first, min(first + count, n))]

    return RequestStream(tasks, AGENT, 0, "ppo", batch_size, group_size)


def queue(
    source: RequestStream | None = None, *, steps: int = 3, max_staleness: int = 1, max_attempts: int = 3
) -> RolloutQueue:
    return RolloutQueue(source or stream(), steps=steps, max_staleness=max_staleness, max_attempts=max_attempts)


def done(request: RolloutRequest) -> Rollout:
    return Rollout(request.id, request.task.id, request.seed, AGENT, (), Outcome(1.0, "finished"))


def drain(q: RolloutQueue, *, beside_suspect: bool = False) -> list[RolloutRequest]:
    started = []
    while (request := q.next(beside_suspect=beside_suspect)) is not None:
        started.append(request)
    return started


def ids(rollouts: Any) -> list[str]:
    return [r.id for r in rollouts]


# Admission ----------------------------------------------------------------------------------------------------------


def test_no_more_starts_than_the_bound_on_staleness_admits_and_an_update_admits_a_batch_more() -> None:
    q = queue(steps=9, max_staleness=2)
    first = drain(q)
    assert len(first) == 12  # (2 + 1) batches of 4
    for request in first[:4]:
        q.finished(done(request))
    assert drain(q) == []
    assert q.take() is not None
    assert drain(q) == [], "a batch that is being trained is not an update yet"
    q.advance()
    assert len(drain(q)) == 4


def test_no_more_starts_than_will_be_trained() -> None:
    assert len(drain(queue(steps=3, max_staleness=50))) == 12


def test_without_staleness_only_the_step_at_hand_starts() -> None:
    assert len(drain(queue(max_staleness=0))) == 4


# Batches ------------------------------------------------------------------------------------------------------------


def test_a_batch_takes_what_is_complete_first_and_a_late_rollout_is_trained_later() -> None:
    q = queue(steps=2)
    late, *others = drain(q)
    for request in others:
        q.finished(done(request))
    assert ids(q.take() or []) == ids(others[:4])
    assert q.take() is None
    q.advance()
    q.finished(done(late))
    assert ids(q.take() or []) == [*ids(others[4:]), late.id]


def test_a_group_is_taken_whole() -> None:
    q = queue(stream(batch_size=4, group_size=2), steps=2)
    requests = drain(q)
    assert [r.task.id for r in requests[:4]] == ["t0", "t0", "t1", "t1"]
    for request in requests[::2]:
        q.finished(done(request))
    assert q.take() is None
    q.finished(done(requests[1]))
    assert q.take() is None
    q.finished(done(requests[3]))
    assert sorted(ids(q.take() or [])) == sorted(ids(requests[:4]))


# Failures -----------------------------------------------------------------------------------------------------------


def test_a_failed_rollout_is_made_again_under_the_same_id_and_seed() -> None:
    q = queue()
    request = q.next(beside_suspect=False)
    assert request is not None
    assert q.attempt(request.id) == 1
    assert q.failed(request.id, "engine: gone")
    assert q.next(beside_suspect=False) == request
    assert q.attempt(request.id) == 2


def test_after_the_last_attempt_its_task_is_quarantined_and_another_takes_its_place() -> None:
    q = queue(steps=1, max_staleness=0, max_attempts=2)
    poison, *others = drain(q)
    assert q.failed(poison.id, "engine: gone")
    assert q.next(beside_suspect=False) == poison
    assert not q.failed(poison.id, "engine: still gone")
    assert q.quarantined == {"t0": "engine: still gone"}
    (replacement,) = drain(q)
    assert replacement.task.id == "t4"
    for request in (*others, replacement):
        q.finished(done(request))
    assert ids(q.take() or []) == ids((*others, replacement))


def test_a_quarantined_task_is_not_started_when_it_comes_again() -> None:
    def tasks(first: int, count: int) -> list[Any]:
        return [TypedTask(f"t{i % 3}") for i in range(first, first + count)]

    q = queue(RequestStream(tasks, AGENT, 0, "ppo", 2, 1), steps=3, max_staleness=0, max_attempts=1)
    poison, _ = drain(q)
    q.failed(poison.id, "x")
    started = drain(q)
    assert [r.task.id for r in started] == ["t2"]
    for request in (_, *started):
        q.finished(done(request))
    q.take()
    q.advance()
    assert [r.task.id for r in drain(q)] == ["t1", "t2"]


def test_a_group_that_lost_a_member_is_trained_with_the_others() -> None:
    q = queue(stream(batch_size=4, group_size=4), steps=1, max_attempts=1)
    bad, *good = drain(q)
    for request in good:
        q.finished(done(request))
    assert q.take() is None
    assert not q.failed(bad.id, "x")
    assert ids(q.take() or []) == ids(good)


def test_a_stream_that_ends_too_early_is_noticed() -> None:
    q = queue(stream(n=5), steps=2, max_attempts=1)
    requests = drain(q)
    assert len(requests) == 5
    for request in requests[:4]:
        q.finished(done(request))
    assert not q.exhausted
    q.take()
    q.advance()
    assert q.exhausted


# A worker's death ---------------------------------------------------------------------------------------------------


def test_the_first_death_counts_against_nobody_and_makes_suspects_that_run_one_to_a_worker() -> None:
    q = queue(max_attempts=1, steps=9)
    flight = [q.next(beside_suspect=False) for _ in range(3)]
    assert all(q.worker_died(r.id, "died") for r in flight if r)
    first = q.next(beside_suspect=False)
    assert first == flight[0]
    beside = q.next(beside_suspect=True)
    assert beside is not None
    assert not q.is_suspect(beside.id)
    assert not q.worker_died(first.id, "died again")  # type: ignore[union-attr]
    assert list(q.quarantined) == ["t0"]


def test_a_suspect_that_finishes_is_clear() -> None:
    q = queue()
    request = q.next(beside_suspect=False)
    assert request is not None
    q.worker_died(request.id, "died")
    assert q.next(beside_suspect=False) == request
    q.finished(done(request))
    assert not q.is_suspect(request.id)


# Everything at once -------------------------------------------------------------------------------------------------

CHOICES = st.sampled_from(["finish", "finish", "finish", "fail", "die", "start", "start", "resume"])


@given(
    choices=st.lists(st.tuples(CHOICES, st.integers(0, 10**6)), max_size=120),
    group_size=st.sampled_from([1, 2]),
    max_staleness=st.integers(0, 3),
)
def test_whatever_happens_each_rollout_is_trained_once_and_none_is_lost(
    choices: list[tuple[str, int]], group_size: int, max_staleness: int
) -> None:
    source, steps = stream(4, group_size), 5
    q = queue(source, steps=steps, max_staleness=max_staleness)
    flight: dict[str, RolloutRequest] = {}
    trained: list[str] = []
    started: set[str] = set()

    def act(choice: str, number: int) -> None:
        nonlocal q
        if choice == "start" or not flight:
            suspect = any(map(q.is_suspect, flight))
            if request := q.next(beside_suspect=suspect):
                assert request.id not in flight
                flight[request.id] = request
                started.add(request.id)
        elif choice == "resume":
            state, rollouts = q.state()
            q = queue(source, steps=steps, max_staleness=max_staleness)
            q.restore(json.loads(json.dumps(state)), rollouts)
            flight.clear()
        else:
            request = flight.pop(sorted(flight)[number % len(flight)])
            if choice == "finish":
                q.finished(done(request))
            elif choice == "fail":
                q.failed(request.id, "x")
            else:
                q.worker_died(request.id, "x")
        if (batch := q.take()) is not None:
            trained.extend(ids(batch))
            q.advance()
        assert len(started) - len(trained) <= (max_staleness + 1) * 4 + group_size * len(q.quarantined)

    for choice, number in choices:
        act(choice, number)
    for number in range(10_000):  # from here on nothing fails
        if q.step == steps:
            break
        act(("start", "finish")[number % 2], 0)
    assert q.step == steps
    assert len(trained) == len(set(trained))
    lost = {r for r in started if r not in trained}
    assert len(lost) <= group_size * len(q.quarantined), "only quarantined tasks' rollouts are not trained"


def test_the_state_is_json_and_holds_what_is_finished_but_not_trained() -> None:
    q = queue()
    requests = drain(q)
    q.finished(done(requests[2]))
    state, rollouts = q.state()
    again = queue()
    again.restore(json.loads(json.dumps(state)), rollouts)
    assert ids(rollouts) == [requests[2].id]
    assert sorted(ids(drain(again))) == sorted(ids(r for r in requests if r.id != requests[2].id))
    assert again.state()[1] == rollouts
    with pytest.raises(KeyError):
        again.restore({}, [])
