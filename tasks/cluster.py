"""Ray for one run: started on first need, stopped if it is ours."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from tasks.errors import CommandError
from tasks.processes import ProcessId

OBJECT_STORE_BYTES = 150 * 2**20
START_ATTEMPTS = 3
RAY_FOLDERS = Path("/tmp/crl-ray-*")
"""Short: Ray puts Unix sockets below them, and their paths are limited to about a hundred characters."""
OWNER = "owner.json"
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}

logger = logging.getLogger(__name__)


class Cluster:
    """A Ray cluster that starts when `ensure` is first called: a run of cached stages never starts one.

    With `address` (RAY_ADDRESS) the user's cluster is joined and left running; else a local one is started. Ray's token
    authentication stays on, since its services listen beyond loopback.
    """

    def __init__(self, address: str | None, namespace: str, log_folder: Path) -> None:
        self._address, self._namespace, self._log_folder = address, namespace, log_folder
        self._temporary: str | None = None
        self._joined = False

    def ensure(self) -> None:
        """Raises CommandError where Ray cannot start or the user's cluster does not answer."""
        if self._joined:
            return
        os.environ["OMP_NUM_THREADS"] = "1"
        handlers = _signal_handlers()
        try:
            # Ray takes SIGTERM at the very start of ray.init: a run cancelled meanwhile would not clean up.
            with mock.patch("ray._private.utils.set_sigterm_handler"):
                if self._address is None:
                    self._start()
                else:
                    self._join()
        except Exception as error:
            raise CommandError(
                f"Ray did not start ({type(error).__name__}: {error}); free memory or wait until the machine is less "
                "busy, or set RAY_ADDRESS to a running cluster"
            ) from error
        finally:
            _restore(handlers)
        self._joined = True

    def _join(self) -> None:
        import ray

        _require_answer(self._address or "")
        ray.init(address=self._address, namespace=self._namespace, **QUIET)

    def _start(self) -> None:
        """Ray gives its processes half a minute, which is short on a busy machine: a second attempt finds them warm."""
        import ray

        for attempt in range(1, START_ATTEMPTS + 1):
            self._temporary = make_ray_folder(self._log_folder)
            try:
                ray.init(
                    address="local",
                    namespace=self._namespace,
                    num_cpus=os.cpu_count(),
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=self._temporary,
                    **QUIET,
                )
                return
            except Exception as error:
                end_processes_of(self._temporary)
                self._remove_temporary()
                if attempt == START_ATTEMPTS:
                    raise
                logger.warning("Ray did not start (%s); trying again", error)

    def close(self) -> None:
        """Leaves the cluster; ends a local one with all its processes and keeps its logs' last state in the run's."""
        if not self._joined:
            if self._temporary:  # a signal ended the start
                end_processes_of(self._temporary)
            self._remove_temporary()
            return
        import ray

        handlers = _signal_handlers()
        ray.shutdown()
        _restore(handlers)
        self._joined = False
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        if self._temporary is None:
            return
        logs = Path(self._temporary) / "session_latest" / "logs"
        if logs.is_dir():
            shutil.copytree(
                logs.resolve(),
                self._log_folder / "ray",
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("old", "events"),
            )
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary = None


def make_ray_folder(logs: Path) -> str:
    """A temporary folder for Ray that says whose it is: this process's, with its logs there."""
    folder = tempfile.mkdtemp(prefix=RAY_FOLDERS.name.rstrip("*"), dir=RAY_FOLDERS.parent)
    Path(folder, OWNER).write_text(json.dumps(asdict(ProcessId.current()) | {"logs": str(logs.resolve())}))
    return folder


def owner_of(folder: Path) -> tuple[ProcessId, Path] | None:
    """The process that started Ray in that folder, and where it keeps its logs; None where the folder does not say."""
    try:
        owner = json.loads((folder / OWNER).read_text())
        return ProcessId(owner["host"], owner["pid"], owner["created"]), Path(owner["logs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def end_processes_of(folder: str) -> None:
    """Ends children of this process that were started with `folder`: a start that failed leaves some behind."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(folder in argument for argument in child.cmdline()):
                child.kill()


def _require_answer(address: str) -> None:
    """Ray ends the whole process where nothing answers at `host:port`; this raises ConnectionError instead."""
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {address}: {error}") from error


def _signal_handlers() -> dict[int, object]:
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


def _restore(handlers: dict[int, object]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
