"""What came out, in MLflow: one parent run per flow run, children per stage and cell, names that compare.

MLflow is imported on first use (it takes seconds), and always spoken to with explicit run ids: its "active run" is
per thread and would be missed by tasks in other threads.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from filelock import FileLock

from compaction.differences import flatten
from tasks.caching import SOURCES
from tasks.errors import CommandError
from tasks.processes import ProcessId

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from evaluation.results import CellResult

EXPERIMENT_PREFIX = "compactionrl/"
PARAMS_PER_BATCH = 100
PARAM_CHARACTERS, TAG_CHARACTERS = 6_000, 8_000
"""MLflow cuts longer values without a word."""
TAGS = {"host": "process.host", "pid": "process.pid", "created": "process.created", "digest": "config_digest"}
Status = Literal["FINISHED", "FAILED", "KILLED"]


def initialise_database(database: Path, artifacts: Path) -> None:
    """Create the SQLite file once, whole: several processes opening a cold one break it for good.

    It is made under another name and renamed, so that a killed start leaves nothing behind.
    Raises CommandError if an existing file is of another MLflow version.
    """
    with FileLock(database.with_suffix(".lock")):
        if database.exists():
            return
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        temporary = database.with_suffix(f".{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        SqlAlchemyStore(f"sqlite:///{temporary}", artifacts.as_uri()).engine.dispose()
        temporary.rename(database)


@cache
def client_for(tracking_uri: str) -> MlflowClient:
    """The one client of a tracking URI. Raises CommandError where it cannot be opened."""
    import mlflow
    from sqlalchemy.exc import SQLAlchemyError

    try:
        client = mlflow.MlflowClient(tracking_uri)
        client.search_experiments(max_results=1)
    except (mlflow.exceptions.MlflowException, SQLAlchemyError) as error:
        first_line = str(error).partition("\n")[0]
        raise CommandError(f"MLflow cannot open {tracking_uri}: {first_line}") from error
    return client


def end_dead_runs(tracking_uri: str) -> list[str]:
    """Set runs of this host to KILLED that are RUNNING in MLflow though their process is gone. Returns their ids."""
    client = client_for(tracking_uri)
    ours = [e.experiment_id for e in client.search_experiments() if e.name.startswith(EXPERIMENT_PREFIX)]
    if not ours:
        return []
    host = ProcessId.current().host
    running = client.search_runs(
        ours, f"attributes.status = 'RUNNING' and tags.`{TAGS['host']}` = '{host}'", max_results=1_000
    )
    dead = [run.info.run_id for run in running if not _process_of(run.data.tags).alive()]
    for run_id in dead:
        client.set_terminated(run_id, "KILLED")
    return dead


def _process_of(tags: Mapping[str, str]) -> ProcessId:
    return ProcessId(tags[TAGS["host"]], int(tags[TAGS["pid"]]), float(tags[TAGS["created"]]))


def _process_tags() -> dict[str, str]:
    me = ProcessId.current()
    return {TAGS["host"]: me.host, TAGS["pid"]: str(me.pid), TAGS["created"]: repr(me.created)}


@cache
def git_state(folder: Path) -> dict[str, str]:
    """Commit and whether tracked files differ from it; empty outside a checkout or without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != folder:  # installed below somebody else's checkout
            return {}
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": str(dirty).lower()}
    except (OSError, subprocess.SubprocessError):
        return {}


