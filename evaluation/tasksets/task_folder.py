"""Task folders in Harbor's format (task.toml schema 1.0 to 1.4): what is on disk, checked, and as tasks to solve."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from compaction.protocols import Environment, EnvironmentFailure, TaskLimits
from evaluation.settings import SandboxSettings
from evaluation.tasksets.task_toml import HealthCheckTable, TaskToml, describe_mistakes

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
"""Harbor's: a value that is wholly ${VAR} or ${VAR:-default}"""


class TaskFolderError(ValueError):
    """A task folder that cannot be run as it stands; the message names the folder, the field and what to do."""


@dataclass(frozen=True)
class HealthCheck:
    """`[environment.healthcheck]`: a command that must succeed before the agent starts. All times in seconds."""

    command: str
    interval: float = 5.0
    timeout: float = 30.0
    start_period: float = 0.0
    start_interval: float = 5.0
    retries: int = 3


@dataclass(frozen=True)
class TaskFolder:
    """One task as its folder describes it. Times in seconds, sizes in MiB; None where the task leaves it open."""

    path: Path
    """The folder, absolute; below it environment/, tests/ and perhaps solution/"""
    name: str
    instruction: str
    checksum: str
    """Digest of every file: a trial belongs to this content"""
    docker_image: str | None = None
    """A ready image; else environment/Dockerfile is built"""
    workdir: str | None = None
    """`[environment] workdir`; None: the image's own WORKDIR"""
    env: dict[str, str] = field(default_factory=dict, repr=False)
    """As written: `${VAR}` is read from this machine's environment at use, by `resolve_env`; so in the other two"""
    network: Literal["public", "no-network"] = "public"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    build_timeout: float = 600.0
    agent_timeout: float | None = None
    agent_user: str | None = None
    verifier_timeout: float = 600.0
    verifier_user: str | None = None
    verifier_env: dict[str, str] = field(default_factory=dict, repr=False)
    solution_env: dict[str, str] = field(default_factory=dict, repr=False)
    healthcheck: HealthCheck | None = None
    max_turns: int | None = None
    """`[metadata] max_turns`"""
    notes: tuple[str, ...] = ()
    """What a reader should know: deprecated spellings, settings without effect here"""

    @property
    def dockerfile(self) -> Path:
        return self.path / "environment" / "Dockerfile"


@dataclass(frozen=True)
class FolderTask:
    """A task folder together with the sandbox it is solved in. Implements `compaction.protocols.Task`."""

    folder: TaskFolder
    sandbox: SandboxSettings
    evidence: Path | None = None
    """Where the verifier's output and what the agent left in /logs are kept; None: nowhere"""

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def instruction(self) -> str:
        return self.folder.instruction

    @property
    def limits(self) -> TaskLimits:
        timeouts = [t for t in (self.folder.agent_timeout, self.sandbox.max_deadline) if t is not None]
        return TaskLimits(self.folder.max_turns, min(timeouts) if timeouts else None)

    def open(self) -> Environment:
        """Raises EnvironmentFailure where a variable that the task asks for is not set on this machine."""
        folder = _with_values(self.folder)
        if self.sandbox.kind == "docker":
            from evaluation.environments.docker import DockerEnvironment

            return DockerEnvironment(folder, self.sandbox, self.evidence)
        from evaluation.environments.bubblewrap import LocalEnvironment

        return LocalEnvironment(folder, self.sandbox, self.evidence)


def load_task_folder(path: str | Path) -> TaskFolder:
    """Reads and checks one task folder.

    Raises TaskFolderError for whatever is missing, malformed or not supported. Windows line ends and a byte order
    mark are read past in task.toml and instruction.md; in a shell script they are refused, for it would not run.
    """
    root = Path(path).absolute()
    if not root.is_dir():
        raise TaskFolderError(f"task folder {root} {'is a file' if root.exists() else 'does not exist'}")
    toml = _read_toml(root)
    _check_files(root, toml)
    environment, check = toml.environment, toml.environment.healthcheck
    return TaskFolder(
        path=root,
        name=toml.task.name.split("/")[-1] if toml.task else root.name,
        instruction=_read_instruction(root),
        checksum=folder_checksum(root),
        docker_image=environment.docker_image,
        workdir=environment.workdir,
        env=environment.env,
        network=environment.network,
        cpus=environment.cpus,
        memory_mb=environment.memory_mb or environment.memory,
        storage_mb=environment.storage_mb or environment.storage,
        build_timeout=environment.build_timeout_sec,
        agent_timeout=toml.agent.timeout_sec,
        agent_user=toml.agent.user,
        verifier_timeout=toml.verifier.timeout_sec,
        verifier_user=toml.verifier.user,
        verifier_env=toml.verifier.env,
        solution_env=toml.solution.env,
        healthcheck=_health_check(check) if check else None,
        max_turns=toml.metadata.get("max_turns"),
        notes=toml.notes(),
    )


