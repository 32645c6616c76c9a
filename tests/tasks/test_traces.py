from __future__ import annotations

from pathlib import Path

import numpy as np

from compaction.rollout import CompactionRecord, Outcome, Rollout, Segment, TurnRecord
from compaction.settings import AgentSettings
from tasks.traces import log_rollouts
from tasks.tracking import Tracker


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


def test_a_rollout_becomes_spans_in_the_order_it_happened(mlflow_uri: str, tmp_path: Path) -> None:
    import mlflow

    with (
        Tracker.open(
            mlflow_uri, preset="t", config={}, config_digest="d", artifacts=tmp_path / "artifacts", name="n", tags={}
        ) as tracker,
        tracker.cell("c", {}) as cell,
    ):
        good, bad = log_rollouts(cell, [rollout(Outcome(1.0, "finished")), rollout(Outcome(None, "error", "engine"))])
    trace = mlflow.get_trace(good)
    spans = sorted(trace.data.spans, key=lambda span: span.start_time_ns)
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
