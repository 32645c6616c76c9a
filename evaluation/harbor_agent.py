"""Our agent inside Harbor: `harbor run --agent evaluation.harbor_agent:CompactionAgent`.

Harbor starts the container and grades; the agent brings the window, its compactions and any OpenAI-compatible endpoint.
Needs Python 3.12 or newer, as Harbor does, and of our dependencies only those Harbor has, and numpy:
`pip install --no-deps compactionrl && pip install harbor numpy`. Example:

    harbor run -p tasks/ --agent evaluation.harbor_agent:CompactionAgent -m my-model \\
        --ak api_base=http://localhost:8000/v1 --ak window=32768 --ak cap=3 --ak keep_recent=2

Every field of EndpointSettings, AgentSettings, CompactionSettings and SandboxSettings is an agent option
(`--ak NAME=VALUE`). With `max_deadline` below the task's own timeout, a rollout ends as `deadline`, no error to Harbor.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harbor import AgentContext, BaseAgent, BaseEnvironment
from harbor.agents.capabilities import AgentCapabilities
from harbor.models.agent.context import ModelUsage

from compaction.agent import run_rollout
from compaction.atif import atif_trajectory, write_atif
from compaction.engines.endpoint_errors import EndpointRefused
from compaction.engines.endpoint_settings import EndpointSettings, check_thinking
from compaction.engines.openai import OpenAIEngine
from compaction.engines.preflight import check_window, preflight
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import endpoint_renderer
from compaction.protocols import (
    Completion,
    Environment,
    EnvironmentFailure,
    Execution,
    GenerateRequest,
    InfrastructureError,
    TaskLimits,
)
from compaction.rollout import Rollout
from compaction.settings import AgentSettings, CompactionSettings
from compaction.window import WindowTooSmall
from evaluation.environments.output import ClippedOutput
from evaluation.failures import failure_policy
from evaluation.settings import SandboxSettings

SESSION = "/tmp/.compactionrl-session"
"""In the container: working directory and exported variables between two commands"""


_HARBOR_NAMES = {
    "rate_limit": "ApiRateLimitError",
    "server_error": "ApiInternalServerError",
    "connection": "ApiConnectionError",
    "engine_timeout": "ApiResponseStalledError",
    "bad_request": "BadRequestError",
    "budget_exceeded": "BudgetExceededError",
    "authentication": "AgentAuthenticationError",
    "model_not_found": "ModelNotFoundError",
    "refusal": "AgentSafetyRefusalError",
}
_HARBOR_GROUPS = {"sandbox": "RuntimeRequestError", "engine": "ApiError"}
_NEVER_COUNTS = "ServiceOperationsUnsupportedError"
"""Harbor tells failures by the name of the exception's class, and counts the reward after one that it does not know.
Its names for our error classes, for groups of them, and for the rest: not repeated, not graded, no reward"""


class GradedByHarbor(InfrastructureError):
    """Harbor's verifier runs after the agent; nothing is known here."""

    error_class = "graded_by_harbor"


class StoppedByHarbor(InfrastructureError):
    """Harbor's timeout, or Ctrl-C."""

    error_class = "cancelled"