@dataclass
class TrackedRun:
    """One MLflow run: a parent, a stage or a cell."""

    client: MlflowClient
    run_id: str
    experiment_id: str
    reopened: bool = False
    skipped_non_finite: int = 0

    @cached_property
    def _last_step(self) -> dict[str, int]:
        """Per metric the last step that was logged, by an earlier attempt too: none is logged twice."""
        if not self.reopened:
            return {}
        names = self.client.get_run(self.run_id).data.metrics
        return {name: max(m.step for m in self.client.get_metric_history(self.run_id, name)) for name in names}

    def log_step(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """All metrics of one step in one call. None is left out; NaN and infinities are left out and counted."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = []
        for name, value in metrics.items():
            if value is None or step <= self._last_step.get(name, -1):
                continue
            if math.isfinite(value):
                rows.append(Metric(name, float(value), now, step))
            else:
                self.skipped_non_finite += 1
        if rows:
            self.client.log_batch(self.run_id, metrics=rows)
            self._last_step.update(dict.fromkeys((row.key for row in rows), step))

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Nested settings as flat dotted params. MLflow never changes one: those that stand are left as they are."""
        from mlflow.entities import Param

        standing = self.client.get_run(self.run_id).data.params if self.reopened else {}
        new = [
            Param(name, str(value)[:PARAM_CHARACTERS])
            for name, value in flatten(dict(params)).items()
            if name not in standing
        ]
        for start in range(0, len(new), PARAMS_PER_BATCH):
            self.client.log_batch(self.run_id, params=new[start : start + PARAMS_PER_BATCH])

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Flat params, and the whole as config.yaml."""
        self.log_params(config)
        self.client.log_text(self.run_id, yaml.safe_dump(dict(config), sort_keys=False), "config.yaml")

    def log_file(self, path: Path, folder: str | None = None) -> None:
        self.client.log_artifact(self.run_id, str(path), folder)

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        rows = [RunTag(name, str(value)[:TAG_CHARACTERS]) for name, value in tags.items() if value is not None]
        self.client.log_batch(self.run_id, tags=rows)

    def end(self, status: Status) -> None:
        if self.skipped_non_finite:
            self.set_tags({"skipped_non_finite": self.skipped_non_finite})
        self.client.set_terminated(self.run_id, status)


class Tracker:
    """The parent run of one flow run, and its children."""

    def __init__(self, parent: TrackedRun, common_tags: Mapping[str, str]) -> None:
        self.parent = parent
        self.common_tags = dict(common_tags)

    @classmethod
    @contextmanager
    def open(
        cls,
        tracking_uri: str,
        *,
        preset: str,
        config: Mapping[str, Any],
        config_digest: str,
        artifacts: Path | None,
        name: str,
        tags: Mapping[str, str | None],
    ) -> Iterator[Tracker]:
        """The parent run of experiment `compactionrl/<preset>`, ended as what happened inside says.

        An unfinished run of the same configuration whose process is gone is reopened. `artifacts` is the artifact root
        of a local database; None leaves it to the server. `tags` may hold the Prefect flow run id and url.
        """
        client = client_for(tracking_uri)
        experiment_id = _experiment(client, EXPERIMENT_PREFIX + preset, artifacts)
        common = {TAGS["digest"]: config_digest, **_process_tags(), **git_state(SOURCES)}
        common |= {key: value for key, value in tags.items() if value is not None}
        earlier = _unfinished(client, experiment_id, f"tags.kind = 'flow' and tags.config_digest = '{config_digest}'")
        parent = _start(client, experiment_id, earlier, name, {**common, "kind": "flow"})
        parent.log_config(config)
        with _ended(parent):
            yield cls(parent, common)

    @contextmanager
    def stage(self, stage: str, label: str, tags: Mapping[str, Any] | None = None) -> Iterator[TrackedRun]:
        """The child run of one stage; the unfinished one of an earlier attempt is reopened and its steps are kept."""
        with self._child("stage", f"{stage} {label}".strip(), {"stage": stage, **(tags or {})}) as run:
            yield run

    @contextmanager
    def cell(self, name: str, params: Mapping[str, Any], tags: Mapping[str, Any] | None = None) -> Iterator[TrackedRun]:
        """The child run of one cell. `params` hold the same keys in every cell, defaults too."""
        with self._child("cell", name, tags or {}) as run:
            run.log_params(params)
            yield run

    def link_cached(self, title: str, mlflow_run_id: str | None) -> None:
        """A reused stage or cell: the parent names the run that made it."""
        if mlflow_run_id:
            self.parent.set_tags({f"cached/{_tag_name(title)}": mlflow_run_id})

    @contextmanager
    def _child(self, kind: str, name: str, tags: Mapping[str, Any]) -> Iterator[TrackedRun]:
        client, experiment_id = self.parent.client, self.parent.experiment_id
        earlier = _unfinished(
            client,
            experiment_id,
            f"tags.kind = '{kind}' and tags.child = '{_tag_name(name)}' "
            f"and tags.`mlflow.parentRunId` = '{self.parent.run_id}'",
        )
        own = {"kind": kind, "child": _tag_name(name), "mlflow.parentRunId": self.parent.run_id}
        run = _start(client, experiment_id, earlier, name, {**self.common_tags, **tags, **own})
        with _ended(run):
            yield run


def log_cell_result(run: TrackedRun, result: CellResult) -> None:
    """`sweep/*` and `eval/*` metrics of a cell; its axes are metrics for range filters and parallel coordinates."""
    metrics: dict[str, float | None] = {
        "sweep/window": result.window,
        "sweep/cap": result.cap,
        "sweep/keep_recent": result.keep_recent,
    }
    axes = {"window", "cap", "keep_recent", "seed"}
    for name, value in result.model_dump().items():
        if name not in axes and isinstance(value, (int, float)) and not isinstance(value, bool):
            metrics[f"eval/{name}"] = value
    run.log_step(0, metrics)


def _experiment(client: MlflowClient, name: str, artifacts: Path | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        location = (artifacts / _tag_name(name)).as_uri() if artifacts else None
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException:  # another command made it in between
            found = client.get_experiment_by_name(name)
    if found is None or found.lifecycle_stage != "active":
        raise CommandError(
            f"MLflow experiment {name!r} was deleted; restore it (`mlflow experiments restore`) or "
            f"remove it for good (`mlflow gc`)"
        )
    return str(found.experiment_id)


def _unfinished(client: MlflowClient, experiment_id: str, condition: str) -> str | None:
    """The newest run that failed or was killed. One that still runs belongs to another command."""
    runs = client.search_runs([experiment_id], condition, order_by=["attributes.start_time DESC"], max_results=1)
    return runs[0].info.run_id if runs and runs[0].info.status in ("FAILED", "KILLED") else None


def _start(
    client: MlflowClient, experiment_id: str, earlier: str | None, name: str, tags: Mapping[str, Any]
) -> TrackedRun:
    if earlier:
        client.update_run(earlier, status="RUNNING")
        run = TrackedRun(client, earlier, experiment_id, reopened=True)
    else:
        info = client.create_run(experiment_id, run_name=name).info
        run = TrackedRun(client, info.run_id, experiment_id)
    run.set_tags(tags)
    return run


@contextmanager
def _ended(run: TrackedRun) -> Iterator[None]:
    """FINISHED, FAILED on an error, KILLED on Ctrl-C or a termination."""
    try:
        yield
    except Exception:
        run.end("FAILED")
        raise
    except BaseException:
        run.end("KILLED")
        raise
    run.end("FINISHED")


def _tag_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-._/" else "_" for c in text)
