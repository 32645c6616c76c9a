"""What is started, what comes back and what is trained next: a state machine without I/O (design "Async").

Nothing is dropped for its age. Staleness is bounded where rollouts start: unit n may start only while it would be
trained, if units were trained in order, at most `max_staleness` updates after its first token. The batch takes units
as they are complete, so a long rollout holds up nobody; what it sampled too long ago is masked by the learner.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from compaction.rollout import Rollout
from rl.requests import RequestStream, RolloutRequest


@dataclass
class _Unit:
    """A started unit that is not yet trained."""

    task_id: str
    open: dict[str, RolloutRequest]
    finished: list[Rollout] = field(default_factory=list)


class RolloutQueue:
    """The rollouts of one run, from the stream to batches of whole units.

    A rollout that infrastructure fails is made again, up to `max_attempts` times; then its task is quarantined and
    another takes its place. A rollout that was in flight when its worker died becomes a suspect: only the next death
    beside it counts against it, and no worker runs two suspects at once, so the innocent clear themselves.
    """

    def __init__(self, stream: RequestStream, *, steps: int, max_staleness: int, max_attempts: int) -> None:
        """`steps`: batches in all."""
        self._stream, self._max_staleness, self._max_attempts = stream, max_staleness, max_attempts
        self._total = steps * stream.units_per_batch
        self.step = 0
        """Batches trained so far"""
        self.quarantined: dict[str, str] = {}
        """Task id → its last failure"""
        self._next_unit = 0
        self._lost = 0
        self._ended = False
        self._units: dict[int, _Unit] = {}
        self._unit_of: dict[str, int] = {}
        self._waiting: deque[RolloutRequest] = deque()
        self._complete: deque[int] = deque()
        self._failures: Counter[str] = Counter()
        self._suspects: set[str] = set()
        self.lost_in_a_row = 0
        """Units lost to quarantine since the last rollout that finished"""

    def next(self, *, beside_suspect: bool) -> RolloutRequest | None:
        """The rollout that a free slot should run; None while there is nothing, or nothing may start.

        `beside_suspect`: the slot's worker already runs a suspect.
        """
        while True:
            for request in self._waiting:
                if not (beside_suspect and self.is_suspect(request.id)):
                    self._waiting.remove(request)
                    return request
            if not self._may_start():
                return None
            self._start_unit()

    def is_suspect(self, rollout_id: str) -> bool:
        return rollout_id in self._suspects

    def attempt(self, rollout_id: str) -> int:
        """Which attempt of the rollout is running, from 1."""
        return self._failures[rollout_id] + 1

    def finished(self, rollout: Rollout) -> None:
        """A rollout with a reward."""
        index = self._unit_of[rollout.id]
        unit = self._units[index]
        unit.finished.append(rollout)
        self.lost_in_a_row = 0
        self._close(index, rollout.id)

    def failed(self, rollout_id: str, why: str) -> bool:
        """Infrastructure failed the rollout. True: it will be made again; False: its task is quarantined."""
        self._failures[rollout_id] += 1
        index = self._unit_of[rollout_id]
        unit = self._units[index]
        if self._failures[rollout_id] < self._max_attempts and unit.task_id not in self.quarantined:
            self._waiting.append(unit.open[rollout_id])
            return True
        self.quarantined.setdefault(unit.task_id, why)
        self._close(index, rollout_id)
        return False

    def worker_died(self, rollout_id: str, why: str) -> bool:
        """The rollout was in flight on a worker that died. True: it will be made again."""
        if self.is_suspect(rollout_id):
            return self.failed(rollout_id, why)
        self._suspects.add(rollout_id)
        self._waiting.append(self._units[self._unit_of[rollout_id]].open[rollout_id])
        return True

    def take(self) -> list[Rollout] | None:
        """The next batch: the units that were complete first, whole; None while there are too few."""
        if len(self._complete) < self._stream.units_per_batch:
            return None
        units = [self._units.pop(self._complete.popleft()) for _ in range(self._stream.units_per_batch)]
        return [rollout for unit in units for rollout in unit.finished]

    def advance(self) -> None:
        """The batch taken last is trained: its place may be filled."""
        self.step += 1

    @property
    def exhausted(self) -> bool:
        """The stream has ended and what is left makes no whole batch."""
        return self._ended and len(self._units) < self._stream.units_per_batch

    @property
    def ready(self) -> int:
        """Rollouts that wait to be trained."""
        return sum(len(self._units[index].finished) for index in self._complete)

    def state(self) -> tuple[dict[str, Any], list[Rollout]]:
        """JSON, and the finished rollouts that are not yet trained: what a checkpoint holds of the queue."""
        state = {
            "step": self.step,
            "next_unit": self._next_unit,
            "lost": self._lost,
            "open_units": sorted(self._units),
            "complete": list(self._complete),
            "failures": dict(self._failures),
            "quarantined": self.quarantined,
        }
        return state, [rollout for unit in self._units.values() for rollout in unit.finished]

    def restore(self, state: dict[str, Any], rollouts: Sequence[Rollout]) -> None:
        """The counterpart of `state`. What was in flight starts again, under the same ids and seeds."""
        self.step, self._next_unit, self._lost = state["step"], state["next_unit"], state["lost"]
        self.quarantined = dict(state["quarantined"])
        self._failures = Counter(state["failures"])
        finished = {rollout.id: rollout for rollout in rollouts}
        for index in state["open_units"]:
            requests = self._open_unit(index)
            for request in requests:
                if request.id in finished:
                    self._units[index].finished.append(finished[request.id])
                    del self._units[index].open[request.id]
                elif self._failures[request.id] >= self._max_attempts:
                    del self._units[index].open[request.id]
                else:
                    self._waiting.append(request)
        self._complete = deque(state["complete"])

    def _may_start(self) -> bool:
        started = self._next_unit - self._lost
        bound = (self.step + 1 + self._max_staleness) * self._stream.units_per_batch
        return not self._ended and started < min(bound, self._total)

    def _start_unit(self) -> None:
        """The next unit, unless its task is quarantined or the stream has ended."""
        requests = self._stream.unit(self._next_unit)
        if not requests:
            self._ended = True
            return
        if requests[0].task.id in self.quarantined:
            self._lost += 1
        else:
            self._waiting.extend(self._open_unit(self._next_unit))
        self._next_unit += 1

    def _open_unit(self, index: int) -> list[RolloutRequest]:
        requests = self._stream.unit(index)
        self._units[index] = _Unit(requests[0].task.id, {request.id: request for request in requests})
        self._unit_of |= dict.fromkeys(self._units[index].open, index)
        return requests

    def _close(self, index: int, rollout_id: str) -> None:
        """The rollout will not be made again; its unit may be complete."""
        unit = self._units[index]
        del unit.open[rollout_id]
        self._suspects.discard(rollout_id)
        if unit.open:
            return
        if unit.finished:
            self._complete.append(index)
        else:
            del self._units[index]
            self._lost += 1
            self.lost_in_a_row += 1