class CompactionAgent(BaseAgent):
    """Acts by shell commands, with context compaction."""

    capabilities = AgentCapabilities(atif=True)

    def __init__(self, logs_dir: Path, model_name: str | None = None, **options: Any) -> None:
        """Raises pydantic's ValidationError, which names option, value and what is allowed, or ValueError."""
        own = {
            kind: {name: options.pop(name) for name in kind.model_fields if name in options}
            for kind in (CompactionSettings, AgentSettings, EndpointSettings, SandboxSettings)
        }
        endpoint = {"base_url": options.pop("api_base", None), "model": (model_name or "").removeprefix("openai/")}
        self._endpoint = EndpointSettings(**own[EndpointSettings] | endpoint)
        self._settings = AgentSettings(**own[AgentSettings] | {"compaction": own[CompactionSettings]})
        check_thinking(self._settings.thinking)
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
        """Whatever ends it, trajectory and counts are there for what was done.

        Raises what kept the rollout from its end, under a name by which Harbor counts an error and no failed attempt.
        """
        stop = asyncio.Event()
        rollout_task = asyncio.create_task(self._rollout(instruction, environment, stop))
        try:
            rollout = await asyncio.shield(rollout_task)
        except asyncio.CancelledError:
            stop.set()
            rollout_task.cancel()
            self._keep(await rollout_task, context)
            raise
        except EndpointRefused as error:
            raise _as_harbors(getattr(error.__context__, "error_class", "settings"), str(error)) from None
        except WindowTooSmall as error:
            raise _as_harbors("settings", str(error)) from None
        self._keep(rollout, context)
        outcome = rollout.outcome
        if outcome.error_class is not None and outcome.error_class != GradedByHarbor.error_class:
            raise _as_harbors(outcome.error_class, outcome.detail)

    async def _rollout(self, instruction: str, environment: BaseEnvironment, stop: asyncio.Event) -> Rollout:
        spending = Spending()
        info = await preflight(self._endpoint, temperature=self._settings.temperature, spending=spending)
        check_window(info, self._settings.compaction.window)
        renderer = endpoint_renderer(self._endpoint)
        engine = StoppableEngine(stop, self._endpoint, renderer, spending, info)
        limits = TaskLimits(deadline_seconds=self._sandbox.max_deadline)
        task = HarborTask(instruction, HarborEnvironment(environment, self._sandbox, stop), limits)
        try:
            return await run_rollout(
                task, engine, renderer, self._settings, seed=0, rollout_id=self.session_id or task.id
            )
        finally:
            await engine.aclose()

    def _keep(self, rollout: Rollout, context: AgentContext) -> None:
        model, usage = self._endpoint.model, rollout.usage
        write_atif(
            self.logs_dir / "trajectory.json",
            atif_trajectory(rollout, model_name=model, version=self.version()),
        )
        context.n_input_tokens = usage.prompt_tokens
        context.n_cache_tokens = usage.cached_tokens
        context.n_output_tokens = usage.completion_tokens
        context.cost_usd = usage.cost
        context.model_usage = {
            model: ModelUsage(
                n_input_tokens=usage.prompt_tokens,
                n_cache_tokens=usage.cached_tokens,
                n_output_tokens=usage.completion_tokens,
                cost_usd=usage.cost,
            )
        }
        context.metadata = {
            "compactions": rollout.n_compactions,
            "summary_tokens": rollout.summary_tokens,
            "turns": len(rollout.turns),
            "count_source": rollout.count_source,
            "ended": rollout.outcome.detail,
        }


def _as_harbors(error_class: str, detail: str | None) -> Exception:
    name = _HARBOR_NAMES.get(error_class) or _HARBOR_GROUPS.get(failure_policy(error_class).group, _NEVER_COUNTS)
    kind: type[Exception] = type(name, (Exception,), {})
    return kind(f"{error_class}: {detail}")


class StoppableEngine(OpenAIEngine):
    """Whose call in flight ends the rollout, with all that was done kept, when `stop` is set and it is cancelled."""

    def __init__(self, stop: asyncio.Event, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stop = stop

    async def generate(self, request: GenerateRequest) -> Completion:
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            if self._stop.is_set():
                raise StoppedByHarbor("stopped by Harbor") from None
            raise


@dataclass(frozen=True)
class HarborTask:
    """What Harbor asks for, as our Task. The task's own timeout is Harbor's to keep."""

    instruction: str
    environment: HarborEnvironment
    limits: TaskLimits
    id: str = "harbor"

    def open(self) -> Environment:
        return self.environment


class HarborEnvironment(Environment):
    """Harbor's environment, with a session that lasts from one command to the next."""

    def __init__(self, environment: BaseEnvironment, settings: SandboxSettings, stop: asyncio.Event) -> None:
        self._environment, self._settings, self._stop = environment, settings, stop

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
        except asyncio.CancelledError:
            if self._stop.is_set():
                raise StoppedByHarbor("stopped by Harbor") from None
            raise
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
