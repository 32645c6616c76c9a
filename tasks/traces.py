"""A rollout as an MLflow trace: AGENT, CHAT_MODEL for each turn, TOOL for what it ran, MEMORY for each compaction."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from compaction.rollout import CompactionRecord, Rollout, TurnRecord
from tasks.tracking import TrackedRun

SPAN_NANOSECONDS = 1_000_000
"""Rollouts keep no time per turn: spans lie one after another, so that their order is right; lengths mean nothing."""


def log_rollouts(run: TrackedRun, rollouts: Iterable[Rollout]) -> list[str]:
    """Log each rollout as a trace of `run`. Returns the trace ids; all are stored when it returns."""
    import mlflow

    mlflow.set_tracking_uri(run.client.tracking_uri)  # spans know no client, only the global URI
    ids = [_RolloutTrace(run, rollout).log() for rollout in rollouts]
    mlflow.flush_trace_async_logging()
    return ids


class _RolloutTrace:
    def __init__(self, run: TrackedRun, rollout: Rollout) -> None:
        self.run, self.rollout = run, rollout
        self.clock = time.time_ns()

    def log(self) -> str:
        import mlflow

        rollout, outcome = self.rollout, self.rollout.outcome
        self.root = mlflow.start_span_no_context(
            name=f"rollout {rollout.id}",
            span_type="AGENT",
            inputs={"task": rollout.task_id, "seed": rollout.seed},
            metadata={"mlflow.sourceRun": self.run.run_id},
            tags={
                "task": rollout.task_id,
                "stop_reason": outcome.stop_reason,
                "compactions": str(rollout.n_compactions),
            },
            experiment_id=self.run.experiment_id,
            start_time_ns=self.clock,
        )
        records = list(rollout.compactions)
        observation = None
        for number, turn in enumerate(rollout.turns, start=1):
            while records and records[0].after_turn < number:
                self._compaction(records.pop(0))
            attributes = {"turn": number, "segment": turn.segment, "tokens_after": turn.tokens}
            self._span(f"turn {number}", "CHAT_MODEL", {"observation": observation}, turn.action, attributes)
            self._tools(number, turn)
            observation = turn.observation
        for record in records:
            self._compaction(record)
        self.root.set_outputs({"reward": outcome.reward, "stop_reason": outcome.stop_reason, "detail": outcome.detail})
        status = "ERROR" if outcome.error_class else "OK"
        self.root.end(status=status, end_time_ns=self._tick())
        return str(self.root.trace_id)

    def _tools(self, number: int, turn: TurnRecord) -> None:
        if not turn.calls:
            self._span("command", "TOOL", {"command": turn.action}, turn.observation, {"turn": number})
        for call in turn.calls:
            self._span(call.name or "unreadable call", "TOOL", call.arguments, call.answer, {"turn": number})

    def _compaction(self, record: CompactionRecord) -> None:
        before, after = {"tokens_before": record.tokens_before}, {"tokens_after": record.tokens_after}
        attributes: dict[str, Any] = {
            **before,
            **after,
            "turns_dropped": record.dropped,
            "turns_kept": record.kept,
            "rejected": record.rejected,
            "discarded": list(record.discarded),
        }
        name = "compaction" if record.tokens_after is not None else "failed compaction"
        self._span(name, "MEMORY", before, {"summary": record.summary, **after}, attributes)

    def _span(self, name: str, kind: str, inputs: dict[str, Any], outputs: Any, attributes: dict[str, Any]) -> None:
        import mlflow

        span = mlflow.start_span_no_context(
            name=name,
            span_type=kind,
            parent_span=self.root,
            inputs=inputs,
            attributes={k: v for k, v in attributes.items() if v is not None},
            start_time_ns=self._tick(),
        )
        span.set_outputs(outputs)
        span.end(end_time_ns=self._tick())

    def _tick(self) -> int:
        self.clock += SPAN_NANOSECONDS
        return self.clock
