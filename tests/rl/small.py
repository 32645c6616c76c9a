"""A loop small enough for a test: a random policy that compacts, tasks with both rewards, actors in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from compaction.protocols import Environment, EnvironmentFailure, Execution, Task, TaskLimits
from compaction.rollout import Rollout
from compaction.settings import AgentSettings, CompactionSettings
from evaluation.tasksets.trail import TrailSettings
from evaluation.tasksets.trail_expert import world_text
from rl.async_ppo import AsyncPPO
from rl.events import no_events
from rl.learner import Learner, StepResult
from rl.models import load_policy, save_policy
from rl.ppo import PPO
from rl.requests import RequestStream, RolloutRequest
from rl.serving import Serving, TorchServing
from rl.settings import PPOSettings, TinySettings, TrainerSettings
from rl.tiny import make_tiny_checkpoint
from rl.trainer import Trainer
from rl.workers import RolloutActor

WORLD = TrailSettings(min_length=3, max_length=5, pointer_names=8, parts=6, max_facts=3, max_turns=8)
PACK = """\
name: lenient
system: trail
summary_instruction: summarize
resume: "{summary}"
summary_pattern: '(?P<body>\\S[^\\n]*)'
"""
"""Takes any text as a summary: a random policy's rollouts are then compacted too"""
END_BIAS = 8.0
"""How much longer the end token's embedding is made: a random policy else never ends a reply by itself"""


def make_checkpoint(folder: Path) -> Path:
    """A policy of two layers with random weights; beside it `pack.yaml`, its prompt pack."""
    sizes = TinySettings(layers=2, width=32, heads=1, feed_forward=48, vocabulary=400, init_std=0.2, max_positions=256)
    start = make_tiny_checkpoint(folder / "start", world_text(WORLD, seed=0, n=50), sizes)
    policy = load_policy(start)
    policy.get_input_embeddings().weight.data[policy.config.eos_token_id] *= END_BIAS
    save_policy(policy, folder / "policy", start)
    (folder / "policy" / "pack.yaml").write_text(PACK)
    return folder / "policy"


def agent_settings(checkpoint: Path, **compaction: Any) -> AgentSettings:
    values = {
        "window": 128, "threshold": 44, "max_response": 16, "min_response": 3, "summary_cap": 20, "cap": 2,
        "keep_recent": 1, "prompt_pack": str(checkpoint / "pack.yaml"), "summary_retries": 0,
    }  # fmt: skip
    return AgentSettings(
        scaffold="shell-line", compaction=CompactionSettings(**(values | compaction)), max_turns=8, mode="training"
    )


@dataclass
class Typed:
    """Answers with what was typed, shortened; the reward is the parity of all of it: both rewards occur."""

    typed: list[str] = field(default_factory=list)

    async def start(self) -> None: ...

    async def execute(self, command: str) -> Execution:
        self.typed.append(command)
        return Execution(f" {command[:20]}")

    async def upload(self, path: str, content: bytes) -> None: ...

    async def grade(self) -> float:
        return float(zlib.crc32("\n".join(self.typed).encode()) % 2)

    async def stop(self) -> None: ...


@dataclass(frozen=True)
class TypedTask:
    """A task of the environment above."""

    id: str
    instruction: str = "start L1 out log"
    limits: TaskLimits = field(default_factory=TaskLimits)

    def open(self) -> Environment:
        return Typed()


@dataclass(frozen=True)
class BrokenTask(TypedTask):
    """Its environment never starts."""

    def open(self) -> Environment:
        return Broken()


class Broken(Typed):
    async def start(self) -> None:
        raise EnvironmentFailure("the container runtime does not answer")


@dataclass(frozen=True)
class LethalTask(TypedTask):
    """Ends the process that runs it, as running out of memory does."""

    def open(self) -> Environment:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")


@dataclass(frozen=True)
class HeldTask(TypedTask):
    """The first attempt reports itself in `flag` and waits for ever; later ones are ordinary."""

    flag: str = ""

    def open(self) -> Environment:
        return Held(flag=Path(self.flag))


@dataclass
class Held(Typed):
    flag: Path = Path()

    async def start(self) -> None:
        if not self.flag.exists():
            self.flag.touch()
            await asyncio.sleep(3_600)


@dataclass(frozen=True)
class SlowTask(TypedTask):
    """Its environment takes `seconds` for each command."""

    seconds: float = 0.0

    def open(self) -> Environment:
        return Slow(seconds=self.seconds)


@dataclass
class Slow(Typed):
    seconds: float = 0.0

    async def execute(self, command: str) -> Execution:
        await asyncio.sleep(self.seconds)
        return await super().execute(command)


