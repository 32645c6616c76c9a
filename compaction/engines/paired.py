"""Two models in one rollout: one acts, another writes the summaries (the paper's Table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compaction.engines.openai import OpenAIEngine
from compaction.protocols import ChatMessage, Completion, GenerateRequest, Tools


@dataclass(frozen=True)
class PairedEngine:
    """Summaries are sampled by `summaries`, everything else by `actions`, which also says how long a context is."""

    actions: OpenAIEngine
    summaries: OpenAIEngine

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises what the engine that is asked raises."""
        return await (self.summaries if request.kind == "summary" else self.actions).generate(request)

    async def measure(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> int | None:
        return await self.actions.measure(messages, tools)

    async def release(self, rollout_id: str) -> None:
        await self.actions.release(rollout_id)
        await self.summaries.release(rollout_id)

    async def aclose(self) -> None:
        """Closes the connections of the running event loop."""
        await self.actions.aclose()
        await self.summaries.aclose()
