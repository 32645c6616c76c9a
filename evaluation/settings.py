"""Settings of real tasks: where they are, and the sandboxes they are solved in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compaction.settings import Settings

SandboxKind = Literal["docker", "local"]


class SandboxSettings(Settings):
    """The sandbox of one trial. What the task's own task.toml asks for comes first; these fill what it leaves open."""

    kind: SandboxKind = Field("docker", description="docker: a container; local: bubblewrap on this machine (Linux)")
    network: Literal["task", "none"] = Field("task", description="task: as the task asks; none: no network in any case")
    command_timeout: float = Field(120.0, gt=0, description="seconds that one command of the agent may take")
    output_bytes: int = Field(
        30_000, ge=200, description="bytes kept of a command's output: head and tail, the cut named"
    )
    cpus: float = Field(1.0, gt=0, description="CPUs where the task names none")
    memory_mb: int = Field(2_048, ge=16, description="memory in MiB where the task names none")
    pids: int = Field(512, ge=8, description="most processes at once")
    file_mb: int = Field(1_024, ge=1, description="largest single file in MiB; disk quotas proper need a special disk")
    max_deadline: float | None = Field(
        None, gt=0, description="seconds an agent may work on a task, where the task allows more"
    )