@dataclass(frozen=True)
class WaitingTask(TypedTask):
    """Its environment's first command ends once `until` says so."""

    until: Callable[[], bool] = bool

    def open(self) -> Environment:
        return Waiting(until=self.until)


@dataclass
class Waiting(Typed):
    until: Callable[[], bool] = bool

    async def execute(self, command: str) -> Execution:
        while not self.typed and not self.until():
            await asyncio.sleep(0.01)
        return await super().execute(command)


def typed_tasks(first: int, n: int) -> list[Task]:
    return [TypedTask(f"typed-{i}") for i in range(first, first + n)]


def request(task: Task, agent: AgentSettings, seed: int = 0) -> RolloutRequest:
    return RolloutRequest(f"r-{task.id}", task, seed, agent)


class LocalWorker:
    """The rollout actor in this process, with a handle's methods."""

    def __init__(self, serving: Serving, slots: int = 4, rollout_timeout: float = 60.0) -> None:
        self._actor = RolloutActor(serving, slots, rollout_timeout)
        self.slots = slots
        self.loaded: list[int] = []
        self.requests: list[RolloutRequest] = []

    async def rollouts(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        self.requests += requests
        return await self._actor.rollouts(requests)

    async def rollout(self, request: RolloutRequest) -> Rollout:
        return (await self.rollouts([request]))[0]

    def limit(self, request: RolloutRequest) -> float:
        return 60.0

    async def load_weights(self, weights: Any, version: int) -> None:
        self.loaded.append(version)
        await self._actor.load_weights(weights, version)


async def killed_in_mid_call(worker: Any, requests: list[RolloutRequest], flag: Path) -> list[Any]:
    """The rollouts of a call whose process is killed once `flag` says that it is at work."""
    pid = await worker.pid()
    call = asyncio.create_task(worker.rollouts(requests))
    while not flag.exists():
        assert not call.done(), call.result()
        await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    rollouts = await call
    assert await worker.pid() != pid
    return rollouts


class LocalTrainer:
    """The trainer in this process, with a handle's methods; `calls` holds every call and what it was given."""

    def __init__(self, checkpoint: Path, **settings: Any) -> None:
        self.trainer = Trainer(checkpoint, TrainerSettings(**({"policy_lr": 3e-3, "critic_lr": 1e-2} | settings)))
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    transfers = False

    async def values(self, rows: Any) -> list[np.ndarray]:
        return self._called("values", rows)

    async def update_critic(self, rows: Any, targets: Any) -> dict[str, float]:
        return self._called("update_critic", rows, targets)

    async def update_policy(self, rows: Any, advantages: Any, included: Any) -> dict[str, float]:
        return self._called("update_policy", rows, advantages, included)

    async def version(self) -> int:
        return self.trainer.version

    async def weights(self) -> tuple[Any, int]:
        return self._called("weights"), self.trainer.version

    def _called(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, arguments))
        return getattr(self.trainer, method)(*arguments)

    def given(self, method: str) -> list[tuple[Any, ...]]:
        return [arguments for name, arguments in self.calls if name == method]


def serving(checkpoint: Path, slots: int = 4) -> TorchServing:
    return TorchServing(checkpoint, slots, 128)


def request_stream(checkpoint: Path, settings: PPOSettings, tasks: Any = typed_tasks, seed: int = 0) -> RequestStream:
    return RequestStream(tasks, agent_settings(checkpoint), seed, "ppo", settings.batch_size, settings.group_size)


def local_loop(
    checkpoint: Path,
    tasks: Any = typed_tasks,
    *,
    trainer: dict[str, Any] | None = None,
    seed: int = 0,
    rollout_timeout: float = 60.0,
    emit: Any = no_events,
    served: Serving | None = None,
    **ppo: Any,
) -> tuple[Any, LocalWorker, LocalTrainer]:
    """The loop that the settings ask for, and its two parts."""
    worker = LocalWorker(served or serving(checkpoint), rollout_timeout=rollout_timeout)
    local = LocalTrainer(checkpoint, **(trainer or {}))
    settings = PPOSettings(**({"steps": 3, "batch_size": 8} | ppo))
    stream = request_stream(checkpoint, settings, tasks, seed)
    kind = AsyncPPO if settings.max_staleness else PPO
    loop = kind(settings, stream, [worker], Learner(settings, local), emit)  # type: ignore[arg-type, list-item]
    return loop, worker, local


def collect(loop: Any, first: int = 0, **options: Any) -> list[StepResult]:
    """All steps of a loop."""

    async def run() -> list[StepResult]:
        return [result async for result in loop.run(first, **options)]

    return asyncio.run(run())
