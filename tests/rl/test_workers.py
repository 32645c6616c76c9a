"""Real actors: what they raise, and what happens when their process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compaction.protocols import EngineError
from compaction.window import WindowTooSmall
from rl import remote, workers
from rl.checkpoint import latest_checkpoint
from rl.errors import CheckpointError, CheckpointNotFound, TrainingDiverged, WorkerLost
from rl.models import load_policy
from rl.serving import TorchServing
from rl.settings import TrainerSettings
from rl.workers import Resumed, RolloutActor, RolloutWorker, TrainerHandle
from tests.rl.samples import random_rows
from tests.rl.small import (
    HeldTask,
    LethalTask,
    LocalWorker,
    agent_settings,
    killed_in_mid_call,
    request,
    serving,
    typed_tasks,
)

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]

SLOTS = 4


@pytest.fixture(scope="module")
def worker(small_checkpoint: Path, ray_cluster: Any) -> Iterator[RolloutWorker]:
    worker = RolloutWorker(serving(small_checkpoint, SLOTS), slots=SLOTS)
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def trainer(small_checkpoint: Path, ray_cluster: Any) -> Iterator[TrainerHandle]:
    trainer = TrainerHandle(small_checkpoint, TrainerSettings(policy_lr=1e-2, critic_lr=1e-2, max_skipped=1))
    yield trainer
    trainer.stop()


def new_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: tensor * 0.9 for name, tensor in load_policy(checkpoint).state_dict().items()}


def is_plain(error: BaseException) -> bool:
    """One line of its own, not Ray's class and remote traceback."""
    return type(error).__module__.startswith(("rl.", "compaction.")) and "Traceback" not in str(error)


def test_a_killed_worker_is_replaced_with_its_weights_and_makes_the_same_rollouts(
    worker: RolloutWorker, small_checkpoint: Path, tmp_path: Path
) -> None:
    flag = tmp_path / "at-work"
    agent = agent_settings(small_checkpoint)
    tasks = [*typed_tasks(0, 6), HeldTask("held", flag=str(flag))]
    requests = [request(task, agent, seed=i) for i, task in enumerate(tasks)]
    weights = new_weights(small_checkpoint)

    async def run() -> tuple[list[Any], list[Any]]:
        await worker.load_weights(weights, 7)
        lost = await killed_in_mid_call(worker, requests, flag)
        return lost, await worker.rollouts(requests)

    got, again = asyncio.run(run())
    local = LocalWorker(serving(small_checkpoint, SLOTS), SLOTS)
    asyncio.run(local.load_weights(weights, 7))
    expected = asyncio.run(local.rollouts(requests))
    assert got == expected
    assert again == expected
    assert {int(v) for r in got for s in r.segments for v in s.versions[s.optimized]} == {7}


def test_a_long_call_says_how_far_it_is(
    worker: RolloutWorker, small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WATCH_SECONDS", 0.05)
    flag = tmp_path / "at-work"
    held = HeldTask("held", flag=str(flag))
    agent = agent_settings(small_checkpoint)
    requests = [request(task, agent) for task in [held, *typed_tasks(0, 3)]]
    seen: list[int] = []

    async def run() -> None:
        call = asyncio.create_task(worker.rollouts(requests, seen.append))
        while 3 not in seen:  # all but the one that hangs
            await asyncio.sleep(0.05)
        call.cancel()

    asyncio.run(asyncio.wait_for(run(), 120))
    assert seen == sorted(seen)
    assert max(seen) == 3


def test_before_and_after_a_call_nothing_is_counted(small_checkpoint: Path) -> None:
    """Else a question that comes late would set the progress back to 0."""
    actor = RolloutActor(serving(small_checkpoint, SLOTS), SLOTS, 60.0)
    requests = [request(task, agent_settings(small_checkpoint)) for task in typed_tasks(0, 3)]

    async def run() -> list[int | None]:
        counted = [await actor.finished("call")]
        call = asyncio.create_task(actor.rollouts(requests, "call"))
        while not call.done():
            await asyncio.sleep(0)
            counted.append(await actor.finished("call"))
        return counted

    first, *during, last = asyncio.run(run())
    assert first is last is None
    said = [n for n in during if n is not None]
    assert said[0] == 0
    assert said == sorted(said)


def test_a_call_that_kills_every_worker_ends_as_worker_lost(
    worker: RolloutWorker, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_DEATHS", 2)
    lethal = [request(LethalTask("lethal"), agent_settings(small_checkpoint))]
    with pytest.raises(WorkerLost, match="died 2 times in a row, last by ActorDiedError; free memory"):
        asyncio.run(worker.rollouts(lethal))


def test_weights_that_are_not_finite_are_refused_and_the_old_ones_serve(
    worker: RolloutWorker, small_checkpoint: Path
) -> None:
    requests = [request(task, agent_settings(small_checkpoint)) for task in typed_tasks(0, 2)]
    weights = new_weights(small_checkpoint)
    asyncio.run(worker.load_weights(weights, 1))
    before = asyncio.run(worker.rollouts(requests))
    poisoned = weights | {"model.norm.weight": torch.full_like(weights["model.norm.weight"], float("nan"))}
    with pytest.raises(EngineError, match="non-finite values") as caught:
        asyncio.run(worker.load_weights(poisoned, 2))
    assert is_plain(caught.value)
    assert asyncio.run(worker.rollouts(requests)) == before


def test_a_window_that_can_never_fit_is_refused_with_the_arithmetic(
    worker: RolloutWorker, small_checkpoint: Path
) -> None:
    tiny = agent_settings(small_checkpoint, window=30, threshold=10)
    with pytest.raises(WindowTooSmall, match="window") as caught:
        asyncio.run(worker.rollouts([request(task, tiny) for task in typed_tasks(0, 2)]))
    assert is_plain(caught.value)


def test_a_missing_checkpoint_folder_is_named(tmp_path: Path) -> None:
    worker = RolloutWorker(TorchServing(tmp_path / "nowhere", 1, 8), slots=1)
    with pytest.raises(CheckpointNotFound, match="nowhere holds no model checkpoint") as caught:
        asyncio.run(worker.load_weights({}, 1))
    assert is_plain(caught.value)
    worker.stop()


def test_the_trainers_errors_arrive_as_themselves_and_its_death_as_worker_lost(
    trainer: TrainerHandle, tmp_path: Path
) -> None:
    rows = [row for row in random_rows() if row.token_ids.max() < 400]

    async def run() -> None:
        assert await trainer.resume(tmp_path) is None
        await trainer.checkpoint(tmp_path, 2, {"curves": {"a": [1.5, None]}}, [])
        assert await trainer.resume(tmp_path) == Resumed(2, {"curves": {"a": [1.5, None]}}, [])

        newest = latest_checkpoint(tmp_path)
        assert newest is not None
        (newest / "trainer.pt").write_bytes(b"damaged")
        with pytest.raises(CheckpointError, match=r"trainer.pt does not match .* Delete .*step-00000002") as damaged:
            await trainer.resume(tmp_path)
        assert is_plain(damaged.value)

        poisoned = [np.full(row.n_optimized, np.nan) for row in rows]
        with pytest.raises(TrainingDiverged, match="1 steps in a row") as diverged:
            await trainer.update_policy(rows, poisoned, None)
        assert is_plain(diverged.value)

        os.kill(await trainer.pid(), signal.SIGKILL)
        with pytest.raises(WorkerLost, match="the trainer process died"):
            await trainer.values(rows)
        with pytest.raises(WorkerLost, match="the trainer process died"):
            await trainer.weights()

    asyncio.run(run())
