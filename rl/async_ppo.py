"""The asynchronous loop: rollouts wait for nobody, and no rollout is dropped for being late (design "Async").

Workers always have rollouts in flight; the trainer takes whole units as they are complete. Weights go out after every
update, in mid-rollout too. rl.queue decides what may start and what is trained next; here are the concurrency and the
clocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compaction.rollout import Rollout
from rl.errors import NoUsableRollouts, WorkerDied
from rl.events import Emit, no_events
from rl.learner import Learner, StepClock, StepResult, rollout_metrics
from rl.meters import WorkerMeter
from rl.queue import RolloutQueue
from rl.requests import RequestStream, RolloutRequest
from rl.settings import PPOSettings
from rl.workers import RolloutWorker

GRACE_SECONDS = 30.0
"""How long after its own limit a rollout's process may stay silent before it counts as hung"""
SYNC_SECONDS = 120.0
"""How long a worker may take to load weights before it counts as hung"""


@dataclass
class AsyncPPO:
    """Rollout workers and a trainer that work at the same time."""

    settings: PPOSettings
    stream: RequestStream
    workers: Sequence[RolloutWorker]
    learner: Learner
    emit: Emit = no_events
    queue: RolloutQueue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = RolloutQueue(
            self.stream,
            steps=self.settings.steps,
            max_staleness=self.settings.max_staleness,
            max_attempts=self.settings.max_attempts,
        )
        self._meters = [WorkerMeter(worker.slots) for worker in self.workers]
        self._calls: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    async def run(self, first_step: int = 0, *, update_policy: bool = True) -> AsyncIterator[StepResult]:
        """Steps `first_step` … `settings.steps` − 1; after `restore` the first is the restored one.

        Without `update_policy` only the critic learns (pretraining). Raises NoUsableRollouts, WorkerLost, and what the
        trainer raises (TrainingDiverged).
        """
        version = await self.learner.trainer.version()
        try:
            for step in range(first_step, self.settings.steps):
                clock = StepClock()
                batch = await self._batch()
                clock.lap("wait")
                metrics = rollout_metrics(batch) | staleness_metrics(batch, version, self.settings.max_staleness)
                metrics["queue/ready"] = float(self.queue.ready)
                metrics["queue/in_flight"] = float(len(self._calls))
                metrics["queue/quarantined"] = float(len(self.queue.quarantined))
                metrics |= await self.learner.learn(
                    batch, clock, update_policy=update_policy, oldest_version=version - self.settings.max_staleness
                )
                clock.lap("learn")
                if update_policy:
                    version = await self._publish()
                self.queue.advance()
                self._fill()
                clock.lap("sync")
                self.emit("trained", step=step, rollouts=[r.id for r in batch])
                yield StepResult(step, metrics | self._times(clock, metrics), batch)
        finally:
            await self._cancel()

    def state(self) -> tuple[dict[str, Any], list[Rollout]]:
        """What a checkpoint holds beside the trainer: the queue, and the finished rollouts in it."""
        return self.queue.state()

    def restore(self, state: dict[str, Any], rollouts: Sequence[Rollout]) -> None:
        """The counterpart of `state`; call it before `run`."""
        self.queue.restore(state, rollouts)

    async def _batch(self) -> list[Rollout]:
        """The next batch, waiting for it. What goes wrong in a rollout's call is raised here."""
        while True:
            self._changed.clear()
            self._fill()
            if self._error is not None:
                raise self._error
            if (batch := self.queue.take()) is not None:
                return batch
            self._check_supply()
            await self._changed.wait()

    def _check_supply(self) -> None:
        last = next(reversed(self.queue.quarantined.values()), "no detail")
        if self.queue.lost_in_a_row >= self.settings.max_empty_batches * self.stream.units_per_batch:
            raise NoUsableRollouts(
                f"{self.queue.lost_in_a_row} tasks in a row failed {self.settings.max_attempts} times each; last "
                f"failure: {last}"
            )
        if self.queue.exhausted:
            raise NoUsableRollouts(
                f"the tasks are used up: {len(self.queue.quarantined)} were quarantined, the last one for: {last}"
            )

    def _fill(self) -> None:
        """Starts what may start, on the least loaded worker first."""
        while True:
            for number in sorted(range(len(self.workers)), key=lambda n: len(self._meters[n].running)):
                running = self._meters[number].running
                if len(running) >= self.workers[number].slots:
                    continue
                request = self.queue.next(beside_suspect=any(map(self.queue.is_suspect, running)))
                if request is not None:
                    break
            else:
                return
            self._meters[number].start(request.id)
            call = asyncio.create_task(self._call(number, request))
            self._calls.add(call)
            call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        """A slot is free again. An error is kept for whoever awaits the batch."""
        self._calls.discard(call)
        if call.cancelled():
            return
        if (error := call.exception()) is not None:
            self._error = error
        else:
            self._fill()
        self._changed.set()

    async def _call(self, number: int, request: RolloutRequest) -> None:
        """One attempt of one rollout on one worker, and what becomes of it."""
        self.emit("started", rollout=request.id, worker=number, attempt=self.queue.attempt(request.id))
        worker, meter = self.workers[number], self._meters[number]
        seconds: dict[str, float] = {}
        try:
            async with asyncio.timeout(worker.limit(request) + GRACE_SECONDS):
                rollout = await worker.rollout(request)
            seconds = rollout.seconds
        except TimeoutError:
            await worker.replace("it does not answer")
            self._failed(request, f"worker {number} did not answer and was replaced")
        except WorkerDied as error:
            self._failed(request, str(error), worker_died=True)
        else:
            self._returned(request, rollout)
        finally:
            meter.stop(request.id, seconds)

    def _returned(self, request: RolloutRequest, rollout: Rollout) -> None:
        outcome = rollout.outcome
        if outcome.reward is None:
            self._failed(request, f"{outcome.error_class}: {outcome.detail}")
            return
        self.queue.finished(rollout)
        self.emit("finished", rollout=rollout.id, reward=outcome.reward, compactions=rollout.n_compactions)

    def _failed(self, request: RolloutRequest, why: str, *, worker_died: bool = False) -> None:
        again = (self.queue.worker_died if worker_died else self.queue.failed)(request.id, why)
        self.emit("failed", rollout=request.id, why=why, again=again)
        if not again:
            self.emit("quarantined", task=request.task.id, why=why)

    async def _publish(self) -> int:
        """The new weights to all workers; one that does not take them in time is replaced. Returns their version."""
        trainer = self.learner.trainer
        if trainer.transfers:
            with ExitStack() as syncing:
                for meter in self._meters:
                    syncing.enter_context(meter.syncing())
                return await trainer.send_weights(self.workers)
        weights, version = await trainer.weights()

        async def load(worker: RolloutWorker, meter: WorkerMeter) -> None:
            with meter.syncing():
                try:
                    async with asyncio.timeout(SYNC_SECONDS):
                        await worker.load_weights(weights, version)
                except TimeoutError:
                    await worker.replace("it does not load weights")
                    await worker.load_weights(weights, version)

        await asyncio.gather(*(load(w, m) for w, m in zip(self.workers, self._meters, strict=True)))
        return version

    def _times(self, clock: StepClock, metrics: dict[str, float]) -> dict[str, float]:
        """Where the step's time went: the trainer's shares, and each worker's."""
        seconds = max(clock.seconds, 1e-9)
        learning = sum(s for name, s in clock.laps.items() if name not in ("wait", "sync"))
        times = clock.metrics() | {
            "time/trainer/wait_share": clock.laps["wait"] / seconds,
            "time/trainer/train_share": learning / seconds,
            "time/trainer/sync_share": clock.laps["sync"] / seconds,
            "rollout/tokens_per_second": metrics["rollout/tokens"] / seconds,
        }
        for number, meter in enumerate(self._meters):
            times |= {f"time/worker_{number}/{part}_share": share for part, share in meter.shares().items()}
        return times

    async def _cancel(self) -> None:
        """No call outlives the loop. Their rollouts end with the workers."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def staleness_metrics(rollouts: Sequence[Rollout], version: int, max_staleness: int) -> dict[str, float]:
    """How old the batch's tokens are at trainer version `version`, and what the bound masks.

    The masked share also by the number of compactions: compacted rollouts are the long ones, so a bound that is too
    tight shows there first. The shares of rollouts that met their deadline come the same way.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(f"compactions_{min(rollout.n_compactions, 3)}", []).append(rollout)
    ages = np.concatenate([_ages(rollouts, version), np.zeros(0)])
    metrics = {"queue/masked_share": _share(ages > max_staleness)}
    if len(ages):
        metrics |= {"queue/staleness": float(ages.mean()), "queue/staleness_max": float(ages.max())}
    for name, group in groups.items():
        metrics[f"queue/masked_share/{name}"] = _share(_ages(group, version) > max_staleness)
        metrics[f"queue/deadline_share/{name}"] = _share(np.array([r.outcome.stop_reason == "deadline" for r in group]))
    return metrics


def _ages(rollouts: Sequence[Rollout], version: int) -> np.ndarray:
    """Staleness of every sampled token."""
    parts = [version - segment.versions[segment.optimized] for r in rollouts for segment in r.segments]
    return np.concatenate(parts) if parts else np.zeros(0)


def _share(flags: np.ndarray) -> float:
    return float(flags.mean()) if len(flags) else 0.0
