"""What Harbor's task.toml may say (schema 1.0 to 1.4), as models that know each field: read, or refused by name.

A field that these sandboxes cannot honour is refused with the reason, never ignored: a task that needs a GPU or a
second container would else be graded as if the agent had failed it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

NAME_PATTERN = r"^[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*$"
"""Harbor's own: org/name"""

_SIZES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
"""MiB per unit of the deprecated sizes"""


def _refused(why: str) -> AfterValidator:
    """A field that may stand there only empty, zero or false."""

    def check(value: Any) -> Any:
        if value:
            raise ValueError(f"not supported: {why}")
        return value

    return AfterValidator(check)


_ONE_STEP = _refused("a task here is one instruction and one verifier; make each step a task folder of its own")
_SHARED_VERIFIER = _refused("the verifier runs in the agent's sandbox; leave it out (environment_mode shared)")
_NO_GPU = _refused("these sandboxes have no accelerator; run the task with Harbor")
_NO_ALLOWLIST = _refused("a sandbox has the whole network or none; allowed: network_mode public or no-network")
_SAME_NETWORK = _refused("the network is one for agent and verifier; say it in [environment] network_mode")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Pause = Annotated[float, Field(ge=0, allow_inf_nan=False)]
User = Annotated[str | None, BeforeValidator(lambda user: str(user) if type(user) is int else user)]


def _mebibytes(size: Any) -> int | None:
    """MiB of `2G`, `512M`; a bare number is refused, as Harbor does, since its unit would be a guess."""
    if size is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG])", str(size).strip().upper())
    if found is None or int(float(found[1]) * _SIZES[found[2]]) < 1:
        raise ValueError('write a size such as "512M" or "2G", or better memory_mb and storage_mb in MiB')
    return int(float(found[1]) * _SIZES[found[2]])


OldSize = Annotated[int | None, BeforeValidator(_mebibytes)]


class Table(BaseModel):
    """Base of every table: unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Author(Table):
    name: str
    email: str | None = None


class TaskTable(Table):
    name: str
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    @field_validator("name")
    @classmethod
    def _is_org_and_name(cls, name: str) -> str:
        if not re.match(NAME_PATTERN, name) or ".." in name:
            raise ValueError("must be org/name, of letters, digits, dot, underscore and hyphen")
        return name


class Phase(Table):
    """What agent and verifier share."""

    user: User = None
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    """Allowed where it repeats the environment's: `TaskToml` compares"""
    allowed_hosts: Annotated[list[str] | None, _NO_ALLOWLIST] = None


class AgentTable(Phase):
    timeout_sec: Seconds | None = None


class VerifierTable(Phase):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Annotated[dict[str, Any] | None, _SHARED_VERIFIER] = None
    collect: Annotated[list[Any], _SHARED_VERIFIER] = []

    @field_validator("environment_mode")
    @classmethod
    def _is_shared(cls, mode: str | None) -> str | None:
        if mode == "separate":
            raise ValueError("not supported: the verifier runs in the agent's sandbox; allowed: shared")
        return mode


class SolutionTable(Table):
    env: dict[str, str] = {}


class HealthCheckTable(Table):
    command: str = Field(min_length=1)
    interval_sec: Pause = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Pause = 0.0
    start_interval_sec: Pause = 5.0
    retries: int = Field(3, ge=1)


class EnvironmentTable(Table):
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = Field(None, min_length=1)
    os: Literal["linux", "windows"] = "linux"
    cpus: float | None = Field(None, gt=0, allow_inf_nan=False)
    memory_mb: int | None = Field(None, gt=0)
    storage_mb: int | None = Field(None, gt=0)
    memory: OldSize = None
    storage: OldSize = None
    env: dict[str, str] = {}
    workdir: str | None = Field(None, pattern=r"^/")
    healthcheck: HealthCheckTable | None = None
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allow_internet: bool | None = None
    allowed_hosts: Annotated[list[str] | None, _NO_ALLOWLIST] = None
    gpus: Annotated[int | None, _NO_GPU] = None
    gpu_types: Annotated[list[str] | None, _NO_GPU] = None
    tpu: Annotated[dict[str, Any] | None, _NO_GPU] = None
    mcp_servers: Annotated[list[Any], _refused("the agent has a shell only; take the servers out")] = []
    skills_dir: Annotated[str | None, _refused("the agent reads no skills; write them into instruction.md")] = None

    @field_validator("os", mode="after")
    @classmethod
    def _is_linux(cls, system: str) -> str:
        if system != "linux":
            raise ValueError("not supported: these sandboxes run Linux; allowed: linux")
        return system

    @field_validator("network_mode")
    @classmethod
    def _is_all_or_nothing(cls, mode: str | None) -> str | None:
        if mode == "allowlist":
            raise ValueError("not supported: a sandbox has the whole network or none; allowed: public, no-network")
        return mode

    @model_validator(mode="after")
    def _spellings_agree(self) -> EnvironmentTable:
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            both = getattr(self, old), getattr(self, new)
            if None not in both and both[0] != both[1]:
                raise ValueError(f"{old} ({both[0]} MiB) and {new} ({both[1]} MiB) differ; keep {new}")
        if self.allow_internet is not None and self.network_mode is not None:
            old_mode = "public" if self.allow_internet else "no-network"
            if old_mode != self.network_mode:
                raise ValueError(
                    f"allow_internet={str(self.allow_internet).lower()} and network_mode={self.network_mode!r} differ; "
                    "keep network_mode"
                )
        return self

    @property
    def network(self) -> Literal["public", "no-network"]:
        """Public where the task says nothing: Harbor's default."""
        return "no-network" if self.network_mode == "no-network" or self.allow_internet is False else "public"


