"""What is rolled out: the endless, seeded stream of requests that both loops read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from compaction.protocols import Task
from compaction.settings import AgentSettings

TaskSource = Callable[[int, int], list[Task]]
"""(first, n) → that stretch of the seeded stream of training tasks; shorter where the stream has ended"""


@dataclass(frozen=True)
class RolloutRequest:
    """One rollout to make. Its id, `seed` and the task's id decide its sampling."""

    id: str
    task: Task
    seed: int
    settings: AgentSettings


@dataclass(frozen=True)
class RequestStream:
    """Units in order. A unit is one task attempted `group_size` times; a batch is `batch_size` rollouts of whole units.

    Unit number, seed and stream name decide everything about a request, so a resumed run asks for the same ones.
    """

    tasks: TaskSource
    agent: AgentSettings
    seed: int
    name: str
    """Part of every rollout's seed: critic pretraining and PPO sample apart"""
    batch_size: int
    group_size: int

    @property
    def units_per_batch(self) -> int:
        return self.batch_size // self.group_size

    def batch(self, step: int) -> list[RolloutRequest]:
        """The requests of one synchronous step."""
        first = step * self.units_per_batch
        return [r for index in range(first, first + self.units_per_batch) for r in self.unit(index)]

    def unit(self, index: int) -> list[RolloutRequest]:
        """The requests of one unit; empty behind the last task."""
        step, place = divmod(index, self.units_per_batch)
        return [
            RolloutRequest(
                f"{step:05d}-{place:04d}-{attempt}",
                task,
                rollout_seed(self.seed, self.name, step, place, attempt),
                self.agent,
            )
            for task in self.tasks(index, 1)
            for attempt in range(self.group_size)
        ]


def rollout_seed(*parts: object) -> int:
    """A 63-bit seed from whatever names a rollout."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
