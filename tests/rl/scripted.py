"""Rollouts without a model: a scripted engine, environments of a given number of turns, a trainer that takes its time.

What remains is the loop itself: who waits for whom.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from compaction.engines.scripted import ScriptedEngine
from compaction.protocols import Environment, Execution, GenerateRequest, Renderer, TaskLimits
from compaction.rendering import load_renderer
from compaction.settings import AgentSettings, CompactionSettings
from rl.rows import Row
from rl.workers import ServedEngine

DONE = "done"
MAX_TURNS = 10_000


def script(request: GenerateRequest) -> str:
    if request.kind == "summary":
        return "all is well"
    return "exit" if request.messages[-1]["content"].strip() == DONE else "ls"


@dataclass(frozen=True)
class ScriptedServing:
    """Serves the script above under a checkpoint's template."""

    checkpoint: Path

    def load(self) -> tuple[ServedEngine, Renderer]:
        renderer = load_renderer(self.checkpoint)
        return ScriptedEngine(script, renderer), renderer


@dataclass(frozen=True)
class TurnsTask:
    """Solved after `turns` commands of `seconds` each."""

    id: str
    turns: int
    seconds: float
    instruction: str = "start L1 out log"
    limits: TaskLimits = field(default_factory=TaskLimits)

    def open(self) -> Environment:
        return Turns(self.turns, self.seconds)


@dataclass
class Turns:
    """Counts commands."""

    left: int
    seconds: float

    async def start(self) -> None: ...

    async def execute(self, command: str) -> Execution:
        await asyncio.sleep(self.seconds)
        self.left -= 1
        return Execution(" log" if self.left else f" {DONE}")

    async def upload(self, path: str, content: bytes) -> None: ...

    async def grade(self) -> float:
        return 1.0

    async def stop(self) -> None: ...


def scripted_agent(checkpoint: Path) -> AgentSettings:
    """Compacts every few turns, and never stops for their number."""
    compaction = CompactionSettings(
        window=192, threshold=60, max_response=8, min_response=3, summary_cap=20, cap=100, keep_recent=1,
        prompt_pack=str(checkpoint / "pack.yaml"), summary_retries=0,
    )  # fmt: skip
    return AgentSettings(scaffold="shell-line", compaction=compaction, max_turns=MAX_TURNS, mode="training")


class SleepingTrainer:
    """A trainer's handle that learns nothing and takes `seconds` for a step."""

    transfers = False

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps = 0

    async def values(self, rows: Sequence[Row]) -> list[np.ndarray]:
        return [np.zeros(row.n_optimized, np.float32) for row in rows]

    async def update_critic(self, rows: Sequence[Row], targets: Any) -> dict[str, float]:
        return {}

    async def update_policy(self, rows: Sequence[Row], advantages: Any, included: Any) -> dict[str, float]:
        await asyncio.sleep(self.seconds)
        self.steps += 1
        return {}

    async def weights(self) -> tuple[Any, int]:
        return {}, self.steps

    async def version(self) -> int:
        return self.steps


@dataclass(frozen=True)
class HeavyTail:
    """Numbers of turns from a Pareto distribution, cut off: most are short, a few ten times as long."""

    seed: int = 0
    shape: float = 1.3
    least: int = 4
    most: int = 60

    def turns(self, index: int) -> int:
        draw = np.random.default_rng((self.seed, index)).pareto(self.shape) + 1
        return int(min(self.least * draw, self.most))

    def tasks(self, seconds: float, first: int, n: int) -> list[TurnsTask]:
        return [TurnsTask(f"t{i}", self.turns(i), seconds) for i in range(first, first + n)]

    def source(self, seconds: float) -> Any:
        return partial(self.tasks, seconds)
