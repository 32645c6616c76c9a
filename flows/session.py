"""One command from start to exit code: services up, run folder, logs, signals, errors as one message."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from flows.cli_options import overrides_of
from flows.services import Home
from flows.standing import StandingRecord
from tasks.caching import is_disk_full
from tasks.errors import CommandError

if TYPE_CHECKING:
    from flows.experiment import Experiment
    from flows.options import RunOptions
    from flows.runs import RunFolder

EXIT_CODES = {"ok": 0, "failed": 1, "partial": 3}
INTERRUPTED, TERMINATED = 130, 143
DISK_FULL = "the disk is full; free some space (`compactionrl clean` lists what can go) and run this again"
LOGGERS = ("compactionrl", "compaction", "rl", "evaluation", "tasks", "flows")
"""Prefect configures the root logger anew; these stay ours."""


class Terminated(SystemExit):
    """SIGTERM, as an exception that runs every `finally` on its way out."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


def run_flow(
    flow: Callable[[Experiment, RunOptions], dict[str, Any]],
    preset: str,
    overrides: Sequence[str] | None,
    flags: Mapping[str, Any],
    *,
    force: bool = False,
    dry_run: bool,
    json_output: bool,
    show: Callable[[Console, dict[str, Any], RunFolder], None] | None = None,
) -> int:
    """Run one flow and return the exit code.

    `flags`: settings that have an option of their own, None where it was not given; `overrides`, which come behind
    them, win. `show` prints the result, if another way than usual.
    """
    with guarded(json_output=json_output):
        from flows.options import RunOptions
        from tasks.progress import open_progress

        request = Request(flow.__name__, preset, tuple(overrides_of(**flags)), tuple(overrides or ()), force)
        experiment = request.experiment()
        home = Home.locate()
        if dry_run:
            with open_progress("log") as progress:
                plan = flow(experiment, RunOptions(home=home, progress=progress, force=force, dry_run=True))
            return _show_plan(plan, json_output)
        return _run(flow, experiment, request, home, json_output, show)
    raise AssertionError("guarded leaves by an exception")


@dataclass(frozen=True)
class Request:
    """What was asked for, on the command line or in Prefect's form."""

    flow: str
    preset: str
    flags: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    force: bool = False

    def experiment(self) -> Experiment:
        """Raises UserError: everything is checked before anything starts."""
        from flows.experiment import load_experiment
        from rl.engines.vllm_version import require_vllm
        from rl.pretrained import check_adapters_installed, check_described, find_config
        from tasks.real_tasks import open_dataset
        from tasks.stages import explained

        experiment = load_experiment(self.preset, [*self.flags, *self.overrides])
        collected_on = experiment.collect.dataset if experiment.collect else None
        for dataset in (experiment.evaluation.dataset, experiment.dataset, collected_on):
            if dataset is not None:
                open_dataset(dataset)
        if experiment.engine == "vllm" and not experiment.loop.vllm.servers:
            with explained("--engine vllm"):
                require_vllm()
        for data in experiment.sft.trajectories if experiment.sft else ():
            if not data.collected:
                data.files()
        if experiment.engine != "openai" and experiment.sft is not None and experiment.sft.model is not None:
            with explained("--model"):
                if (folder := find_config(experiment.sft.model)) is not None:
                    check_described(folder, experiment.longest_window, experiment.sampled_by)
        if experiment.trainer.lora or (experiment.sft and experiment.sft.sft.lora):
            with explained("lora"):
                check_adapters_installed()
        return experiment

    @property
    def command(self) -> list[str]:
        """The same on the command line."""
        settings = [word for setting in (*self.flags, *self.overrides) for word in ("--set", setting)]
        force = ["--force"] if self.force else []
        return ["compactionrl", self.flow, "--preset", portable_file(self.preset), *settings, *force]


def portable_file(name: str) -> str:
    """A preset or prompt pack as it can be named from another folder: the path of a file that is there, from the root;
    a name as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.suffix and path.is_file() else name


def portable_folder(name: str) -> str:
    """The same for a model or a set of tasks, which may be folders."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else portable_file(name)


def _show_plan(plan: dict[str, Any], json_output: bool) -> int:
    from flows.output import print_plan

    if json_output:
        print(json.dumps(plan, indent=2, allow_nan=False))
    else:
        print_plan(Console(), plan)
    return 0


