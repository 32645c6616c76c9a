"""An endpoint that acts in an evaluation, asked from this process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from compaction.agent import run_rollout
from compaction.engines.endpoint_settings import EndpointSettings
from compaction.engines.openai import OpenAIEngine
from compaction.engines.paired import PairedEngine
from compaction.engines.preflight import check_window, preflight
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import endpoint_renderer
from compaction.protocols import EngineError, Renderer
from compaction.rollout import Rollout
from compaction.room import check_room
from compaction.settings import AgentSettings
from evaluation.failures import failure_policy
from evaluation.settings import JobSettings
from rl.requests import RolloutRequest
from tasks.errors import CommandError


class BudgetUsedUp(CommandError):
    """What this command may spend is spent: nothing more is started."""


class EndpointPolicy:
    """A model behind an endpoint, and perhaps another one that writes its summaries (the paper's Table 1)."""

    def __init__(
        self,
        endpoint: EndpointSettings,
        summary_endpoint: EndpointSettings | None,
        job: JobSettings,
        *,
        temperature: float,
        longest_window: int,
    ) -> None:
        """`longest_window`: of all cells, in tokens."""
        self._endpoints = [e for e in (endpoint, summary_endpoint) if e is not None]
        self.spending = Spending(job.max_cost, job.max_tokens)
        self._temperature, self._longest_window = temperature, longest_window
        self._engine: OpenAIEngine | PairedEngine | None = None

    @cached_property
    def _renderer(self) -> Renderer:
        return endpoint_renderer(self._endpoints[0])

    def check_room(self, instructions: Sequence[str], settings: Sequence[AgentSettings]) -> None:
        """Raises WindowTooSmall where any task has no room to act under any of the settings, as far as this can be
        told before the first reply."""
        for agent in settings:
            for instruction in instructions:
                check_room(instruction, self._renderer, agent)

    async def ready(self) -> None:
        """One small call to each endpoint, before anything else is spent. Raises BudgetUsedUp once nothing is left."""
        try:
            self.spending.check()
        except EngineError as error:
            raise BudgetUsedUp(str(error)) from error
        if self._engine is not None:
            return
        engines: list[OpenAIEngine] = []
        for settings in self._endpoints:
            info = await preflight(settings, temperature=self._temperature, spending=self.spending)
            check_window(info, self._longest_window)
            renderer = self._renderer if not engines else endpoint_renderer(settings)
            engines.append(OpenAIEngine(settings, renderer, self.spending, info))
        self._engine = engines[0] if len(engines) == 1 else PairedEngine(engines[0], engines[1])

    async def rollout(self, request: RolloutRequest) -> Rollout:
        assert self._engine is not None, "ready() comes first"
        return await run_rollout(
            request.task,
            self._engine,
            self._renderer,
            request.settings,
            seed=request.seed,
            rollout_id=request.id,
            grade_after=lambda error_class: failure_policy(error_class).grade,
        )

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.aclose()
