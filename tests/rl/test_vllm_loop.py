"""Whole rollouts and whole training steps with vLLM: in a rollout process, and between a real trainer's updates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compaction.protocols import EngineError
from rl.rows import rows_of
from rl.serving import VllmServing
from rl.settings import TrainerSettings, VllmSettings
from rl.trainer import Trainer
from rl.workers import RolloutWorker
from tests.rl.small import HeldTask, agent_settings, collect, killed_in_mid_call, local_loop, request, typed_tasks

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.xdist_group("vllm")]

TOLERANCE = 1e-4


def vllm(checkpoint: Path, slots: int = 4) -> VllmServing:
    return VllmServing(checkpoint, slots, 128, VllmSettings())


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_at_lag_0_the_engines_logprobs_are_the_trainers_after_every_update(
    small_checkpoint: Path, max_staleness: int
) -> None:
    """A stale head, or weights that were not taken, would show here from the second step on."""
    loop, worker, _ = local_loop(
        small_checkpoint, served=vllm(small_checkpoint), steps=3, batch_size=8, max_staleness=max_staleness
    )
    results = collect(loop)
    assert worker.loaded == [1, 2, 3]
    assert sum(r.n_compactions for result in results for r in result.rollouts), "none of them was compacted"
    for step, result in enumerate(results):
        assert result.metrics["train/loss"] != 0.0
        if max_staleness == 0:
            assert result.metrics["train/logprob_mismatch"] < TOLERANCE
            assert {int(v) for r in result.rollouts for s in r.segments for v in s.versions[s.optimized]} == {step}
    if max_staleness:
        ages = {int(v) for result in results for r in result.rollouts for s in r.segments for v in s.versions}
        assert len(ages - {-1}) > 1


def test_adapters_reach_vllm_merged(small_checkpoint: Path) -> None:
    loop, worker, _ = local_loop(
        small_checkpoint, served=vllm(small_checkpoint), steps=2, batch_size=4, trainer={"lora": {"rank": 4}}
    )
    results = collect(loop)
    assert worker.loaded == [1, 2]
    assert [result.metrics["train/logprob_mismatch"] < TOLERANCE for result in results] == [True, True]


@pytest.mark.usefixtures("ray_cluster")
def test_a_replica_killed_in_mid_rollout_is_replaced_with_its_weights(small_checkpoint: Path, tmp_path: Path) -> None:
    flag = tmp_path / "at-work"
    agent = agent_settings(small_checkpoint)
    requests = [request(t, agent, seed=i) for i, t in enumerate([*typed_tasks(0, 3), HeldTask("held", flag=str(flag))])]
    trainer = Trainer(small_checkpoint, TrainerSettings(temperature=agent.temperature), device="cpu")
    weights = {name: tensor * 0.9 for name, tensor in trainer.weights().items()}
    trainer.policy.load_state_dict(weights)
    worker = RolloutWorker(vllm(small_checkpoint), slots=4)

    async def run() -> tuple[list[Any], list[Any]]:
        await worker.load_weights(weights, 7)
        return await killed_in_mid_call(worker, requests, flag), await worker.rollouts(requests)

    try:
        got, again = asyncio.run(run())
        assert [r.id for r in got] == [r.id for r in requests]
        assert got == again, "the seeds are in the requests"
        assert {int(v) for r in got for s in r.segments for v in s.versions[s.optimized]} == {7}
        rows = [row for rollout in got for row in rows_of(rollout)]
        for row, logprobs in zip(rows, trainer.logprobs(rows), strict=True):
            assert np.abs(row.logprobs[row.optimized] - logprobs).max(initial=0) < TOLERANCE
        bad = weights | {"model.norm.weight": weights["model.norm.weight"][:3]}
        with pytest.raises(EngineError, match="expected"):
            asyncio.run(worker.load_weights(bad, 8))
        assert asyncio.run(worker.rollouts(requests)) == again, "the old weights keep serving"
    finally:
        worker.stop()