def _run(
    flow: Callable[[Experiment, RunOptions], dict[str, Any]],
    experiment: Experiment,
    request: Request,
    home: Home,
    json_output: bool,
    show: Callable[[Console, dict[str, Any], RunFolder], None] | None,
) -> int:
    from flows.options import RunOptions
    from flows.output import print_result
    from flows.runs import create_run
    from flows.services import up
    from tasks.progress import open_progress

    home.create()
    run = create_run(home, experiment.name, _command_line(), experiment.config())
    with ExitStack() as stack:
        stack.enter_context(_recorded(run))
        stack.enter_context(_logging_to(run.logs / "run.log"))
        if json_output:
            stack.enter_context(_output_to(run.logs / "output.log"))
        progress = stack.enter_context(open_progress("log" if json_output else "auto"))
        services = stack.enter_context(up(home, announce=lambda services: progress.note(services.description)))
        _end_dead_runs(home, services.mlflow_uri, progress.note)
        options = RunOptions(
            home=home,
            progress=progress,
            force=request.force,
            services=services,
            run=run,
            preset=portable_file(request.preset),
            flags=request.flags,
            overrides=request.overrides,
        )
        result = flow(experiment, options)
        result |= {"services": services.description, "open": services.how_to_open(run.record)}
        run.update(status=result["status"])
    if json_output:
        print(json.dumps(result, indent=2, allow_nan=False), flush=True)
    else:
        (show or print_result)(Console(), result, run)
    return EXIT_CODES[result["status"]]


@contextmanager
def deployed_run(request: Request) -> Iterator[tuple[Experiment, RunOptions]]:
    """What a command opens for its flow, for a flow run that Prefect has started. Raises CommandError."""
    from flows.options import RunOptions
    from flows.runs import create_run
    from flows.services import services_of_a_deployment
    from tasks.progress import open_progress

    experiment = request.experiment()
    home = Home.locate()
    services = services_of_a_deployment(home)
    run = create_run(home, experiment.name, in_home(request.command), experiment.config())
    try:
        with _recorded(run), _logging_to(run.logs / "run.log"), open_progress("log") as progress:
            progress.note(services.description)
            _end_dead_runs(home, services.mlflow_uri, progress.note)
            yield experiment, RunOptions(home=home, progress=progress, force=request.force, services=services, run=run)
    except Exception as error:
        if is_disk_full(error):
            raise CommandError(DISK_FULL) from error
        raise


def _command_line() -> str:
    """The command as a person would type it again, from the same folder."""
    program = "compactionrl" if shutil.which("compactionrl") else sys.argv[0]
    return in_home([program, *sys.argv[1:]])


def in_home(command: Sequence[str]) -> str:
    home = os.environ.get("COMPACTIONRL_HOME")
    prefix = f"COMPACTIONRL_HOME={shlex.quote(home)} " if home else ""
    return prefix + shlex.join(command)


def _end_dead_runs(home: Home, mlflow_uri: str, note: Callable[[str], None]) -> None:
    from flows import runs
    from tasks import tracking

    for name in StandingRecord(home.root).stop_left_over():
        note(f"ended {name}, left over from an `up` that was killed")
    if dead := tracking.end_dead_runs(mlflow_uri):
        note(f"ended {len(dead)} MLflow runs whose process is gone: {', '.join(dead)}")
    runs.end_dead_runs(home)


@contextmanager
def guarded(*, json_output: bool = False) -> Iterator[None]:
    """The one place where errors become a message and an exit code.

    A user's mistake is one message; a bug's traceback goes to a file that the message names.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except CommandError as error:
        _fail(str(error), error.exit_code, json_output, error)
    except KeyboardInterrupt as error:
        _fail("interrupted; the same command again continues from here", INTERRUPTED, json_output, error)
    except Terminated as error:
        _fail("terminated; the same command again continues from here", TERMINATED, json_output, error)
    except (typer.Exit, typer.Abort, SystemExit):
        raise
    except Exception as error:
        if is_disk_full(error):
            _fail(DISK_FULL, 1, json_output, error)
        log = _write_traceback(error)
        _fail(f"{type(error).__name__}: {error}\nThis is a bug; the traceback is in {log}", 1, json_output, error)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _fail(message: str, code: int, json_output: bool, error: BaseException) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[red bold]error:[/] {escape(message)}", highlight=False)
    if json_output:
        print(json.dumps({"status": "failed", "error": message, "exit_code": code}, indent=2), flush=True)
    raise typer.Exit(code) from error


def _write_traceback(error: Exception) -> Path:
    home = Home.locate().root
    folder = home if home.is_dir() else Path.cwd()
    path = folder / "last-error.log"
    try:
        path.write_text("".join(traceback.format_exception(error)))
    except OSError:  # the disk may be what failed
        traceback.print_exception(error)
    return path


@contextmanager
def _recorded(run: RunFolder) -> Iterator[None]:
    """run.json says how the command ended, whatever ends it; what it starts meanwhile carries the run's name."""
    from flows.runs import RUN_VARIABLE

    os.environ[RUN_VARIABLE] = str(run.path)
    ending: dict[str, Any] = {}
    try:
        yield
    except Exception as error:
        ending = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        raise
    except BaseException:
        ending = {"status": "killed"}
        raise
    finally:
        with suppress(OSError):  # on a full disk the error that ends the run is the one to hear of
            run.update(**ending, ended=datetime.now(UTC).isoformat())


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
        handler.close()


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send what anything writes to stdout and stderr, subprocesses too, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with path.open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for saved, target in zip(kept, (1, 2), strict=True):
            os.dup2(saved, target)
            os.close(saved)