class Artifact(Table):
    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class TaskToml(Table):
    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = "1.4"
    version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] | None = None
    source: str | None = None
    artifacts: list[str | Artifact] = []
    task: TaskTable | None = None
    metadata: dict[str, Any] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    solution: SolutionTable = SolutionTable()
    environment: EnvironmentTable = EnvironmentTable()
    steps: Annotated[list[Any] | None, _ONE_STEP] = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None

    @field_validator("metadata")
    @classmethod
    def _max_turns_is_a_count(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        turns = metadata.get("max_turns")
        if turns is not None and (not isinstance(turns, int) or isinstance(turns, bool) or turns < 1):
            raise ValueError(f"max_turns is {turns!r}: must be a whole number of at least 1")
        return metadata

    @model_validator(mode="after")
    def _one_network(self) -> TaskToml:
        for name in ("agent", "verifier"):
            mode = getattr(self, name).network_mode
            if mode is not None and mode != self.environment.network:
                raise ValueError(
                    f"{name}.network_mode is {mode!r} and the environment's is {self.environment.network!r}: not "
                    "supported, the network is one for the whole trial; say it in [environment] network_mode only"
                )
        return self

    def notes(self) -> tuple[str, ...]:
        """What is honoured under an old name, or has no effect here."""
        environment = self.environment
        said = {
            "version is the old name of schema_version": self.version is not None,
            "environment.memory is the old name of memory_mb": environment.memory is not None,
            "environment.storage is the old name of storage_mb": environment.storage is not None,
            "environment.allow_internet is the old name of network_mode": environment.allow_internet is not None,
            "environment.storage_mb is enforced in the local sandbox only: a container's quota needs a special disk": (
                environment.storage_mb is not None or environment.storage is not None
            ),
            "multi_step_reward_strategy has no effect on a task without steps": (
                self.multi_step_reward_strategy is not None
            ),
        }
        return (*(note for note, applies in said.items() if applies), *self._artifact_notes())

    def _artifact_notes(self) -> Iterator[str]:
        for artifact in self.artifacts:
            source = artifact if isinstance(artifact, str) else artifact.source
            if source.rstrip("/") != "/logs/artifacts" and not source.startswith("/logs/artifacts/"):
                yield f"artifacts: {source} is not kept, only what lies below /logs/artifacts is"


def describe_mistakes(error: ValidationError) -> list[str]:
    """One line per mistake: the field with its tables, its value, what is allowed."""
    return [_describe(dict(problem)) for problem in error.errors()]


def _describe(problem: dict[str, Any]) -> str:
    where = tuple(part for part in problem["loc"] if not str(part).startswith(("function-", "str", "int", "Artifact")))
    field = ".".join(str(part) for part in where)
    if problem["type"] == "extra_forbidden":
        allowed = _keys_at(where[:-1])
        near = difflib.get_close_matches(str(where[-1]), allowed, n=1, cutoff=0.5)
        hint = f"; did you mean {'.'.join([*map(str, where[:-1]), near[0]])}?" if near else ""
        return f"unknown key {field}{hint} (allowed: {', '.join(allowed)})"
    if problem["type"] == "missing":
        return f"{field} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if not field:
        return message
    if problem["type"] == "value_error" and isinstance(problem["input"], dict):
        return f"{field}: {message}"
    if "env" in where:  # may hold a secret
        return f"{field}: {message} (the value is not shown)"
    return f"{field} is {_shown(problem['input'])}: {message[0].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _keys_at(where: tuple[Any, ...]) -> list[str]:
    """The keys of the table that a path of keys leads to."""
    model: type[BaseModel] = TaskToml
    for part in where:
        if isinstance(part, str):
            model = next(_models(model.model_fields[part].annotation))
    return sorted(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
