"""A job: the trials of one cell on real tasks, side by side, resumable, nothing lost.

A trial is finished when it has a reward. Whatever ends a job (a crash, Ctrl-C, a budget), the same job opened again
runs exactly the trials that have none, and leaves what earlier attempts left where it can be read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tenacity import AsyncRetrying, retry_if_result, stop_after_attempt, wait_random_exponential

from compaction.atif import atif_trajectory, write_atif
from compaction.differences import changed_settings
from compaction.files import write_durably
from compaction.protocols import Task
from compaction.rollout import Rollout
from compaction.storage import write_rollouts
from evaluation.failures import failure_policy
from evaluation.harbor_results import OWN, job_json, own_part, trial_json
from evaluation.paths import JobPaths, TrialPaths
from evaluation.trial import TrialKey, TrialResult, trial_result


class JobChanged(ValueError):
    """The folder holds a job with other settings. The message shows the difference."""


class JobBusy(ValueError):
    """Another command runs this job."""


@dataclass(frozen=True)
class Trial:
    """One trial to run."""

    key: TrialKey
    task: Task
    seed: int
    checksum: str
    """Digest of the task's content: a result belongs to it"""
    task_path: Path | None = None


Attempt = Callable[[Trial, Path], Awaitable[Rollout]]
"""Attempts a trial once; evidence goes below the folder"""


@dataclass
class JobProgress:
    """Where a job stands. Trials of an earlier command count too."""

    total: int
    passed: int = 0
    failed: int = 0
    errored: int = 0

    @property
    def done(self) -> int:
        return self.passed + self.failed + self.errored

    def shown(self) -> dict[str, float]:
        left = self.total - self.done
        return {"passed": self.passed, "failed": self.failed, "errored": self.errored, "left": left}

    def count(self, result: TrialResult) -> None:
        if result.reward is None:
            self.errored += 1
        elif result.reward >= 1:
            self.passed += 1
        else:
            self.failed += 1


@dataclass(frozen=True)
class JobOutcome:
    """What is there when a job ends. `stopped` says why trials were left out, if any were."""

    results: tuple[TrialResult, ...]
    """Of the trials that were run, in order; those without a reward included"""
    stopped: str | None

    @property
    def complete(self) -> bool:
        return self.stopped is None and all(result.reward is not None for result in self.results)


