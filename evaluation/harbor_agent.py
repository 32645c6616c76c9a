"""Our agent inside Harbor: `harbor run --agent-import-path evaluation.harbor_agent:CompactionAgent`.

Harbor starts the container and grades; the agent brings the window, its compactions and any OpenAI-compatible endpoint.
Needs Python 3.12 or newer, as Harbor does (`pip install 'compactionrl[harbor]'`). Example:

    harbor run -p tasks/ --agent-import-path evaluation.harbor_agent:CompactionAgent -m my-model \\
        --ak api_base=http://localhost:8000/v1 --ak window=32768 --ak cap=3 --ak keep_recent=2

Every field of EndpointSettings, AgentSettings and CompactionSettings is an agent option (`--ak NAME=VALUE`).
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harbor import AgentContext, BaseAgent, BaseEnvironment
from harbor.agents.capabilities import AgentCapabilities

from compaction.agent import run_rollout
from compaction.atif import atif_trajectory, write_atif
from compaction.engines.endpoint_settings import EndpointSettings
from compaction.engines.openai import OpenAIEngine
from compaction.engines.preflight import check_window, preflight
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import endpoint_renderer
from compaction.protocols import Environment, EnvironmentFailure, Execution, InfrastructureError, TaskLimits
from compaction.rollout import Rollout
from compaction.settings import AgentSettings, CompactionSettings
from evaluation.environments.output import ClippedOutput
from evaluation.settings import SandboxSettings

SESSION = "/tmp/.compactionrl-session"
"""In the container: working directory and exported variables between two commands"""


class GradedByHarbor(InfrastructureError):
    """Harbor's verifier runs after the agent; nothing is known here."""

    error_class = "graded_by_harbor"


class CompactionAgent(BaseAgent):
    """One fenced shell command a turn, with context compaction."""

    capabilities = AgentCapabilities(atif=True)

    def __init__(self, logs_dir: Path, model_name: str | None = None, **options: Any) -> None:
        """Raises pydantic's ValidationError, which names option, value and what is allowed."""
        own = {
            kind: {name: options.pop(name) for name in kind.model_fields if name in options}
            for kind in (CompactionSettings, AgentSettings, EndpointSettings, SandboxSettings)
        }
        endpoint = {"base_url": options.pop("api_base", None), "model": (model_name or "").removeprefix("openai/")}
        self._endpoint = EndpointSettings(**own[EndpointSettings] | endpoint)
        self._settings = AgentSettings(**own[AgentSettings] | {"compaction": own[CompactionSettings]})
        self._sandbox = SandboxSettings(**own[SandboxSettings])
        super().__init__(logs_dir, model_name, **options)

    @staticmethod
    def name() -> str:
        return "compactionrl"

    def version(self) -> str:
        return version("compactionrl")

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed: commands come from outside."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Raises what keeps the rollout from its end, so that Harbor counts an error and no failed attempt."""
        task = HarborTask(instruction, HarborEnvironment(environment, self._sandbox))
        spending = Spending()
        info = await preflight(self._endpoint, temperature=self._settings.temperature, spending=spending)
        check_window(info, self._settings.compaction.window)
        renderer = endpoint_renderer(self._endpoint)
        engine = OpenAIEngine(self._endpoint, renderer, spending, info)
        try:
            rollout = await run_rollout(
                task, engine, renderer, self._settings, seed=0, rollout_id=self.session_id or task.id
            )
        finally:
            await engine.aclose()
        write_atif(
            self.logs_dir / "trajectory.json",
            atif_trajectory(rollout, instruction, model_name=self._endpoint.model, version=self.version()),
        )
        _fill(context, rollout)
        if rollout.outcome.error_class != GradedByHarbor.error_class:
            raise RuntimeError(f"{rollout.outcome.error_class}: {rollout.outcome.detail}")


def _fill(context: AgentContext, rollout: Rollout) -> None:
    context.n_input_tokens = rollout.usage.prompt_tokens
    context.n_cache_tokens = rollout.usage.cached_tokens
    context.n_output_tokens = rollout.usage.completion_tokens
    context.cost_usd = rollout.usage.cost
    context.metadata = {
        "compactions": rollout.n_compactions,
        "summary_tokens": rollout.summary_tokens,
        "turns": len(rollout.turns),
        "count_source": rollout.count_source,
        "ended": rollout.outcome.detail,
    }


@dataclass(frozen=True)
class HarborTask:
    """What Harbor asks for, as our Task. Its agent timeout is Harbor's to keep."""

    instruction: str
    environment: HarborEnvironment
    id: str = "harbor"
    limits: TaskLimits = field(default_factory=TaskLimits)

    def open(self) -> Environment:
        return self.environment


class HarborEnvironment(Environment):
    """Harbor's environment, with a session that lasts from one command to the next."""

    def __init__(self, environment: BaseEnvironment, settings: SandboxSettings) -> None:
        self._environment, self._settings = environment, settings

    async def start(self) -> None:
        """Harbor has started it."""

    async def execute(self, command: str) -> Execution:
        """Raises EnvironmentFailure where Harbor's environment does not answer."""
        seconds = math.ceil(self._settings.command_timeout)
        script = (
            f'trap \'__c=$?; {{ printf "cd -- %q\\n" "$PWD"; export -p; }} > {SESSION}; exit $__c\' EXIT\n'
            f"[ ! -r {SESSION} ] || . {SESSION}\n{command}\n"
        )
        guarded = f"timeout -s KILL {seconds} bash -c {shlex.quote(script)} < /dev/null"
        try:
            result = await self._environment.exec(guarded, timeout_sec=seconds + 30)
        except Exception as error:  # whatever kind of environment it is
            raise EnvironmentFailure(f"Harbor's environment: {type(error).__name__}: {error}") from error
        output = ClippedOutput(self._settings.output_bytes)
        output.add(((result.stdout or "") + (result.stderr or "")).encode("utf-8", "surrogateescape"))
        killed = result.return_code == 137
        return Execution(output.text(), result.return_code, f"killed, perhaps after {seconds} s" if killed else "")

    async def upload(self, path: str, content: bytes) -> None:
        raise EnvironmentFailure("files are Harbor's to upload")

    async def grade(self) -> float:
        raise GradedByHarbor("the verifier is Harbor's")

    async def stop(self) -> None:
        """Harbor stops it."""
