"""Stages `critic` and `ppo`: both run the PPO loop, the first without touching the policy.

Progress is checkpointed in the stage's folder: a killed stage goes on from there, with the numbers it would have had.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from compaction.pairing import Pairing, pairing_of, read_pairing, write_pairing
from compaction.settings import AgentSettings, Settings
from compaction.storage import write_rollouts
from compaction.summaries import load_prompt_pack
from evaluation.settings import DatasetSettings
from evaluation.tasksets.trail import TrailSettings
from rl.settings import PPOSettings, TrainerSettings, VllmSettings
from tasks.caching import StageOutcome, StageSpec
from tasks.cluster import Cluster
from tasks.provenance import trained_stage
from tasks.real_tasks import SANDBOX_SOURCES, dataset_identity, dataset_tasks, open_dataset
from tasks.stages import Body, StageRun
from tasks.wiring import (
    LEARNING_SOURCES,
    ROLLOUT_SOURCES,
    SampledBy,
    engine_identity,
    longest_sequence,
    served,
    training_tasks,
)

if TYPE_CHECKING:
    from rl.workers import Transfer

CHECKPOINTS = "checkpoints"
EVENTS = "events.jsonl"
KEPT_ROLLOUTS = 16
"""Rollouts of the first and of the last step that stay to be read"""
CURVES = (
    "train/reward",
    "train/entropy",
    "train/kl_to_sampler",
    "train/clip_fraction",
    "train/summary_token_share",
    "train/logprob_mismatch",
    "critic/explained_variance",
    "critic/loss",
    "rollout/summary_tokens",
    "rollout/summary_rejected",
    "rollout/compactions",
    "rollout/turns",
)
"""Metrics kept with the stage, for the report; MLflow has all of them"""


class LoopSettings(Settings):
    """How rollouts are served and how often a stage is checkpointed."""

    workers: int = Field(1, ge=1, description="rollout processes, each with an engine")
    slots: int = Field(64, ge=1, description="rollouts at once in one engine")
    rollout_timeout: float = Field(
        3_600.0,
        gt=0,
        description="seconds of a rollout beyond its task's own deadline; then it counts as an infrastructure failure",
    )
    checkpoint_every: int = Field(10, ge=1, description="steps between checkpoints")
    trainer_gpus: float = Field(0.5, gt=0, description="GPUs that the trainer claims from Ray, where there are any")
    vllm: VllmSettings = VllmSettings()

    @field_validator("trainer_gpus")
    @classmethod
    def _is_a_share_or_whole(cls, gpus: float) -> float:
        if gpus > 1 and gpus != int(gpus):
            raise ValueError("give a part of one GPU (0.5) or whole ones (1, 2)")
        return gpus


@dataclass(frozen=True)
class Training:
    """All that decides a critic or PPO stage besides its parents."""

    ppo: PPOSettings
    trainer: TrainerSettings
    agent: AgentSettings
    world: TrailSettings
    dataset: DatasetSettings | None
    """Real tasks instead of the world"""
    loop: LoopSettings
    seed: int
    engine: SampledBy = "torch"

    def settings(self) -> dict[str, Any]:
        models = {"ppo": self.ppo, "trainer": self.trainer, "agent": self.agent, "world": self.world}
        return {name: model.model_dump(mode="json") for name, model in models.items()} | {
            "seed": self.seed,
            "prompts": load_prompt_pack(self.agent.compaction.prompt_pack).model_dump(),
            "dataset": self.dataset and dataset_identity(self.dataset),
            "loop": self.loop.model_dump(mode="json", exclude={"checkpoint_every", "trainer_gpus", "vllm"}),
            "engine": engine_identity(self.engine, self.loop.vllm),
        }


def critic_spec(training: Training, label: str, sft: StageSpec) -> StageSpec:
    """Critic pretraining on rollouts of the fixed base policy."""
    return _spec("critic", training, label, {"policy": sft.digest})


def ppo_spec(training: Training, label: str, sft: StageSpec, critic: StageSpec | None) -> StageSpec:
    """PPO from the base policy and, with the gae estimator, the pretrained critic."""
    parents = {"policy": sft.digest} | ({"critic": critic.digest} if critic else {})
    return _spec("ppo", training, label, parents)


def _spec(stage: str, training: Training, label: str, parents: dict[str, str]) -> StageSpec:
    sandboxes = () if training.dataset is None else SANDBOX_SOURCES
    packages = (*ROLLOUT_SOURCES, *LEARNING_SOURCES, *sandboxes, "tasks/ppo.py", "tasks/wiring.py")
    return StageSpec(stage, label, training.settings(), parents, packages)


def critic_body(training: Training, sft: StageOutcome, cluster: Cluster) -> Body:
    """Writes `trainer/`: the base policy with a critic that has seen `steps` batches of it."""

    async def run(stage: StageRun) -> dict[str, Any]:
        async with _loop(training, stage, sft.folder / "checkpoint", cluster, "critic") as loop:
            curves = await _steps(loop, training, stage, update_policy=False)
            await loop.learner.trainer.save(stage.folder / "trainer")
        shutil.rmtree(stage.folder / CHECKPOINTS, ignore_errors=True)
        return {"curves": curves}

    return run


def ppo_body(training: Training, sft: StageOutcome, critic: StageOutcome | None, cluster: Cluster) -> Body:
    """Writes `checkpoint/`, the trained policy, and the first and last rollouts."""

    async def run(stage: StageRun) -> dict[str, Any]:
        async with _loop(training, stage, sft.folder / "checkpoint", cluster, "ppo") as loop:
            if critic is not None:
                await loop.learner.trainer.load(critic.folder / "trainer")
            curves = await _steps(loop, training, stage, update_policy=True)
            await loop.learner.trainer.save_policy(stage.folder / "checkpoint")
        write_pairing(stage.folder / "checkpoint", _pairing(training, sft, critic))
        shutil.rmtree(stage.folder / CHECKPOINTS, ignore_errors=True)
        return {"checkpoint": "checkpoint", "curves": curves}

    return run


def _pairing(training: Training, sft: StageOutcome, critic: StageOutcome | None) -> Pairing:
    """The trained policy's pairing: that of its training, after the stages that its base policy has been through."""
    data = "the trail world" if training.dataset is None else open_dataset(training.dataset).name
    before = read_pairing(sft.folder / "checkpoint")
    trained = list(before.training) if before else []
    steps = {"ppo": training.ppo.steps}
    if critic is not None:
        steps = {"critic": critic.manifest.settings["ppo"]["steps"]} | steps
    how = {
        "ppo": training.ppo.model_dump(mode="json"),
        "trainer": training.trainer.model_dump(mode="json"),
        "engine": training.engine,
    }
    for stage, count in steps.items():
        words = f"{data}, {training.ppo.batch_size} rollouts a step"
        trained.append(trained_stage(stage, words, count, training.seed, how))
    return pairing_of(training.agent, sft.result.get("base_model"), trained)