class Job:
    """The trials of one cell below one folder.

    `settings` are what decides the trials' results; a folder that holds others is refused with JobChanged. More tasks
    or repeats than before are not another job.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], trials: Sequence[Trial], *, concurrency: int, attempts: int
    ) -> None:
        """`concurrency`: trials at once; `attempts`: tries of a trial that infrastructure failed, in this command."""
        self.paths, self.trials = JobPaths(folder), tuple(trials)
        self._settings = json.loads(json.dumps(settings))
        self._gate, self._attempts = asyncio.Semaphore(concurrency), attempts
        self._stopped: str | None = None

    def finished(self) -> dict[TrialKey, TrialResult]:
        """The trials that have a valid result. Raises JobChanged where a result is of another content of its task."""
        found = {}
        for trial in self.trials:
            result = read_result(self.paths.trial(trial.key.task, trial.key.repeat), trial)
            if result is not None and result.reward is not None:
                found[trial.key] = result
        return found

    async def run(self, attempt: Attempt, on_progress: Callable[[JobProgress], None]) -> JobOutcome:
        """Runs what has no valid result. Raises JobChanged and JobBusy before anything is started."""
        with self._opened():
            results = self.finished()
            progress = JobProgress(len(self.trials))
            for result in results.values():
                progress.count(result)
            on_progress(progress)
            started = datetime.now(UTC)

            async def one(trial: Trial) -> None:
                async with self._gate:
                    if self._stopped is None:
                        result = results[trial.key] = await self._retried(trial, attempt)
                        progress.count(result)
                        on_progress(progress)

            try:
                async with asyncio.TaskGroup() as group:
                    for trial in self.trials:
                        if trial.key not in results:
                            group.create_task(one(trial))
            except BaseExceptionGroup as group_error:  # what ends one trial before its start ends them all alike
                raise group_error.exceptions[0] from None
            ordered = tuple(results[t.key] for t in self.trials if t.key in results)
            document = job_json(self.paths.root.name, ordered, len(self.trials), started=started)
            write_durably(self.paths.result, json.dumps(document, indent=1))
            return JobOutcome(ordered, self._stopped)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        self.paths.root.mkdir(parents=True, exist_ok=True)
        with _locked(self.paths):
            self._check_settings()
            yield

    def _check_settings(self) -> None:
        if not self.paths.config.exists():
            write_durably(self.paths.config, json.dumps(self._settings, indent=1))
            return
        before = json.loads(self.paths.config.read_text(encoding="utf-8"))
        if before != self._settings:
            changes = "\n".join(f"  {change}" for change in changed_settings(before, self._settings))
            raise JobChanged(
                f"{self.paths.root} was run with other settings:\n{changes}\n"
                "Give this job another name (--job), or the settings it had. Nothing was changed."
            )

    async def _retried(self, trial: Trial, attempt: Attempt) -> TrialResult:
        """The trial's result; what the policy table allows to be tried again is, `attempts` times in all."""
        retrying = AsyncRetrying(
            retry=retry_if_result(lambda result: self._may_retry(result)),
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=0.5, max=30),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        result: TrialResult = await retrying(self._once, trial, attempt)
        return result

    def _may_retry(self, result: TrialResult) -> bool:
        return self._stopped is None and result.error_class is not None and failure_policy(result.error_class).retry

    async def _once(self, trial: Trial, attempt: Attempt) -> TrialResult:
        paths = self.paths.trial(trial.key.task, trial.key.repeat)
        number = paths.next_attempt()
        config = {"key": trial.key.model_dump(), "seed": trial.seed, "checksum": trial.checksum, "attempt": number}
        write_durably(paths.config, json.dumps(config, indent=1))
        self._event("started", trial, number)
        started = datetime.now(UTC)
        rollout = await attempt(trial, paths.root)
        result = trial_result(trial.key, rollout)
        self._keep(trial, rollout, paths)
        document = trial_json(
            result,
            trial_folder=paths.root,
            task_path=trial.task_path,
            checksum=trial.checksum,
            attempt=number,
            detail=rollout.outcome.detail,
            started=started,
            finished=datetime.now(UTC),
        )
        write_durably(paths.result, json.dumps(document, indent=1, allow_nan=False))
        self._event("finished", trial, number, reward=result.reward, error_class=result.error_class)
        if result.error_class is not None and failure_policy(result.error_class).ends_job:
            self._stopped = f"{result.error_class}: {rollout.outcome.detail}"
        return result

    def _keep(self, trial: Trial, rollout: Rollout, paths: TrialPaths) -> None:
        paths.trajectory.parent.mkdir(exist_ok=True)
        write_atif(paths.trajectory, atif_trajectory(rollout, model_name=trial.key.variant))
        write_rollouts(paths.rollout, [rollout])

    def _event(self, event: str, trial: Trial, attempt: int, **more: Any) -> None:
        """One line per start and end: what really ran can be counted afterwards."""
        line: dict[str, Any] = {"time": datetime.now(UTC).isoformat(), "event": event, "task": trial.key.task}
        line |= {"repeat": trial.key.repeat, "attempt": attempt, **more}
        with self.paths.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_detail(paths: TrialPaths) -> str:
    """What the trial's error said."""
    document = json.loads(paths.result.read_text(encoding="utf-8"))
    return str(document[OWN]["detail"])


def set_aside(folder: Path) -> None:
    """Makes room for a job that is run anew. What was there is kept beside it, under the time of now.

    Raises JobBusy while another command runs it.
    """
    if not folder.exists():
        return
    with _locked(JobPaths(folder)):
        folder.rename(folder.with_name(f"{folder.name}.{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"))


@contextmanager
def _locked(paths: JobPaths) -> Iterator[None]:
    try:
        with FileLock(paths.lock, timeout=0):
            yield
    except Timeout as error:
        raise JobBusy(f"another command is running the job {paths.root}; wait for it or stop it") from error


def read_result(paths: TrialPaths, trial: Trial) -> TrialResult | None:
    """The result on disk; None where there is none, or a half-written or foreign file.

    Raises JobChanged where the result is of another content of the task: which of the two counts is a person's choice.
    """
    try:
        document = json.loads(paths.result.read_text(encoding="utf-8"))
        result = own_part(document)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if result.key != trial.key:
        return None
    if document["task_checksum"] != trial.checksum:
        raise JobChanged(
            f"task {trial.key.task} has changed since {paths.root} was made; give this job another name (--job), or "
            "bring the task back. Nothing was changed."
        )
    return result
