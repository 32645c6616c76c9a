"""The asynchronous stage on real actors: killed in any of its processes, it goes on, and its events show what became of
every rollout."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from compaction.protocols import Task
from rl import workers
from rl.events import read_events
from tasks import ppo
from tasks.caching import StageOutcome, StageStore
from tasks.cluster import Cluster
from tests.rl.event_rules import check_events
from tests.rl.small import LethalTask, TypedTask
from tests.tasks.small_stages import PPO_STEPS, killed, ppo_stage

pytestmark = pytest.mark.xdist_group("ray")

STALENESS = 2
BATCH = 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> StageStore:
    return StageStore(tmp_path_factory.mktemp("stages"))


def events_of(outcome: StageOutcome) -> list[dict[str, Any]]:
    return read_events(outcome.folder / ppo.EVENTS)


def test_a_driver_killed_in_rollout_update_and_checkpoint_write_loses_no_rollout_and_trains_none_twice(
    small_checkpoint: Path, ray_cluster: Cluster, store: StageStore
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"kill seed {seed}")
    drawn = random.Random(seed)
    for call, step in (("rollout", 1), ("update_policy", 3), ("checkpoint", 4)):
        killed(store.root, small_checkpoint, "driver", STALENESS, call, step, drawn.uniform(0, 0.05))
    outcome, recording = asyncio.run(ppo_stage(small_checkpoint, store, "driver", "first", ray_cluster, STALENESS))
    happened = check_events(events_of(outcome), steps=PPO_STEPS, batch_size=BATCH)
    assert happened["resumed"] == 3
    assert max(recording.steps) == PPO_STEPS - 1
    assert not (outcome.folder / ppo.CHECKPOINTS).exists()


def test_a_worker_killed_in_mid_rollout_is_replaced_and_its_rollouts_are_made_again(
    small_checkpoint: Path, ray_cluster: Cluster, store: StageStore
) -> None:
    plain = workers.RolloutWorker.rollout
    killed_pids: list[int] = []
    first = iter([True])  # calls run side by side: one of them kills

    async def rollout(self: Any, request: Any) -> Any:
        if request.id.startswith("00002") and next(first, False):
            killed_pids.append(await self.pid())
            call = asyncio.ensure_future(plain(self, request))
            await asyncio.sleep(0.05)
            os.kill(killed_pids[0], signal.SIGKILL)
            return await call
        return await plain(self, request)

    with patch.object(workers.RolloutWorker, "rollout", rollout):
        outcome, _ = asyncio.run(ppo_stage(small_checkpoint, store, "worker", "first", ray_cluster, STALENESS))
    happened = check_events(events_of(outcome), steps=PPO_STEPS, batch_size=BATCH)
    assert happened["failed"] >= 1
    assert not psutil.pid_exists(killed_pids[0])


def test_a_task_that_kills_its_worker_is_found_among_the_innocent(
    small_checkpoint: Path, ray_cluster: Cluster, store: StageStore
) -> None:
    def tasks(world: Any, seed: int, n: int) -> Any:
        def stretch(first: int, count: int) -> list[Task]:
            made = range(first, min(first + count, n))
            return [LethalTask(f"lethal-{i}") if i == 9 else TypedTask(f"typed-{i}") for i in made]

        return stretch

    with patch.object(ppo, "training_tasks", tasks):
        outcome, _ = asyncio.run(ppo_stage(small_checkpoint, store, "lethal", "first", ray_cluster, STALENESS))
    events = events_of(outcome)
    check_events(events, steps=PPO_STEPS, batch_size=BATCH)
    assert [e["task"] for e in events if e["event"] == "quarantined"] == ["lethal-9"]
