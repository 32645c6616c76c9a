"""A small critic and PPO stage, as the flow runs them; as a program, a run that is killed −9 in the midst of a call.

    python -m tests.tasks.small_stages CHECKPOINT STORE LABEL RAY_ADDRESS MAX_STALENESS CALL STEP DELAY

kills itself and its actors, as a power cut would, DELAY seconds into a CALL (rollouts, in the asynchronous loop
rollout, update_policy or checkpoint) of one STEP.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rl import workers
from rl.settings import PPOSettings, TrainerSettings
from tasks.caching import Produced, StageOutcome, StageSpec, StageStore
from tasks.cluster import Cluster
from tasks.ppo import LoopSettings, Training, critic_body, critic_spec, ppo_body, ppo_spec
from tasks.stages import Body, StageRun
from tests.rl.small import WORLD, agent_settings

ROOT = Path(__file__).parents[2]
CRITIC_STEPS, PPO_STEPS, CHECKPOINT_EVERY = 3, 6, 2


@dataclass
class Recording:
    """Where a stage's metrics go here: a list, later attempts over earlier ones."""

    run_id: str = "recording"

    def __post_init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps[step] = dict(metrics)

    def update(self, done: int, metrics: Mapping[str, float | None] | None = None) -> None: ...

    def repeatable(self) -> dict[int, dict[str, float]]:
        """Without what depends on the clock."""
        return {
            step: {k: v for k, v in m.items() if not k.startswith("time/") and k != "rollout/tokens_per_second"}
            for step, m in self.steps.items()
        }


class SavingTrainer(workers.TrainerHandle):
    """Leaves critic and optimisers beside the policy, to be compared."""

    async def save_policy(self, folder: Path) -> None:
        await super().save_policy(folder)
        await self.save(folder.parent / "trainer")


def training(checkpoint: Path, steps: int, max_staleness: int = 0) -> Training:
    """The asynchronous loop has two workers."""
    return Training(
        PPOSettings(steps=steps, batch_size=8, max_staleness=max_staleness),
        TrainerSettings(policy_lr=3e-3, critic_lr=1e-2),
        agent_settings(checkpoint),
        WORLD,
        None,
        LoopSettings(workers=1 + bool(max_staleness), slots=4, checkpoint_every=CHECKPOINT_EVERY),
        seed=0,
    )


async def made(store: StageStore, spec: StageSpec, body: Body) -> tuple[StageOutcome, Recording]:
    recording = Recording()

    async def produce(folder: Path) -> Produced:
        return Produced(await body(StageRun(folder, recording, recording)), 0.0)  # type: ignore[arg-type]

    return await store.run(spec, produce), recording


async def base(checkpoint: Path, store: StageStore) -> tuple[StageSpec, StageOutcome]:
    """The stage that training starts from."""
    spec = StageSpec("sft", "given", {})

    async def produce(folder: Path) -> Produced:
        shutil.copytree(checkpoint, folder / "checkpoint", dirs_exist_ok=True)
        return Produced({"checkpoint": "checkpoint"}, 0.0)

    return spec, await store.run(spec, produce)


async def critic_stage(
    checkpoint: Path, store: StageStore, label: str, cluster: Cluster
) -> tuple[StageOutcome, Recording]:
    sft_spec, sft = await base(checkpoint, store)
    plan = training(checkpoint, CRITIC_STEPS)
    return await made(store, critic_spec(plan, label, sft_spec), critic_body(plan, sft, cluster))


async def ppo_stage(
    checkpoint: Path, store: StageStore, label: str, critic_label: str, cluster: Cluster, max_staleness: int = 0
) -> tuple[StageOutcome, Recording]:
    """`label` names the run and decides nothing."""
    sft_spec, sft = await base(checkpoint, store)
    critic, _ = await critic_stage(checkpoint, store, critic_label, cluster)
    plan = training(checkpoint, PPO_STEPS, max_staleness)
    spec = ppo_spec(plan, label, sft_spec, critic_spec(training(checkpoint, CRITIC_STEPS), critic_label, sft_spec))
    with patch.object(workers, "TrainerHandle", SavingTrainer):
        return await made(store, spec, ppo_body(plan, sft, critic, cluster))


# The killed run -----------------------------------------------------------------------------------------------------


async def step_of(handle: Any, call: str, arguments: tuple[Any, ...]) -> int:
    if call == "checkpoint":
        return int(arguments[1])
    if call == "update_policy":
        return int(await handle.version())
    request = arguments[0] if call == "rollout" else arguments[0][0]
    return int(request.id.split("-")[0])


def kill_all(pids: list[int], delay: float, writing: Path | None) -> None:
    """Kills after `delay`, counted from the moment at which a checkpoint is being written below `writing`, if given."""
    while writing is not None and not list(writing.glob(".writing-*")):
        time.sleep(0.0005)
    time.sleep(delay)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@contextmanager
def doomed(call: str, step: int, delay: float) -> Iterator[None]:
    """In here that call of that step ends this process and the two actors."""
    handles: list[Any] = []
    worker_class, trainer_class = workers.RolloutWorker, workers.TrainerHandle

    def dying(cls: type) -> Any:
        async def method(self: Any, *arguments: Any) -> Any:
            if await step_of(self, call, arguments) == step:
                pids = [await handle.pid() for handle in handles] + [os.getpid()]
                writing = Path(arguments[0]) if call == "checkpoint" else None
                threading.Thread(target=kill_all, args=(pids, delay, writing), daemon=True).start()
            return await getattr(cls, call)(self, *arguments)

        def remember(self: Any, *arguments: Any, **named: Any) -> None:
            cls.__init__(self, *arguments, **named)
            handles.append(self)

        return type(cls.__name__, (cls,), {"__init__": remember} | ({call: method} if hasattr(cls, call) else {}))

    with (
        patch.object(workers, "RolloutWorker", dying(worker_class)),
        patch.dict(globals(), {"SavingTrainer": dying(trainer_class)}),
    ):
        yield


def main(
    checkpoint: str, store: str, label: str, address: str, max_staleness: str, call: str, step: str, delay: str
) -> None:
    cluster = Cluster(address, "killed", Path(store))
    with doomed(call, int(step), float(delay)):
        stage = ppo_stage(Path(checkpoint), StageStore(Path(store)), label, "first", cluster, int(max_staleness))
        _, recording = asyncio.run(stage)
    print(json.dumps(sorted(recording.steps)))


def killed(store: Path, checkpoint: Path, label: str, max_staleness: int, call: str, step: int, delay: float) -> None:
    """Runs this program on the cluster of this process, to its violent end."""
    import ray

    address = ray.get_runtime_context().gcs_address
    arguments = [checkpoint, store, label, address, max_staleness, call, step, delay]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tasks.small_stages", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, (call, step, delay, done.stdout, done.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
