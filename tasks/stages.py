"""Running stages: reuse or make, as one Prefect task each, recorded in MLflow, with progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential

from compaction.engines.endpoint_errors import EndpointRefused
from compaction.protocols import InfrastructureError
from compaction.rendering import TemplateNotSupported
from compaction.window import WindowTooSmall
from evaluation.job import JobBusy, JobChanged
from rl.errors import (
    CheckpointError,
    CheckpointNotFound,
    MissingPackage,
    NotEnoughGpus,
    NoUsableRollouts,
    TrainingDiverged,
    UnsupportedModel,
    WorkerLost,
)
from tasks.caching import Produced, StageOutcome, StageSpec, StageStore
from tasks.cluster import Cluster
from tasks.errors import CommandError, UserError
from tasks.progress import ProgressSink, StageProgress
from tasks.tracking import TrackedRun, Tracker

if TYPE_CHECKING:
    from prefect.states import State

AGAIN = "the same command again goes on from the last checkpoint"
EXPECTED: dict[type[Exception], tuple[type[CommandError], str]] = {
    TrainingDiverged: (UserError, "For example --set trainer.policy_lr=… or trainer.critic_lr=… or sft.sft.lr=…"),
    NoUsableRollouts: (CommandError, f"Mend what failed; {AGAIN}"),
    WorkerLost: (CommandError, f"Ray's logs are in the run's logs/ray; {AGAIN}"),
    CheckpointError: (CommandError, ""),
    CheckpointNotFound: (UserError, ""),
    UnsupportedModel: (UserError, ""),
    NotEnoughGpus: (UserError, ""),
    MissingPackage: (UserError, ""),
    TemplateNotSupported: (UserError, "The model cannot be trained turn by turn with this chat template"),
    WindowTooSmall: (UserError, ""),
    EndpointRefused: (UserError, ""),
    JobChanged: (UserError, ""),
    JobBusy: (CommandError, ""),
    InfrastructureError: (CommandError, f"If this passes by itself, {AGAIN}"),
}
"""What may end a stage without being a bug: how the command then ends, and the next step where the message has none"""


RETRIED = (WorkerLost, InfrastructureError)
"""What another attempt may mend"""
ATTEMPTS = 3


@dataclass
class StageRecord:
    """What run.json, the result table and `--json` say of a stage."""

    name: str
    label: str
    folder: str
    seconds: float
    cached: bool
    why: str


@dataclass(frozen=True)
class StageRun:
    """What a stage's body is handed."""

    folder: Path
    """Write here; it outlives a killed run, so a body finds its own checkpoints in it"""
    tracked: TrackedRun
    progress: StageProgress
    note: Callable[[str], None] = lambda text: None
    """Says one line that stays"""

    def log(self, done: int, metrics: Mapping[str, float], shown: Mapping[str, float]) -> None:
        """Step `done` (from 1) is finished: all metrics to MLflow, `shown` beside the progress bar."""
        self.tracked.log_step(done - 1, metrics)
        self.progress.update(done, shown)


@contextmanager
def explained(title: str) -> Iterator[None]:
    """Errors of the table EXPECTED become one message that names the stage and the next step."""
    try:
        yield
    except tuple(EXPECTED) as error:
        kind, advice = next(EXPECTED[known] for known in type(error).__mro__ if known in EXPECTED)
        text = str(error).rstrip(".")
        stop = "" if text.endswith(("?", "!")) else "."
        raise kind(f"{title}: {text}{stop} {advice}".rstrip()) from error


def failed(error: CommandError) -> State:
    """How a Prefect run ends by what is no bug: with the message alone. Who called it gets the error itself."""
    from prefect.states import Failed

    return Failed(message=str(error), data=error)


@dataclass(frozen=True)
class Unfinished:
    """A result that stands for now: the same command goes on with the stage."""

    result: dict[str, Any]
    why: str


Body = Callable[[StageRun], Awaitable[dict[str, Any] | Unfinished]]
"""Writes the stage's files and returns its small result"""


