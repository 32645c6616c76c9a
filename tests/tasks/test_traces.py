from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compaction.rollout import CallRecord, CompactionRecord, Outcome, Rollout, Segment, TurnRecord
from compaction.settings import AgentSettings
from tasks.traces import log_rollouts
from tasks.tracking import TrackedRun, Tracker


def segment(ordinal: int) -> Segment:
    return Segment(
        kind="summary" if ordinal % 2 else "execution",
        ordinal=ordinal,
        context_ids=np.zeros(1, np.int32),
        token_ids=np.zeros(2, np.int32),
        optimized=np.ones(2, bool),
        logprobs=np.full(2, -1.0, np.float32),
        versions=np.zeros(2, np.int32),
    )


@pytest.fixture
def cell(mlflow_uri: str, tmp_path: Path) -> Iterator[TrackedRun]:
    with (
        Tracker.open(
            mlflow_uri, preset="t", config={}, config_digest="d", artifacts=tmp_path / "artifacts", name="n", tags={}
        ) as tracker,
        tracker.cell("c", {}) as cell,
    ):
        yield cell


def spans_of(trace: Any) -> list[Any]:
    return sorted(trace.data.spans, key=lambda span: span.start_time_ns)


def rollout(outcome: Outcome) -> Rollout:
    return Rollout(
        id="r7",
        task_id="trail-3",
        seed=0,
        settings=AgentSettings(),
        segments=tuple(segment(i) for i in range(4)),
        outcome=outcome,
        turns=(TurnRecord(0, "cat a", "b is next", 30), TurnRecord(2, "cat b", "done", 25)),
        compactions=(
            CompactionRecord(1, 1, tokens_before=90, tokens_after=20, dropped=1, kept=0, summary="out a: b"),
            CompactionRecord(3, 2, 80, None, dropped=0, kept=0, summary="", rejected="empty", discarded=("x",)),
        ),
    )


def test_a_rollout_becomes_spans_in_the_order_it_happened(cell: TrackedRun) -> None:
    import mlflow

    good, bad = log_rollouts(cell, [rollout(Outcome(1.0, "finished")), rollout(Outcome(None, "error", "engine"))])
    trace = mlflow.get_trace(good)
    spans = spans_of(trace)
    assert [(span.span_type, span.name) for span in spans] == [
        ("AGENT", "rollout r7"),
        ("CHAT_MODEL", "turn 1"),
        ("TOOL", "command"),
        ("MEMORY", "compaction"),
        ("CHAT_MODEL", "turn 2"),
        ("TOOL", "command"),
        ("MEMORY", "failed compaction"),
    ]
    root, memory = spans[0], spans[3]
    assert all(span.parent_id == root.span_id for span in spans[1:])
    assert (memory.attributes["tokens_before"], memory.attributes["tokens_after"]) == (90, 20)
    assert (memory.inputs, memory.outputs) == ({"tokens_before": 90}, {"summary": "out a: b", "tokens_after": 20})
    assert spans[4].inputs == {"observation": "b is next"}
    assert root.outputs["reward"] == 1.0
    assert trace.info.trace_metadata["mlflow.sourceRun"] == cell.run_id
    assert mlflow.get_trace(bad).info.status == "ERROR"


def test_each_function_call_is_a_span_of_its_own(cell: TrackedRun) -> None:
    import mlflow

    calls = (
        CallRecord("1", "execute_commands", {"commands": ["ls"]}, ("ls",), "a b"),
        CallRecord("2", "", {}, (), "?"),
    )
    turn = TurnRecord(0, "<tool_call>…", "a b\n\n?", 30, calls)
    (trace_id,) = log_rollouts(cell, [replace(rollout(Outcome(1.0, "finished")), turns=(turn,), compactions=())])
    tools = [(s.name, s.inputs, s.outputs) for s in spans_of(mlflow.get_trace(trace_id)) if s.span_type == "TOOL"]
    assert tools == [("execute_commands", {"commands": ["ls"]}, "a b"), ("unreadable call", {}, "?")]
