"""Task folders in Harbor's format (task.toml schema 1.0 to 1.4): what is on disk, checked, and as tasks to solve."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compaction.protocols import Environment, TaskLimits
from evaluation.settings import SandboxSettings


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
    env: dict[str, str] = field(default_factory=dict)
    network: Literal["public", "no-network"] = "public"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    build_timeout: float = 600.0
    agent_timeout: float | None = None
    agent_user: str | None = None
    verifier_timeout: float = 600.0
    verifier_user: str | None = None
    verifier_env: dict[str, str] = field(default_factory=dict)
    solution_env: dict[str, str] = field(default_factory=dict)
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
        if self.sandbox.kind == "docker":
            from evaluation.environments.docker import DockerEnvironment

            return DockerEnvironment(self.folder, self.sandbox, self.evidence)
        from evaluation.environments.bubblewrap import LocalEnvironment

        return LocalEnvironment(self.folder, self.sandbox, self.evidence)
