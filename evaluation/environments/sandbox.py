"""What sandboxes of task folders have in common, whatever isolates them: sessions, limits, grading, evidence.

All blocking work of a sandbox runs in one thread of its own, one call after the other. A call that is cancelled ends
what it started; the next call comes after that.
"""

from __future__ import annotations

import asyncio
import logging
import tarfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import TypeVar

from compaction.protocols import EnvironmentFailure, Execution, InfrastructureError
from evaluation import verifier
from evaluation.environments.archives import pack_files, pack_folder, regular_files, unpack
from evaluation.environments.scripts import Ran, Script, Session
from evaluation.settings import SandboxSettings
from evaluation.tasksets.task_folder import HealthCheck, TaskFolder

log = logging.getLogger(__name__)

T = TypeVar("T")

DOWNLOAD_LIMIT = 10_000_000
"""Bytes of one download"""
STOP_SECONDS = 30.0
"""Taking a sandbox down may take this long; then it is left to whoever cleans up after dead processes"""


class Sandbox(ABC):
    """One task folder's sandbox for one rollout. Implements `compaction.protocols.Environment`.

    Commands run one after the other in a shell of their own each; the working directory and exported variables are
    kept between them, also after a command that failed or exited. Every method may raise EnvironmentFailure.
    """

    shell = "sh"
    """bash where the sandbox has it"""
    workdir = "/"

    def __init__(self, folder: TaskFolder, settings: SandboxSettings, evidence: Path | None) -> None:
        self.folder = folder
        self.settings = settings
        self.evidence = evidence
        self.interrupted = threading.Event()
        """Set when nobody waits for the running call any more"""
        self._session: Session | None = None
        self._stopped = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"sandbox-{folder.name}")

    # What each kind of sandbox does in its own way. Called in the sandbox's thread.

    @abstractmethod
    def open(self) -> None:
        """Starts the sandbox and sets `shell` and `workdir`. Raises EnvironmentFailure."""

    @abstractmethod
    def run(self, script: Script) -> Ran:
        """Runs a script until it ends, its time is up or the call is `interrupted`. Raises EnvironmentFailure."""

    @abstractmethod
    def put(self, archive: bytes) -> None:
        """Unpacks an archive at the root. Raises EnvironmentFailure."""

    @abstractmethod
    def get(self, path: str) -> Iterator[bytes]:
        """An archive of a file or folder. Raises EnvironmentFailure, or FileNotFoundError."""

    @abstractmethod
    def end_processes(self) -> None:
        """Ends everything that runs in the sandbox. Raises EnvironmentFailure."""

    @abstractmethod
    def remove(self) -> None:
        """Takes the sandbox away, also one that is half made. Raises EnvironmentFailure."""

    # The protocol

    async def start(self) -> None:
        """Raises EnvironmentFailure of class environment_start, environment_build or health_check."""
        await self._call(self.open)
        self._session = Session(self.workdir)
        if self.folder.healthcheck is not None:
            await self._wait_until_healthy(self.folder.healthcheck)

    async def execute(self, command: str) -> Execution:
        """Runs one command as the agent. What it left running in the background goes on, unless its time was up."""
        ran = await self._run(
            Script(
                command,
                self._started(),
                self.settings.command_timeout,
                user=self.folder.agent_user,
                keep=self.settings.output_bytes,
            )
        )
        self._session = ran.session or self._session
        return Execution(ran.output, ran.exit_code, ran.note)

    async def upload(self, path: str, content: bytes) -> None:
        """Writes a file; a relative path starts at the task's working directory."""
        await self._call(lambda: self.put(pack_files({self._path(path): content})))

    async def upload_folder(self, local: Path, target: str) -> None:
        """Writes a folder of this machine into the sandbox, readable by all."""
        await self._call(lambda: self.put(pack_folder(local, self._path(target))))

    async def download(self, path: str) -> bytes:
        """A file's content. Raises EnvironmentFailure where it is no plain file or larger than DOWNLOAD_LIMIT."""
        return await self._call(lambda: self._read(self._path(path)))

    async def download_folder(self, path: str, local: Path) -> None:
        """Writes the plain files below a folder of the sandbox to `local`, up to DOWNLOAD_LIMIT bytes in all."""
        await self._call(lambda: self._unpack(self._path(path), local))

    async def grade(self) -> float:
        """Raises VerifierError where the task's tests give no reward."""
        self._started()
        return await self._call(lambda: verifier.grade(self, self.folder, self.evidence))

    async def solve(self) -> Execution:
        """Runs the task's own solution, as its author shows that the task can be solved."""
        session = Session(self._started().folder)
        await self.upload_folder(self.folder.path / "solution", "/solution")
        seconds = self.folder.agent_timeout or self.settings.max_deadline or self.settings.command_timeout
        ran = await self._run(
            Script(
                f"{self.shell} /solution/solve.sh",
                session,
                seconds,
                environment=self.folder.solution_env,
                user=self.folder.agent_user,
                keep=self.settings.output_bytes,
            )
        )
        return Execution(ran.output, ran.exit_code, ran.note)

    async def stop(self) -> None:
        """Never raises and never takes longer than STOP_SECONDS."""
        if self._stopped:
            return
        self._stopped = True
        self._session = None
        # Not `_call`: a caller that is cancelled once more while this waits its turn must not take it back.
        removal = asyncio.wrap_future(self._thread.submit(self._removed))
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.shield(removal)
        except TimeoutError:
            log.warning("task %s: its sandbox is not gone after %g s; left behind", self.folder.name, STOP_SECONDS)
        except InfrastructureError as error:
            log.warning("task %s: its sandbox is left behind: %s", self.folder.name, error)
        finally:
            self._thread.shutdown(wait=False)

    # Inside

    def _started(self) -> Session:
        if self._session is None:
            raise EnvironmentFailure(f"task {self.folder.name}: its sandbox is not running; call start() first")
        return self._session

    def _removed(self) -> None:
        self.interrupted = threading.Event()
        self.remove()

    async def _call(self, work: Callable[[], T]) -> T:
        interrupted = threading.Event()

        def in_thread() -> T:
            self.interrupted = interrupted
            return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, in_thread)
        except asyncio.CancelledError:
            interrupted.set()
            raise

    async def _run(self, script: Script) -> Ran:
        return await self._call(lambda: self.run(script))

    def _path(self, path: str) -> str:
        return str(PurePosixPath(self.workdir) / path)

    def _read(self, path: str) -> bytes:
        try:
            with closing(regular_files(self.get(path))) as files:
                below, size, content = next(files)
                if size > DOWNLOAD_LIMIT:
                    raise EnvironmentFailure(f"{path} has {size:,} bytes; at most {DOWNLOAD_LIMIT:,} are downloaded")
                if not below.parts:
                    return content.read()
        except (FileNotFoundError, StopIteration, tarfile.TarError):
            pass
        raise EnvironmentFailure(f"{path} is no plain file in the sandbox")

    def _unpack(self, path: str, local: Path) -> None:
        try:
            unpack(self.get(path), local, DOWNLOAD_LIMIT)
        except (FileNotFoundError, tarfile.TarError) as error:
            raise EnvironmentFailure(f"{path} cannot be downloaded from the sandbox: {error}") from None

    async def _wait_until_healthy(self, check: HealthCheck) -> None:
        """As Docker does: failures within the start period do not count."""
        lenient_until = time.monotonic() + check.start_period
        failures = 0
        while True:
            ran = await self._run(Script(check.command, Session(self.workdir), check.timeout, keep=2_000))
            if ran.exit_code == 0:
                return
            starting = time.monotonic() < lenient_until
            failures += not starting
            if failures >= max(check.retries, 1):
                raise EnvironmentFailure(
                    f"task {self.folder.name}: health check `{check.command}` failed {failures} times, last with exit "
                    f"code {ran.exit_code}: {ran.output.strip()[-500:]} {ran.note}".rstrip(),
                    "health_check",
                )
            await asyncio.sleep(check.start_interval if starting else check.interval)