def resolve_env(values: Mapping[str, str], where: str) -> dict[str, str]:
    """Variables as a process gets them: `${VAR}` and `${VAR:-default}` from this machine's environment, like Harbor.

    Raises TaskFolderError naming each that is not set. `where` says whose variables they are.
    """
    resolved = {name: _value(value) for name, value in values.items()}
    missing = [f"{values[name]} for {name}" for name, value in resolved.items() if value is None]
    if missing:
        raise TaskFolderError(f"{where}: not set in this machine's environment: {', '.join(missing)}; export it")
    return {name: value for name, value in resolved.items() if value is not None}


def _value(value: str) -> str | None:
    """None where the value is a `${VAR}` that is not set."""
    template = _TEMPLATE.fullmatch(value)
    return value if template is None else os.environ.get(template[1], template[2])


def _with_values(folder: TaskFolder) -> TaskFolder:
    """The folder with its variables as processes get them. What only the solution asks for may stay as it is written:
    an agent's trial does not need it."""
    try:
        return replace(
            folder,
            env=resolve_env(folder.env, f"task {folder.name}: environment.env"),
            verifier_env=resolve_env(folder.verifier_env, f"task {folder.name}: verifier.env"),
            solution_env={name: _value(value) or value for name, value in folder.solution_env.items()},
        )
    except TaskFolderError as error:
        raise EnvironmentFailure(str(error), "environment_start") from None


def folder_checksum(root: Path) -> str:
    """Digest over the relative paths and contents of a folder's files; modes and times do not count."""
    digest = hashlib.sha256()
    for file in sorted(_files(root), key=lambda file: file.relative_to(root).as_posix()):
        content = str(file.readlink()).encode() if file.is_symlink() else file.read_bytes()
        name = file.relative_to(root).as_posix().encode(errors="surrogateescape")
        digest.update(b"%d %d " % (len(name), len(content)) + name + content)
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    """All but what Python leaves beside a module when it is installed or run."""
    for path in root.rglob("*"):
        if (path.is_file() or path.is_symlink()) and "__pycache__" not in path.relative_to(root).parts:
            yield path


def _read_text(root: Path, name: str) -> str:
    file = root / name
    if not file.is_file():
        raise TaskFolderError(f"task folder {root}: {name} is missing")
    try:
        return file.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise TaskFolderError(f"task folder {root}: {name} is not UTF-8 (byte {error.start})") from None


def _read_toml(root: Path) -> TaskToml:
    try:
        return TaskToml.model_validate(tomllib.loads(_read_text(root, "task.toml")))
    except tomllib.TOMLDecodeError as error:
        raise TaskFolderError(f"task folder {root}: task.toml is not TOML: {error}") from None
    except ValidationError as error:
        raise TaskFolderError(f"task folder {root}: task.toml: {'; '.join(describe_mistakes(error))}") from None


def _read_instruction(root: Path) -> str:
    text = _read_text(root, "instruction.md")
    if not text.strip():
        raise TaskFolderError(f"task folder {root}: instruction.md is empty; write what the agent is to do")
    return text


def _check_files(root: Path, toml: TaskToml) -> None:
    """The parts beside task.toml: those that must be there, and those that ask for what is not supported."""
    environment = root / "environment"
    unsupported = {
        "steps": "a task with steps is not supported; make each step a task folder of its own",
        "trajectory.json": "an agent that starts from an earlier trajectory is not supported; take the file out",
        **{
            f"environment/{name}": "several containers are not supported; describe one in environment/Dockerfile"
            for name in ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
        },
    }
    for name, why in unsupported.items():
        if (root / name).exists():
            raise TaskFolderError(f"task folder {root}: {name}: {why}")
    if toml.environment.docker_image is None and not (environment / "Dockerfile").is_file():
        what = "environment/Dockerfile" if environment.is_dir() else "the folder environment/ with a Dockerfile"
        raise TaskFolderError(f"task folder {root}: {what} is missing, and task.toml names no environment.docker_image")
    _read_text(root, "tests/test.sh")
    for name in ("tests/test.sh", "solution/solve.sh"):
        script = root / name
        if script.is_file() and (b"\r\n" in (content := script.read_bytes()) or content.startswith(b"\xef\xbb\xbf")):
            raise TaskFolderError(
                f"task folder {root}: {name} has Windows line ends or a byte order mark, with which no shell runs it; "
                f"convert it: sed -i '1s/^\\xef\\xbb\\xbf//; s/\\r$//' {name}"
            )


def _health_check(table: HealthCheckTable) -> HealthCheck:
    return HealthCheck(
        command=table.command,
        interval=table.interval_sec,
        timeout=table.timeout_sec,
        start_period=table.start_period_sec,
        start_interval=table.start_interval_sec,
        retries=table.retries,
    )
