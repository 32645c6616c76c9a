"""The product's Ray actors with timers. A module of its own: Ray's processes import it by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from compaction.rollout import Rollout
from rl.requests import RolloutRequest
from rl.workers import RolloutActor, TrainerActor
from tests.benchmarks.meters import Meter, Seconds, model_meter, now


class MeteredRolloutActor(RolloutActor):
    """The rollout actor with timers around the engine's step and the whole call."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._meter, self._calls = Meter(), Meter()
        engine: Any = self._served[0]
        engine._step = self._meter.timed(engine._step, "engine")

    async def rollouts(self, requests: Sequence[RolloutRequest], call: str = "") -> list[Rollout]:
        with self._calls.measure("calls"):
            return await super().rollouts(requests, call)

    async def spent(self) -> dict[str, Seconds]:
        return self._meter.spent | self._calls.spent | {"process": now()}


class MeteredTrainerActor(TrainerActor):
    """The trainer actor with timers around the model and the whole calls."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._calls = Meter()
        self._hooks = ExitStack()  # kept: the timers go when it does
        self._meter = self._hooks.enter_context(model_meter(self._trainer))

    def call(self, method: str, *arguments: Any) -> Any:
        with self._calls.measure("calls"):
            return super().call(method, *arguments)

    def spent(self) -> dict[str, Seconds]:
        return self._meter.spent | self._calls.spent | {"process": now()}
