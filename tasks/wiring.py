"""Names to things: the training task stream, engines' sizes, and which sources decide a stage's result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from compaction.protocols import Task
from compaction.settings import AgentSettings
from evaluation.tasksets.trail import TrailSettings, trail_tasks
from rl.requests import TaskSource
from rl.settings import SampledBy, VllmSettings

if TYPE_CHECKING:
    from rl.serving import Serving


ROLLOUT_SOURCES = (
    "compaction",
    "evaluation/tasksets/trail.py",
    "evaluation/environments/trail.py",
    "evaluation/environments/shell_words.py",
    "rl/engines",
    "rl/requests.py",
    "rl/serving.py",
    "rl/workers.py",
)
LEARNING_SOURCES = (
    "rl/advantages.py",
    "rl/async_ppo.py",
    "rl/batching.py",
    "rl/checkpoint.py",
    "rl/learner.py",
    "rl/logprobs.py",
    "rl/lora.py",
    "rl/losses.py",
    "rl/master_weights.py",
    "rl/models.py",
    "rl/optimization.py",
    "rl/packing.py",
    "rl/ppo.py",
    "rl/pretrained.py",
    "rl/queue.py",
    "rl/rows.py",
    "rl/settings.py",
    "rl/trainer.py",
    "rl/weight_transfer.py",
)
"""Sources whose change makes finished stages stale; documentation is not among them."""

SEED_STRIDE = 1_000_003
"""Keeps the task streams of neighbouring seeds apart"""


def training_tasks(world: TrailSettings, seed: int, n: int) -> TaskSource:
    """The first `n` tasks of the training split under `seed`, as the stream that PPO reads by (first, count)."""
    tasks: list[Task] = list(trail_tasks(world, "train", n, seed * SEED_STRIDE))
    return lambda first, count: tasks[first : first + count]


def longest_sequence(agent: AgentSettings) -> int:
    """Tokens that an engine's slot must hold for one rollout of `agent`: its window, whatever fills it."""
    return agent.compaction.window


def served(
    engine: SampledBy, checkpoint: Path, vllm: VllmSettings, slots: int, max_length: int, number: int = 0
) -> Serving:
    """How replica `number` serves a checkpoint."""
    from rl.serving import TorchServing, VllmServing

    if engine == "torch":
        return TorchServing(checkpoint, slots, max_length)
    server = vllm.servers[number % len(vllm.servers)] if vllm.servers else None
    return VllmServing(checkpoint, slots, max_length, vllm, server)


def engine_identity(engine: SampledBy, vllm: VllmSettings) -> dict[str, Any]:
    """What of the engine decides a result's last bits."""
    named: dict[str, Any] = {"name": engine}
    if engine == "torch":
        return named
    own = {"servers"} if vllm.servers else {"dtype", "tensor_parallel", "eager"}
    return named | vllm.model_dump(mode="json", include=own)