@asynccontextmanager
async def _loop(
    training: Training, stage: StageRun, checkpoint: Path, cluster: Cluster, name: str
) -> AsyncIterator[Any]:
    """The PPO loop with workers and a trainer of its own. `name` keeps critic and PPO from sharing tasks."""
    cluster.ensure()
    from rl.async_ppo import AsyncPPO
    from rl.events import EventLog
    from rl.learner import Learner
    from rl.ppo import PPO
    from rl.remote import seated
    from rl.requests import RequestStream
    from rl.workers import RolloutWorker, TrainerHandle

    ppo, loop = training.ppo, training.loop
    tasks_seed = 2 * training.seed + (name == "ppo")
    if training.dataset is None:
        tasks = training_tasks(training.world, tasks_seed, (ppo.steps + 1) * ppo.batch_size)
    else:
        tasks = dataset_tasks(training.dataset, tasks_seed)
    stream = RequestStream(tasks, training.agent, training.seed, name, ppo.batch_size, ppo.group_size)
    longest, transfer = longest_sequence(training.agent), _transfer(training)
    replicas = [served(training.engine, checkpoint, loop.vllm, loop.slots, longest, n) for n in range(loop.workers)]
    async with seated([loop.trainer_gpus, *(replica.gpus for replica in replicas)]) as (own, *seats):
        with ExitStack() as ending:
            events = EventLog(stage.folder / EVENTS)
            ending.callback(events.close)
            workers = []
            for replica, seat in zip(replicas, seats, strict=True):
                worker = RolloutWorker(replica, slots=loop.slots, rollout_timeout=loop.rollout_timeout, seat=seat)
                ending.callback(worker.stop)
                workers.append(worker)
            trainer = TrainerHandle(checkpoint, training.trainer, own, transfer)
            ending.callback(trainer.stop)
            kind = AsyncPPO if ppo.max_staleness else PPO
            yield kind(ppo, stream, workers, Learner(ppo, trainer), events.emit)


def _transfer(training: Training) -> Transfer | None:
    """How weights go out where it is not through Ray's object store. Raises NotEnoughGpus where there is none."""
    from rl.errors import NotEnoughGpus
    from rl.remote import cluster_gpus
    from rl.workers import Transfer

    vllm = training.loop.vllm
    if training.engine != "vllm" or vllm.servers or vllm.transfer == "objects":
        return None
    if not cluster_gpus():
        raise NotEnoughGpus(
            f"loop.vllm.transfer={vllm.transfer} sends weights from GPU to GPU, and the cluster has none: set "
            "loop.vllm.transfer=objects"
        )
    return Transfer(vllm.transfer, vllm.tensor_parallel)


async def _steps(loop: Any, training: Training, stage: StageRun, *, update_policy: bool) -> dict[str, list[Any]]:
    """Runs the loop from its last checkpoint to the end; returns the curves of all steps."""
    root, trainer = stage.folder / CHECKPOINTS, loop.learner.trainer
    resumed = await trainer.resume(root)
    first, curves = (resumed.step, resumed.state["curves"]) if resumed else (0, {name: [] for name in CURVES})
    if resumed:
        loop.restore(resumed.state["loop"], resumed.rollouts)
        if update_policy:
            weights = await trainer.weights()
            await asyncio.gather(*(worker.load_weights(*weights) for worker in loop.workers))
    if resumed or (stage.folder / EVENTS).stat().st_size:
        loop.emit("resumed", step=first)
    async with aclosing(loop.run(first, update_policy=update_policy)) as results:
        async for result in results:
            done = result.step + 1
            for name in CURVES:
                curves[name].append(result.metrics.get(name))
            stage.log(done, result.metrics, _shown(result.metrics))
            if result.step == 0 or done == training.ppo.steps:
                name = "first" if result.step == 0 else "last"
                write_rollouts(stage.folder / f"rollouts-{name}.parquet", result.rollouts[:KEPT_ROLLOUTS])
            if done % training.loop.checkpoint_every == 0 and done < training.ppo.steps:
                state, queued = loop.state()
                await trainer.checkpoint(root, done, {"curves": curves, "loop": state}, queued)
                loop.emit("checkpoint", step=done, queued=[rollout.id for rollout in queued])
    return curves


def _shown(metrics: dict[str, float]) -> dict[str, float]:
    names = (
        "train/reward",
        "rollout/summary_tokens",
        "critic/explained_variance",
        "train/kl_to_sampler",
        "queue/staleness",
    )
    return {name: metrics[name] for name in names if name in metrics}