class KeptSlot:
    """One of a runner's slots, taken by the first stage that needs it and kept for the next ones until `close`.

    Stages that share what others wait for (an engine with its GPUs) must not wait for a slot in between: the others may
    hold them all.
    """

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots, self._held = slots, False

    async def __aenter__(self) -> None:
        if not self._held:
            await self._slots.acquire()
            self._held = True

    async def __aexit__(self, *error: object) -> None:
        """Nothing: it is kept."""

    def close(self) -> None:
        if self._held:
            self._slots.release()
            self._held = False


@dataclass
class StageRunner:
    """Runs the stages of one flow run. `slots` bounds how many compute at once; reuse waits for nobody."""

    store: StageStore
    tracker: Tracker
    progress: ProgressSink
    cluster: Cluster
    slots: asyncio.Semaphore
    force: bool = False
    on_record: Callable[[list[StageRecord]], None] = lambda records: None
    records: list[StageRecord] = field(default_factory=list)

    async def run(
        self,
        spec: StageSpec,
        body: Body,
        *,
        total: int | None,
        unit: str,
        tags: Mapping[str, Any],
        params: Mapping[str, Any] | None = None,
        slot: KeptSlot | None = None,
    ) -> StageOutcome:
        """The stage's outcome: reused, or made by `body`.

        `params` mark a cell; every cell has the same keys. `slot` is one that several stages share.
        """
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        @task(name=spec.stage, task_run_name=spec.title, cache_policy=NO_CACHE, persist_result=False)
        async def stage() -> StageOutcome | State:
            try:
                return await self._outcome(spec, body, total, unit, tags, params, slot)
            except CommandError as error:
                return failed(error)

        outcome = await stage()
        if not isinstance(outcome, StageOutcome):
            await outcome.aresult()  # raises the stage's error
        self._record(spec, outcome)
        return outcome

    async def _outcome(
        self,
        spec: StageSpec,
        body: Body,
        total: int | None,
        unit: str,
        tags: Mapping[str, Any],
        params: Mapping[str, Any] | None,
        slot: KeptSlot | None = None,
    ) -> StageOutcome:
        async def produce(folder: Path) -> Produced:
            recording = (
                self.tracker.stage(spec.stage, spec.label, tags)
                if params is None
                else self.tracker.cell(spec.title, params, tags)
            )
            async with slot or self.slots:
                started = time.monotonic()
                with recording as tracked, self.progress.stage(spec.title, total, unit) as progress:
                    run = StageRun(folder, tracked, progress, self.progress.note)
                    if params is None:
                        tracked.log_config(spec.settings)
                    with explained(spec.title):
                        result = await self._retried(spec.title, partial(body, run))
                    seconds = time.monotonic() - started
                    if isinstance(result, Unfinished):
                        tracked.set_tags({"unfinished": result.why})
                        return Produced(result.result, seconds, tracked.run_id, result.why)
                    return Produced(result, seconds, tracked.run_id)

        outcome = await self.store.run(spec, produce, force=self.force, on_wait=self.progress.note)
        if outcome.cached:
            self.tracker.link_cached(spec.title, outcome.manifest.mlflow_run_id)
        return outcome

    async def _retried(
        self, title: str, attempt: Callable[[], Awaitable[dict[str, Any] | Unfinished]]
    ) -> dict[str, Any] | Unfinished:
        """A stage that infrastructure failed goes on from its last checkpoint, ATTEMPTS times in all."""

        def announce(state: RetryCallState) -> None:
            error = state.outcome and state.outcome.exception()
            self.progress.note(f"{title}: {error}; attempt {state.attempt_number + 1} of {ATTEMPTS}")

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(RETRIED),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(max=30),
            before_sleep=announce,
            reraise=True,
        )
        result: dict[str, Any] | Unfinished = await retrying(attempt)
        return result

    def _record(self, spec: StageSpec, outcome: StageOutcome) -> None:
        self.records.append(
            StageRecord(
                spec.stage, spec.label, outcome.folder.name, outcome.manifest.seconds, outcome.cached, outcome.why
            )
        )
        self.on_record(self.records)
