"""Settings of real tasks: where they are, and the sandboxes they are solved in."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from compaction.settings import Settings

SandboxKind = Literal["docker", "local"]
Globs = Annotated[tuple[str, ...], BeforeValidator(lambda v: v.split(",") if isinstance(v, str) else v)]
"""`a*,b*` as people write it on a command line"""


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


class DatasetSettings(Settings):
    """Real tasks to solve: task folders in Harbor's format, and the sandbox they are solved in."""

    path: str = Field(description="bench12, a folder of task folders, a list file, or registry.json[:NAME[@VERSION]]")
    include: Globs = Field((), description="globs on task ids; none = all")
    exclude: Globs = Field((), description="globs on task ids that are left out")
    limit: int | None = Field(None, ge=1, description="most tasks")
    sample_seed: int | None = Field(None, description="draws the `limit` tasks at random under this seed")
    sandbox: SandboxSettings = SandboxSettings()


class JobSettings(Settings):
    """How the trials on real tasks are run. Nothing here changes a result."""

    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="folder below jobs/; a name of your own refuses other settings than it was begun with",
    )
    concurrency: int = Field(4, ge=1, description="trials at once")
    attempts: int = Field(3, ge=1, description="tries of a trial that infrastructure failed, per command")
    max_cost: float | None = Field(None, gt=0, description="US dollars this command may spend; needs prices")
    max_tokens: int | None = Field(None, ge=1, description="prompt and sampled tokens this command may spend")
