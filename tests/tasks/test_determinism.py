"""The synchronous mode gives the same bits: twice under one seed, and killed −9 three times on the way."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compaction.pairing import PAIRING, read_pairing
from compaction.storage import read_rollouts
from tasks.caching import StageOutcome, StageStore
from tasks.cluster import Cluster
from tests.tasks.small_stages import CRITIC_STEPS, PPO_STEPS, Recording, critic_stage, killed, ppo_stage

pytestmark = pytest.mark.xdist_group("ray")


@dataclass(frozen=True)
class Runs:
    """Where runs are made, and an uninterrupted one."""

    checkpoint: Path
    store: StageStore
    cluster: Cluster
    critic: tuple[StageOutcome, Recording]
    ppo: tuple[StageOutcome, Recording]


@pytest.fixture(scope="module")
def runs(small_checkpoint: Path, ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    store = StageStore(tmp_path_factory.mktemp("stages"))

    async def run() -> Runs:
        critic = await critic_stage(small_checkpoint, store, "first", ray_cluster)
        ppo = await ppo_stage(small_checkpoint, store, "first", "first", ray_cluster)
        return Runs(small_checkpoint, store, ray_cluster, critic, ppo)

    return asyncio.run(run())


def tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in nested containers, by path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {path: t for key, inner in items for path, t in tensors(inner, f"{name}/{key}").items()}


def trainer_tensors(stage: Path) -> dict[str, torch.Tensor]:
    """Policy, critic and both optimisers."""
    saved = torch.load(stage / "trainer" / "trainer.pt", weights_only=True)
    return tensors(saved) | load_file(stage / "trainer" / "policy" / "model.safetensors")


def assert_same_bits(one: StageOutcome, other: StageOutcome) -> None:
    a, b = trainer_tensors(one.folder), trainer_tensors(other.folder)
    assert a.keys() == b.keys()
    assert {name for name in a if not torch.equal(a[name], b[name])} == set()
    assert one.result == other.result, "the curves"
    for name in ("rollouts-first.parquet", "rollouts-last.parquet"):
        assert read_rollouts(one.folder / name) == read_rollouts(other.folder / name)


def test_the_stages_learn_and_leave_no_checkpoints(runs: Runs) -> None:
    for outcome, recording, steps in ((*runs.critic, CRITIC_STEPS), (*runs.ppo, PPO_STEPS)):
        assert sorted(recording.steps) == list(range(steps))
        assert {len(curve) for curve in outcome.result["curves"].values()} == {steps}
        assert not (outcome.folder / "checkpoints").exists()
    start = load_file(runs.checkpoint / "model.safetensors")
    critic_policy = load_file(runs.critic[0].folder / "trainer" / "policy" / "model.safetensors")
    trained = load_file(runs.ppo[0].folder / "checkpoint" / "model.safetensors")
    assert all(torch.equal(start[name], w) for name, w in critic_policy.items()), "pretraining leaves the policy"
    assert any(not torch.equal(start[name], w) for name, w in trained.items())
    assert runs.ppo[1].steps[0]["critic/loss"] < runs.critic[1].steps[0]["critic/loss"], "PPO has the critic"


def test_the_trained_policy_bears_its_pairing_which_is_part_of_the_stage(runs: Runs) -> None:
    ppo = runs.ppo[0]
    pairing = read_pairing(ppo.folder / "checkpoint")
    assert pairing is not None
    assert (pairing.window, pairing.cap, pairing.prompt_pack.name) == (128, 2, "lenient")
    assert [(t.stage, t.steps) for t in pairing.training] == [("critic", CRITIC_STEPS), ("ppo", PPO_STEPS)]
    assert f"checkpoint/{PAIRING}" in ppo.manifest.files


def test_one_seed_twice_gives_the_same_bits(runs: Runs) -> None:
    async def run() -> tuple[tuple[StageOutcome, Recording], tuple[StageOutcome, Recording]]:
        critic = await critic_stage(runs.checkpoint, runs.store, "second", runs.cluster)
        return critic, await ppo_stage(runs.checkpoint, runs.store, "second", "second", runs.cluster)

    for (one, metrics), (other, other_metrics) in zip((runs.critic, runs.ppo), asyncio.run(run()), strict=True):
        assert not other.cached
        assert_same_bits(one, other)
        assert metrics.repeatable() == other_metrics.repeatable()


def test_a_run_killed_in_rollout_update_and_checkpoint_write_and_resumed_gives_the_same_bits(runs: Runs) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"kill seed {seed}")
    drawn = random.Random(seed)
    kills = [
        ("rollouts", drawn.randrange(0, 3), drawn.uniform(0, 0.1)),
        ("update_policy", drawn.randrange(2, 4), drawn.uniform(0, 0.02)),
        ("checkpoint", 4, drawn.uniform(0, 0.01)),
    ]
    for call, step, delay in kills:
        killed(runs.store.root, runs.checkpoint, "killed", 0, call, step, delay)
    outcome, recording = asyncio.run(ppo_stage(runs.checkpoint, runs.store, "killed", "first", runs.cluster))
    assert not outcome.cached
    assert min(recording.steps) in (2, 4), f"seed {seed}: it went on from a checkpoint"
    assert_same_bits(runs.ppo[0], outcome)
    expected = runs.ppo[1].repeatable()
    assert recording.repeatable() == {step: expected[step] for step in recording.steps}
