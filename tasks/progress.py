"""Progress of a run: live bars on a terminal, timed lines elsewhere, nothing but the log with `--json`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_SECONDS = 10.0
"""At most one plain line per stage in this time; the first and the last are always written."""
logger = logging.getLogger("compactionrl.progress")


class StageProgress(Protocol):
    """Progress of one stage."""

    def update(self, done: int, metrics: Mapping[str, float | None] | None = None) -> None:
        """`done` of the stage's total are finished; `metrics` are the newest values worth a look."""
        ...


class ProgressSink(Protocol):
    """Where progress is shown."""

    def stage(self, title: str, total: int | None, unit: str) -> AbstractContextManager[StageProgress]:
        """Use as `with sink.stage("ppo compactionrl/seed 0", 40, "updates") as progress: …`; total None = unknown."""
        ...

    def note(self, text: str) -> None:
        """One line that stays, such as a reused stage or a wait."""
        ...


@contextmanager
def open_progress(mode: Literal["auto", "log"], console: Console | None = None) -> Iterator[ProgressSink]:
    """`auto` shows bars on a terminal and plain lines elsewhere; `log` writes to the log only."""
    if mode == "log":
        yield _LineSink(logger.info)
        return
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _LineSink(lambda text: print(text, file=sys.stderr, flush=True))
        return
    with _bars(console) as progress:
        yield _LiveSink(progress)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[metrics]}"),
        console=console,
        refresh_per_second=4,
    )


class _LiveSink:
    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    @contextmanager
    def stage(self, title: str, total: int | None, unit: str) -> Iterator[StageProgress]:
        task = self.progress.add_task(escape(title), total=total, rate="", metrics="")
        started = time.monotonic()
        stage = _LiveStage(self.progress, task, unit)
        try:
            yield stage
        except BaseException as error:
            self.progress.console.print(f"[red]✗[/] {escape(title)} · {_ended_by(error)}")
            raise
        else:
            seconds = time.monotonic() - started
            self.progress.console.print(f"[green]✓[/] {escape(title)} · {seconds:.0f} s [dim]{escape(stage.shown)}")
        finally:
            self.progress.remove_task(task)

    def note(self, text: str) -> None:
        self.progress.console.print(f"[dim]·[/] {escape(text)}")


class _LiveStage:
    def __init__(self, progress: Progress, task: TaskID, unit: str) -> None:
        self.progress, self.task, self.unit = progress, task, unit
        self.shown = ""

    def update(self, done: int, metrics: Mapping[str, float | None] | None = None) -> None:
        if metrics:
            self.shown = show_metrics(metrics)
        speed = self.progress.tasks[self.progress.task_ids.index(self.task)].speed
        rate = f"{speed:.2f} {self.unit}/s" if speed else ""
        self.progress.update(self.task, completed=done, rate=rate, metrics=escape(self.shown))


class _LineSink:
    def __init__(self, write: LineWriter) -> None:
        self.write = write

    @contextmanager
    def stage(self, title: str, total: int | None, unit: str) -> Iterator[StageProgress]:
        self.write(f"{_clock()} {title}: started")
        stage = _LineStage(self.write, title, total, unit)
        try:
            yield stage
        except BaseException as error:
            self.write(f"{_clock()} {title}: {_ended_by(error)} after {stage.seconds:.0f} s")
            raise
        self.write(f"{_clock()} {title}: done in {stage.seconds:.0f} s {stage.shown}".rstrip())

    def note(self, text: str) -> None:
        self.write(f"{_clock()} {text}")


class _LineStage:
    def __init__(self, write: LineWriter, title: str, total: int | None, unit: str) -> None:
        self.write, self.title, self.total, self.unit = write, title, total, unit
        self.started = self.last_line = time.monotonic()
        self.shown = ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def update(self, done: int, metrics: Mapping[str, float | None] | None = None) -> None:
        if metrics:
            self.shown = show_metrics(metrics)
        now = time.monotonic()
        if now - self.last_line < LINE_SECONDS:
            return
        self.last_line = now
        of_total = f"/{self.total}" if self.total else ""
        left = f", {self.seconds / done * (self.total - done):.0f} s left" if self.total and done else ""
        rate = f"{done / self.seconds:.2f} {self.unit}/s"
        self.write(f"{_clock()} {self.title}: {done}{of_total} {self.unit} ({rate}{left}) {self.shown}".rstrip())


class LineWriter(Protocol):
    def __call__(self, text: str, /) -> None: ...


def show_metrics(metrics: Mapping[str, float | None]) -> str:
    """`reward 0.512 · kl 0.0031`: the names without their group."""
    return " · ".join(f"{name.rpartition('/')[2]} {value:.3g}" for name, value in metrics.items() if value is not None)


def _ended_by(error: BaseException) -> str:
    """What failed is told where the command ends; Ctrl-C, TERM and a cancelled flow run are no failures."""
    return "failed" if isinstance(error, Exception) else "interrupted"


def _clock() -> str:
    return time.strftime("%H:%M:%S")
