"""What names a critic or PPO stage, and what it refuses. The stages themselves run in test_determinism.py."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from compaction.settings import AgentSettings, CompactionSettings
from compaction.summaries import load_prompt_pack
from evaluation.tasksets.trail import TrailSettings
from rl.errors import NotEnoughGpus
from rl.settings import PPOSettings, TrainerSettings, VllmSettings
from tasks.caching import StageSpec, StageStore
from tasks.cluster import Cluster
from tasks.ppo import LoopSettings, Training, critic_body, critic_spec, ppo_spec
from tests.tasks.small_stages import base, made, training

TRAINING = Training(PPOSettings(), TrainerSettings(), AgentSettings(), TrailSettings(), None, LoopSettings(), seed=0)
SFT = StageSpec("sft", "seed 0", {"seed": 0})


def digests(training: Training, sft: StageSpec = SFT) -> tuple[str, str]:
    critic = critic_spec(training, "c", sft)
    return critic.digest, ppo_spec(training, "p", sft, critic).digest


@pytest.mark.parametrize(
    "changed",
    [
        replace(TRAINING, seed=1),
        replace(TRAINING, ppo=PPOSettings(steps=7)),
        replace(TRAINING, trainer=TrainerSettings(policy_lr=1e-4)),
        replace(TRAINING, agent=AgentSettings(max_turns=9)),
        replace(TRAINING, world=TrailSettings(max_turns=9)),
        replace(TRAINING, loop=LoopSettings(slots=3)),
    ],
)
def test_whatever_changes_the_numbers_makes_another_stage(changed: Training) -> None:
    assert not set(digests(changed)) & set(digests(TRAINING))


def test_other_texts_under_the_same_name_make_another_stage(tmp_path: Path) -> None:
    path = tmp_path / "pack.yaml"
    pack = load_prompt_pack("nine-items")
    agent = AgentSettings(compaction=CompactionSettings(prompt_pack=str(path)))
    found = []
    for system in ("one", "another"):
        path.write_text(pack.model_copy(update={"system": system}).model_dump_json())
        load_prompt_pack.cache_clear()
        found.append(set(digests(replace(TRAINING, agent=agent))))
    assert not found[0] & found[1]


def test_how_often_it_is_checkpointed_does_not() -> None:
    assert digests(replace(TRAINING, loop=LoopSettings(checkpoint_every=3))) == digests(TRAINING)


def test_stages_follow_from_their_parents() -> None:
    other = StageSpec("sft", "seed 0", {"seed": 1})
    assert not set(digests(TRAINING, other)) & set(digests(TRAINING))
    critic = critic_spec(TRAINING, "c", SFT)
    without = ppo_spec(TRAINING, "p", SFT, None)
    assert without.parents == {"policy": SFT.digest}
    assert ppo_spec(TRAINING, "p", SFT, critic).parents == {"policy": SFT.digest, "critic": critic.digest}


@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("transfer", ["ipc", "nccl"])
def test_weights_are_not_to_go_from_gpu_to_gpu_where_there_is_none(
    transfer: str, small_checkpoint: Path, ray_cluster: Cluster, tmp_path: Path
) -> None:
    loop = LoopSettings(vllm=VllmSettings(transfer=transfer))  # type: ignore[arg-type]
    plan = replace(training(small_checkpoint, 1), engine="vllm", loop=loop)

    async def run() -> None:
        store = StageStore(tmp_path)
        spec, sft = await base(small_checkpoint, store)
        await made(store, critic_spec(plan, "c", spec), critic_body(plan, sft, ray_cluster))

    with pytest.raises(NotEnoughGpus, match=f"transfer={transfer} .* set loop.vllm.transfer=objects"):
        asyncio.run(run())
