"""Runs on disk: `runs/<time>-<preset>/{run.json, results.json, report.html, logs/}`, and how a person names one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compaction.files import write_durably
from flows.services import Home
from tasks.errors import CommandError, UserError
from tasks.processes import ProcessId

RECORD = "run.json"
COLLECTED = "collected.json"
RUN_VARIABLE = "COMPACTIONRL_RUN"
"""The environment of whatever a run starts holds the run's folder, so that `doctor` knows whose it is."""


@dataclass
class RunFolder:
    """One run's folder. `record` is what run.json holds:

    preset, command, created, status (running, ok, partial, failed, killed), process (host, pid, created), experiment,
    mlflow_run_id, prefect_flow_run_id, stages (name, label, folder, seconds, cached, why); keys are added as they come.
    """

    path: Path
    record: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def was_refused(self) -> bool:
        """It ended before its first stage."""
        return self.record.get("status") == "failed" and not self.record.get("stages")

    def update(self, **values: Any) -> None:
        self.record |= values
        write_durably(self.path / RECORD, json.dumps(self.record, indent=2))

    def read_results(self) -> dict[str, Any]:
        """What results.json holds. Raises CommandError, with the command to go on with, where there is none."""
        command = self.record.get("command")
        try:
            results: dict[str, Any] = json.loads(self.results.read_text())
        except FileNotFoundError:
            if self.is_running():
                raise CommandError(
                    f"{self.path} has no results.json yet: the run is still going; wait for it"
                ) from None
            if (self.path / COLLECTED).is_file():
                raise CommandError(f"{self.path} collected trajectories ({COLLECTED}): it has no scores") from None
            raise CommandError(
                f"{self.path} has no results.json: the run did not get that far; resume it: {command}"
            ) from None
        except (OSError, ValueError) as error:
            raise CommandError(f"{self.results} is unreadable ({error}); make it again: {command}") from error
        return results

    def stage_folders(self, stages: Path) -> list[Path]:
        """Folders of the stages it used that are still there, in order."""
        names = [stage.get("folder") for stage in self.record.get("stages", [])]
        return [stages / name for name in names if name and (stages / name).is_dir()]

    def is_finished(self) -> bool:
        """Its results, report and MLflow runs are complete."""
        return self.record.get("status") in ("ok", "partial")

    def is_running(self) -> bool:
        return self.record.get("status") == "running" and self.command_alive()

    def command_alive(self) -> bool:
        """Its command is still there (it may be ending), or ran on another host, of which nothing is known here."""
        process = ProcessId(**self.record["process"])
        return process.host != ProcessId.current().host or process.alive()


def create_run(home: Home, preset: str, command: str, experiment: Mapping[str, Any]) -> RunFolder:
    """A new folder; two runs in one second get different ones."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{_file_name(preset)}"
    for number in range(1_000):
        path = home.runs / (stem if number == 0 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        run = RunFolder(path, {})
        run.logs.mkdir()
        run.update(
            preset=preset,
            command=command,
            created=datetime.now(UTC).isoformat(),
            status="running",
            process=asdict(ProcessId.current()),
            experiment=dict(experiment),
            stages=[],
        )
        return run
    raise UserError(f"{home.runs} already holds a thousand runs of this second")


def all_runs(home: Home) -> list[RunFolder]:
    """Oldest first."""
    runs = [run for path in home.runs.glob(f"*/{RECORD}") if (run := _read(path.parent))]
    return sorted(runs, key=lambda run: (run.record.get("created", ""), run.name))


def find_run(home: Home, name: str) -> RunFolder:
    """By `latest` (that was not refused before its first stage), folder name or path, MLflow run id, or a unique
    beginning of either. Raises UserError."""
    runs = all_runs(home)
    if not runs and not Path(name).is_dir():
        raise UserError(f"no runs in {home.runs}; start one with `compactionrl reproduce`, or set COMPACTIONRL_HOME")
    if name == "latest":
        return next((run for run in reversed(runs) if not run.was_refused), runs[-1])
    if run := _read(Path(name).expanduser()):
        return run
    exact = [run for run in runs if name in (run.name, run.record.get("mlflow_run_id"))]
    near = [run for run in runs if run.name.startswith(name) or str(run.record.get("mlflow_run_id")).startswith(name)]
    found = exact or near
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{name!r} names {len(found)} runs: {', '.join(run.name for run in found)}; write more of it")
    last = ", ".join(run.name for run in runs[-5:])
    raise UserError(f"no run {name!r} in {home.runs}; the last ones: {last}; or `latest`")


def end_dead_runs(home: Home) -> list[RunFolder]:
    """Marks runs as killed whose command is gone without having said so."""
    dead = [run for run in all_runs(home) if run.record.get("status") == "running" and not run.is_running()]
    for run in dead:
        run.update(status="killed")
    return dead


def remove_run(run: RunFolder) -> None:
    shutil.rmtree(run.path)


def _read(folder: Path) -> RunFolder | None:
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return RunFolder(folder.resolve(), record) if isinstance(record, dict) else None


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in text)
