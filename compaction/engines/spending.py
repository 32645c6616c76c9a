"""What a job has spent on calls, and the limit it may not pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from compaction.engines.endpoint_errors import EndpointRefused
from compaction.engines.endpoint_settings import EndpointSettings
from compaction.protocols import EngineError, Usage
from compaction.rollout import SegmentKind


@dataclass(frozen=True)
class Remaining:
    """What is left of the limits; None where there is no limit."""

    cost: float | None
    """US dollars"""
    tokens: int | None


@dataclass
class Spending:
    """Ledger of a whole job, shared by its engines. Limits end the job's calls, not its bookkeeping.

    A limit is checked before a call, so what is in flight when it is reached still comes on top.
    """

    max_cost: float | None = None
    """US dollars"""
    max_tokens: int | None = None
    """Prompt tokens, cached ones included, and sampled tokens together"""
    by_kind: dict[SegmentKind, Usage] = field(
        init=False, default_factory=lambda: {"execution": Usage(), "summary": Usage()}
    )

    @property
    def total(self) -> Usage:
        total = Usage()
        for usage in self.by_kind.values():
            total.add(usage)
        return total

    @property
    def remaining(self) -> Remaining:
        total = self.total
        return Remaining(
            None if self.max_cost is None or total.cost is None else max(0.0, self.max_cost - total.cost),
            None if self.max_tokens is None else max(0, self.max_tokens - _tokens(total)),
        )

    def add(self, kind: SegmentKind, usage: Usage) -> None:
        self.by_kind[kind].add(usage)

    def require_prices(self, settings: EndpointSettings) -> None:
        """Raises EndpointRefused if max_cost is set but could not be held for this endpoint."""
        unknown = [name for name in ("price_input", "price_cached", "price_output") if getattr(settings, name) is None]
        if self.max_cost is not None and unknown:
            raise EndpointRefused(
                f"max_cost={self.max_cost:g} needs the prices of {settings.model}: set {', '.join(unknown)} in USD per "
                "million tokens (price_cached is price_input where cached tokens are no cheaper; 0 for a server of "
                "your own), or limit max_tokens instead"
            )

    def check(self) -> None:
        """To be called before every call. Raises EngineError (`budget_exceeded`) once a limit is reached."""
        total = self.total
        if self.max_tokens is not None and _tokens(total) >= self.max_tokens:
            raise EngineError(
                f"budget exceeded: {_tokens(total):,} tokens in {total.calls} calls reach max_tokens="
                f"{self.max_tokens:,}; raise it to go on",
                "budget_exceeded",
            )
        if self.max_cost is None:
            return
        if total.cost is None:
            raise EngineError(
                f"budget exceeded: max_cost={self.max_cost:g} cannot be held, because the server did not say what a "
                f"call took ({total.calls} calls so far); limit max_tokens instead",
                "budget_exceeded",
            )
        if total.cost >= self.max_cost:
            raise EngineError(
                f"budget exceeded: ${total.cost:.4f} for {total.calls} calls reach max_cost={self.max_cost:g}; raise "
                "it to go on",
                "budget_exceeded",
            )


def _tokens(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens
