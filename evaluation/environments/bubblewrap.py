"""Task folders on this machine without an image: bubblewrap shows the machine's own tools, read-only, and a private
folder per trial in which the task's files are. Linux only; there is never a network.

Every command gets a sandbox of its own over the same folders. When the command ends, so does everything that it left
running: a server must be started and used in one command.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

from compaction.protocols import EnvironmentFailure
from evaluation.environments.bwrap_process import BwrapProcess
from evaluation.environments.cgroups import ControlGroups, remove_groups
from evaluation.environments.dockerfile import Layout, lay_out
from evaluation.environments.owners import Owner
from evaluation.environments.sandbox import Sandbox
from evaluation.environments.scripts import Exchange, Ran, Script, Session

log = logging.getLogger(__name__)

_PREFIX = "compactionrl-local."
_HOME = "/agent"
_PRIVATE = ("agent", "logs", "solution", "tests", "tmp")
"""Folders at the root that every sandbox has for itself"""
_TOOLS = ("bin", "lib", "lib32", "lib64", "libx32", "opt", "sbin", "usr")
_ETC = (
    "alternatives ca-certificates crypto-policies debian_version gitconfig ld.so.cache ld.so.conf ld.so.conf.d "
    "localtime magic mime.types nsswitch.conf os-release pki/tls/certs protocols python3 services ssl/certs "
    "ssl/openssl.cnf terminfo"
).split()
"""Of /etc, what tools need and what is no secret"""
_OWN_ETC = {
    "group": "root:x:0:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "passwd": f"root:x:0:0:root:{_HOME}:/bin/sh\n",
}
_ROOT = (None, "root", "0")
_ENDED = "everything that the command started was ended"
_MIB = 1 << 20
_STORAGE_MIB = 10_240
"""What a sandbox may write where the task names no storage_mb; Harbor's default"""
_FILE_SECONDS = 60.0

_reaped = False
_reaping = threading.Lock()


class LocalEnvironment(Sandbox):
    """A private folder below the system's temporary one, and bubblewrap over it for each command."""

    _folder: Path | None = None
    _groups: ControlGroups | None = None

    def open(self) -> None:
        self._check()
        _reap_once()
        try:
            layout = self._make_folder()
        except OSError as error:
            raise EnvironmentFailure(f"cannot make a private folder: {error}", "environment_start") from None
        self.workdir = self.folder.workdir or str(layout.workdir)
        self._environment = layout.environment | self.folder.env
        self.shell = "bash" if shutil.which("bash") else "sh"
        if self.folder.network == "public":
            log.info("task %s may use the network; --env local has none", self.folder.name)
        ran = self.run(Script("exit 0", Session("/"), _FILE_SECONDS))
        if ran.exit_code:
            raise EnvironmentFailure(
                f"bubblewrap does not work here: {ran.output}; use --env docker", "environment_start"
            )

    def run(self, script: Script) -> Ran:
        exchange = Exchange(script)
        environment = {} if script.session.exports is not None else self._environment | dict(script.environment)
        process = self._launch(exchange.arguments(self.shell), exchange.payload, environment)
        free = shutil.disk_usage(self._files).free
        deadline = time.monotonic() + script.seconds
        stop = process.exchange(exchange, deadline, self.interrupted, lambda: self._is_too_large(free))
        code = process.end(now=bool(stop))
        if stop == "disk":
            return Ran(exchange.output(), 137, note=f"stopped: over {self._storage_mib:,} MiB on disk; {_ENDED}")
        if stop == "time":
            note = f"stopped after {script.seconds:g} s; {_ENDED}"
            return Ran(exchange.output(), 137, note=note, timed_out=True)
        if not exchange.started:
            return Ran(exchange.complaint(), code or 126, note="the sandbox could not run it")
        code, session = exchange.report() or (code, None)
        note = f"killed, perhaps for more than {self._memory // _MIB:,} MiB of memory" if code == 137 else ""
        return Ran(exchange.output(), code, session, note)

    def put(self, archive: bytes) -> None:
        command = ["tar", "-x", "--no-same-owner", "-f", "-", "-C", "/"]
        code, complaint = self._launch(command, archive, self._environment).complete(_FILE_SECONDS)
        if code:
            raise EnvironmentFailure(f"cannot write to the sandbox: {complaint or f'exit code {code}'}")

    def get(self, path: str) -> Iterator[bytes]:
        top = PurePosixPath(path)
        archive = '[ -e "$1/$2" ] || exit; exec tar -c -f - -C "$1" -- "$2" 2>/dev/null'
        command = ["sh", "-c", archive, "sh", str(top.parent), top.name or "."]
        chunks = self._launch(command, b"", self._environment).chunks()
        first = next(chunks, b"")
        if not first:
            raise FileNotFoundError(path)
        return _joined(first, chunks)

    def end_processes(self) -> None:
        """Nothing outlives its command."""

    def remove(self) -> None:
        if self._groups is not None:
            self._groups.remove()
        if self._folder is not None:
            try:
                _remove_tree(self._folder)
            except OSError as error:
                raise EnvironmentFailure(f"{self._folder} cannot be removed: {error}") from None

    @property
    def _files(self) -> Path:
        assert self._folder is not None
        return self._folder / "files"

    @property
    def _memory(self) -> int:
        return (self.folder.memory_mb or self.settings.memory_mb) * _MIB

    @property
    def _storage_mib(self) -> int:
        return self.folder.storage_mb or _STORAGE_MIB

    def _check(self) -> None:
        """Raises EnvironmentFailure for a machine or a task that needs a container."""
        why = ""
        if sys.platform != "linux":
            why = f"--env local needs Linux, this is {sys.platform}"
        elif missing := next((tool for tool in ("bwrap", "tar") if shutil.which(tool) is None), None):
            why = f"--env local needs {missing}" + (" (install bubblewrap)" if missing == "bwrap" else "")
        elif self.folder.docker_image is not None:
            why = f"task {self.folder.name} runs in image {self.folder.docker_image}"
        elif user := next((u for u in (self.folder.agent_user, self.folder.verifier_user) if u not in _ROOT), None):
            why = f"task {self.folder.name} asks for user {user}"
        elif not self.folder.dockerfile.is_file():
            why = f"task {self.folder.name} has no environment/Dockerfile in {self.folder.path}"
        if why:
            raise EnvironmentFailure(f"{why}; use --env docker", "environment_start")

    def _make_folder(self) -> Layout:
        """The private folder, its control groups, and the task's files in it. Raises EnvironmentFailure."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{Owner.current()}."))
        cpus = self.folder.cpus or self.settings.cpus
        self._groups = ControlGroups(self._folder.name, self._memory, self.settings.pids, cpus)
        for name in _PRIVATE:
            (self._files / name).mkdir(parents=True)
        for name in ("agent", "verifier", "artifacts"):
            (self._files / "logs" / name).mkdir()
        for name, text in _OWN_ETC.items():
            (self._folder / name).write_text(text)
        layout = Layout(self._place, self._own_environment())
        lay_out(self.folder.dockerfile, layout)
        workdir = self.folder.workdir
        if workdir is not None and not (self._files / workdir.lstrip("/")).is_dir():
            raise EnvironmentFailure(
                f"task {self.folder.name}: its workdir {workdir} is not made by its Dockerfile", "environment_start"
            )
        return layout

    def _own_environment(self) -> dict[str, str]:
        python = dict.fromkeys(f"{prefix}/bin" for prefix in (sys.prefix, sys.base_prefix))
        system = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")
        return {"PATH": ":".join([*python, *system]), "HOME": _HOME, "LANG": "C.UTF-8"}

    def _place(self, path: PurePosixPath) -> Path:
        """Where a path of the sandbox is on this machine, its folder at the root private from now on."""
        name = path.parts[1] if len(path.parts) > 1 else ""
        if not name or name in _reserved():
            raise EnvironmentFailure(
                f"task {self.folder.name} puts files at {path}, where --env local shows this machine's own; "
                "use --env docker",
                "environment_start",
            )
        (self._files / name).mkdir(exist_ok=True)
        place = self._files / path.relative_to("/")
        if not place.resolve().is_relative_to(self._files.resolve()):
            raise EnvironmentFailure(f"task {self.folder.name}: {path} leads out of the sandbox", "environment_start")
        return place

    def _launch(self, command: list[str], source: bytes, environment: Mapping[str, str]) -> BwrapProcess:
        """Starts a command that reads `source`. Raises EnvironmentFailure."""
        assert self._groups is not None
        prelude = [f"echo 0 >{shlex.quote(str(folder))}/cgroup.procs" for folder in self._groups.folders]
        prelude += ["ulimit -c 0", f"ulimit -f {self.settings.file_mb * _MIB // 512}"]
        if not self._groups.limit("memory"):  # of each process then
            prelude.append(f"ulimit -v {self._memory // 1024}")
        if not self._groups.limit("pids"):  # older kernels count all processes of the user
            most = self.settings.pids + _processes_of_user()
            prelude.append(f"ulimit -u {most} 2>/dev/null || ulimit -p {most}")
        return BwrapProcess(prelude, [*self._view(), *_settings(environment), "--", *command], source)

    def _view(self) -> list[str]:
        """What a command sees of the machine."""
        assert self._folder is not None
        words = "--unshare-all --die-with-parent --new-session --cap-drop ALL --hostname sandbox --clearenv".split()
        words += ["--uid", "0", "--gid", "0", "--proc", "/proc", "--dev", "/dev"]
        for name in _TOOLS:
            path = Path("/", name)
            if path.is_symlink():
                words += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                words += ["--ro-bind", str(path), str(path)]
        for name in _ETC:
            words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for name in _OWN_ETC:
            words += ["--ro-bind", str(self._folder / name), f"/etc/{name}"]
        for folder in sorted(self._files.iterdir()):
            words += ["--bind", str(folder), f"/{folder.name}"]
        for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)):  # behind the private /tmp, where it may lie
            if not prefix.startswith("/usr"):
                words += ["--ro-bind", prefix, prefix]
        return [*words, "--remount-ro", "/", "--chdir", "/"]

    def _is_too_large(self, free_before: int) -> bool:
        """Whether the sandbox holds too much. Counting takes time, so first: is the disk much fuller than before?"""
        limit = self._storage_mib * _MIB
        if free_before - shutil.disk_usage(self._files).free < limit // 10:
            return False
        return _size_of(self._files) > limit


def _joined(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _settings(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        yield from ("--setenv", name, value)


def _reserved() -> set[str]:
    """Folders at the root in which the machine's own things are shown."""
    pythons = (Path(prefix).parts[1] for prefix in (sys.prefix, sys.base_prefix))
    return {*_TOOLS, "etc", "proc", "dev", "sys", "run", *pythons} - {"tmp"}


def _processes_of_user() -> int:
    return sum(process.info["uids"].real == os.getuid() for process in psutil.process_iter(["uids"]))


def _size_of(folder: Path) -> int:
    """Bytes on disk."""
    size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(root, name)).st_blocks * 512
    return size


def _remove_tree(folder: Path) -> None:
    """Also where an agent took its folders' permissions away. Nothing runs in the sandbox any more."""
    try:
        shutil.rmtree(folder)
    except PermissionError:
        for root, names, _ in os.walk(folder):
            for name in names:
                path = os.path.join(root, name)
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
        shutil.rmtree(folder)


def reap_dead_folders() -> None:
    """Removes what local sandboxes of processes of this host that are gone left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = Owner.parse(folder.name.removeprefix(_PREFIX).rpartition(".")[0])
        if owner is not None and owner.is_dead():
            with suppress(OSError):  # another user's
                remove_groups(folder.name)
                _remove_tree(folder)
                log.info("removed %s of process %s, which is gone", folder, owner.pid)


def _reap_once() -> None:
    """At this process's first start."""
    global _reaped
    with _reaping:
        if not _reaped:
            _reaped = True
            reap_dead_folders()
