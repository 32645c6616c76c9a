"""Where a rollout worker's time goes, seen from the driver."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class WorkerMeter:
    """Slot-seconds of one worker by part: generating, in the environment, syncing weights, waiting for work."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.running: set[str] = set()
        """Ids of the rollouts in flight"""
        self._reset()

    def _reset(self) -> None:
        self._began = self._last = time.perf_counter()
        self._used = self._sync = 0.0
        self._parts = {"generate": 0.0, "environment": 0.0}

    def start(self, rollout_id: str) -> None:
        self._count()
        self.running.add(rollout_id)

    def stop(self, rollout_id: str, seconds: Mapping[str, float]) -> bool:
        """The rollout left its slot; `seconds` are what it spent by part. False where it had left before."""
        self._count()
        for part in self._parts:
            self._parts[part] += seconds.get(part, 0.0)
        if rollout_id not in self.running:
            return False
        self.running.remove(rollout_id)
        return True

    @contextmanager
    def syncing(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._sync += (time.perf_counter() - began) * self._slots

    def shares(self) -> dict[str, float]:
        """Shares of the slot-seconds since the last call.

        `wait` is the share of empty slots. The filled ones are split as the rollouts that finished meanwhile spent
        theirs: what a rollout in flight does is known when it ends.
        """
        self._count()
        whole = max((self._last - self._began) * self._slots, 1e-9)
        used, sync = min(self._used / whole, 1.0), min(self._sync / whole, 1.0)
        spent = sum(self._parts.values())
        shares = {"wait": 1.0 - used, "sync": min(sync, used)}
        for part, seconds in self._parts.items():
            shares[part] = (used - shares["sync"]) * (seconds / spent) if spent else 0.0
        self._reset()
        return shares

    def _count(self) -> None:
        now = time.perf_counter()
        self._used += (now - self._last) * len(self.running)
        self._last = now
