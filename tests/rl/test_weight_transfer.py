"""Weights from the trainer to the replicas through vLLM's own transfer engines, on a backend that needs no GPU."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.rows import rows_of
from rl.settings import TrainerSettings, VllmSettings
from rl.workers import RolloutWorker, TrainerActor, Transfer
from tests.rl.small import agent_settings, request, typed_tasks

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

TOLERANCE = 1e-4


def test_sent_weights_serve_on_every_replica_and_a_replacement_is_joined(small_checkpoint: Path) -> None:
    from tests.rl.object_transfer import MessageServing, register

    register()
    agent = agent_settings(small_checkpoint)
    requests = [request(task, agent, seed=i) for i, task in enumerate(typed_tasks(0, 4))]
    settings = VllmSettings().model_copy(update={"transfer": "messages"})
    serving = MessageServing(small_checkpoint, 4, 128, settings)
    workers = [RolloutWorker(serving, slots=4) for _ in range(2)]
    trainer = TrainerActor(
        str(small_checkpoint), TrainerSettings(temperature=agent.temperature), Transfer("messages", ranks=1)
    )

    async def weights() -> tuple[Any, int]:
        return trainer.call("weights"), trainer.version()

    async def updated(version: int) -> list[Any]:
        policy = trainer._trainer
        for parameter in policy.policy.parameters():
            parameter.data *= 0.9
        policy.version = version
        assert await asyncio.to_thread(trainer.send_weights, [worker.actor for worker in workers]) == version
        for worker in workers:
            worker.sent(weights)
        return [r for made in await asyncio.gather(*(w.rollouts(requests) for w in workers)) for r in made]

    async def run() -> None:
        for version in (1, 2):
            check(await updated(version), version)
        os.kill(await workers[0].pid(), signal.SIGKILL)
        check(await workers[0].rollouts(requests), 2)
        check(await updated(3), 3)

    def check(rollouts: list[Any], version: int) -> None:
        assert {int(v) for r in rollouts for s in r.segments for v in s.versions[s.optimized]} == {version}
        rows = [row for rollout in rollouts for row in rows_of(rollout)]
        for row, logprobs in zip(rows, trainer.call("logprobs", rows), strict=True):
            assert np.abs(row.logprobs[row.optimized] - logprobs).max(initial=0) < TOLERANCE

    try:
        asyncio.run(run())
        assert trainer._sender._client is not None
    finally:
        for worker in workers:
            worker.stop()


def test_replicas_join_behind_each_other() -> None:
    from rl.weight_transfer import RolloutActors

    client = RolloutActors(["a", "b", "c"], ranks=2)
    seen: list[Any] = []
    client._all = lambda step, arguments=None: seen.append((step, arguments))  # type: ignore[method-assign]
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
    assert [info["rank_offset"] for info in seen[0][1]] == [1, 3, 5]


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_vllm_has_the_engines_that_the_settings_name(backend: str) -> None:
    """Of what is installed here: the names, and what the trainer's end is opened with."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    kind = WeightTransferTrainerFactory._registry[backend]().init_info_cls
    meeting = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2} if backend == "nccl" else {}
    assert kind(rank=0, **meeting).is_sender
    assert backend in WeightTransferEngineFactory._registry
