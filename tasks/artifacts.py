"""What a run shows in Prefect: a progress bar per stage, links, the result table.

Everything goes out in a thread of its own: a slow or dead Prefect server neither holds a run up nor ends it.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from tasks.progress import ProgressSink, StageProgress, show_metrics

UPDATE_SECONDS = 5.0
CLOSE_SECONDS = 10.0
SYNC: dict[str, Any] = {"_sync": True}
"""Inside an async flow Prefect would else return coroutines, in other threads too"""
logger = logging.getLogger("compactionrl.artifacts")


class Publisher:
    """Sends artifacts of the flow run (and task run) from which they are published."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="prefect-artifacts", daemon=True)
        self._thread.start()

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[Publisher]:
        publisher = cls()
        try:
            yield publisher
        finally:
            publisher._jobs.put(None)
            publisher._thread.join(CLOSE_SECONDS)

    def link(self, key: str, url: str, text: str, description: str) -> None:
        from prefect.artifacts import create_link_artifact

        self.publish(partial(create_link_artifact, url, link_text=text, key=key, description=description, **SYNC))

    def markdown(self, key: str, markdown: str, description: str) -> None:
        from prefect.artifacts import create_markdown_artifact

        self.publish(partial(create_markdown_artifact, markdown, key=key, description=description, **SYNC))

    def publish(self, job: Callable[[], object]) -> None:
        self._jobs.put(partial(copy_context().run, job))

    def _work(self) -> None:
        while job := self._jobs.get():
            try:
                job()
            except Exception as error:
                logger.warning("Prefect took no artifact (%s: %s); the run goes on", type(error).__name__, error)
                return


class PrefectProgress:
    """Shows progress where `inner` does, and as progress artifacts."""

    def __init__(self, inner: ProgressSink, publisher: Publisher) -> None:
        self.inner, self.publisher = inner, publisher

    @contextmanager
    def stage(self, title: str, total: int | None, unit: str) -> Iterator[StageProgress]:
        with self.inner.stage(title, total, unit) as shown:
            if total is None:
                yield shown
                return
            bar = _Bar(self.publisher, shown, title, total, unit)
            yield bar
            bar.show(total)

    def note(self, text: str) -> None:
        self.inner.note(text)


class _Bar:
    def __init__(self, publisher: Publisher, shown: StageProgress, title: str, total: int, unit: str) -> None:
        self.publisher, self.shown, self.title, self.total, self.unit = publisher, shown, title, total, unit
        self.metrics = ""
        self._artifact: Any = None
        self.show(0)

    def update(self, done: int, metrics: Mapping[str, float | None] | None = None) -> None:
        self.shown.update(done, metrics)
        if metrics:
            self.metrics = show_metrics(metrics)
        if time.monotonic() - self._last >= UPDATE_SECONDS:
            self.show(done)

    def show(self, done: int) -> None:
        self._last = time.monotonic()
        text = f"{self.title}: {done} of {self.total} {self.unit} {self.metrics}".rstrip()
        self.publisher.publish(partial(self._send, 100 * done / self.total, text))

    def _send(self, percent: float, text: str) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        if self._artifact is None:
            self._artifact = create_progress_artifact(percent, artifact_key(self.title), text, **SYNC)
        else:
            update_progress_artifact(self._artifact, percent, text, **SYNC)


def artifact_key(text: str) -> str:
    """Prefect takes lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
