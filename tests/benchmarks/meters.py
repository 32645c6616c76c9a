"""Timers that benchmarks hang on the product from outside: wall and CPU seconds by part."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rl.trainer import Trainer

MODEL = ("forward", "backward", "optimizer")
"""The parts that `model_meter` measures"""
Reading = TypeVar("Reading")


@dataclass(frozen=True)
class Seconds:
    """Wall and CPU seconds. On a busy machine CPU time says more: it leaves out what others did meanwhile."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)

    def __str__(self) -> str:
        return f"{self.wall:6.2f} s ({self.cpu:5.2f} s CPU)"


def now() -> Seconds:
    """This process's clocks."""
    return Seconds(time.perf_counter(), time.process_time())


def timed(work: Callable[[], object]) -> Seconds:
    began = now()
    work()
    return now() - began


def median(readings: Sequence[Seconds]) -> Seconds:
    return Seconds(statistics.median(s.wall for s in readings), statistics.median(s.cpu for s in readings))


def alternating(sides: Mapping[str, Callable[[], Reading]], rounds: int) -> dict[str, list[Reading]]:
    """What each side reads; they take turns, and every other round goes backwards."""
    taken: dict[str, list[Reading]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sides if number % 2 == 0 else reversed(list(sides)):
            taken[name].append(sides[name]())
    return taken


def conditions() -> str:
    """What a single benchmark ran under."""
    return (
        f"{os.cpu_count()} cores, {torch.get_num_threads()} thread(s), torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f}"
    )


def total(parts: dict[str, Seconds]) -> Seconds:
    return sum(parts.values(), Seconds())


@dataclass
class Meter:
    """Adds up seconds by part."""

    spent: dict[str, Seconds] = field(default_factory=dict)
    _began: list[Seconds] = field(default_factory=list)

    def start(self, *_: Any) -> None:
        self._began.append(now())

    def stop(self, part: str) -> None:
        self.spent[part] = self.spent.get(part, Seconds()) + (now() - self._began.pop())

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop(part)

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`function`, its seconds counted under `part`."""

        def measured(*arguments: Any, **named: Any) -> Any:
            with self.measure(part):
                return function(*arguments, **named)

        return measured

    def stopper(self, part: str) -> Callable[..., None]:
        """A hook that ends what `start` began."""

        def stop(*_: Any) -> None:
            self.stop(part)

        return stop


@contextmanager
def model_meter(trainer: Trainer) -> Iterator[Meter]:
    """Measures a trainer's MODEL parts while the context is open. The loss and all bookkeeping count as outside."""
    meter = Meter()
    handles = []
    decoder, head = trainer.policy.get_decoder(), trainer.policy.get_output_embeddings()
    for module in (decoder, head, trainer.critic.backbone, trainer.critic.head):
        handles += [
            module.register_forward_pre_hook(meter.start),
            module.register_forward_hook(meter.stopper("forward")),
        ]
    handles.append(register_optimizer_step_pre_hook(meter.start))
    handles.append(register_optimizer_step_post_hook(meter.stopper("optimizer")))
    plain_backward = torch.Tensor.backward
    torch.Tensor.backward = meter.timed(plain_backward, "backward")  # type: ignore[method-assign]
    try:
        yield meter
    finally:
        torch.Tensor.backward = plain_backward  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()
