"""Export of a rollout as an ATIF trajectory, the JSON that Harbor and its viewers read.

Format "ATIF-v1.8": root, steps numbered from 1, an agent's steps with token ids and logprobs, unknown keys forbidden
outside `extra`. A compaction is the agent's step that holds the summary, marked by `extra.compaction`, and the resume
message as a user step; the turns kept behind it are not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from compaction.files import write_durably
from compaction.rollout import CompactionRecord, Rollout, Segment, TurnRecord
from compaction.scaffolds import load_scaffold
from compaction.summaries import PromptPack, load_prompt_pack

SCHEMA_VERSION = "ATIF-v1.8"


def atif_trajectory(rollout: Rollout, *, model_name: str, version: str = "0.1.0") -> dict[str, Any]:
    """The rollout as an ATIF root object, ready for `json.dumps` (no NaN). `model_name` names the policy."""
    pack = load_prompt_pack(rollout.settings.compaction.prompt_pack)
    steps = [
        {"source": "system", "message": pack.system_prompt(load_scaffold(rollout.settings.scaffold))},
        {"source": "user", "message": rollout.instruction},
        *_acted(rollout, pack, model_name),
    ]
    usage, outcome = rollout.usage, rollout.outcome
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": rollout.id,
        "agent": {
            "name": "compactionrl",
            "version": version,
            "model_name": model_name,
            "extra": {"settings": rollout.settings.model_dump(mode="json")},
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": {
            "total_prompt_tokens": usage.prompt_tokens,
            "total_completion_tokens": usage.completion_tokens,
            "total_cached_tokens": usage.cached_tokens,
            "total_steps": len(steps),
            "extra": {
                "reward": outcome.reward,
                "stop_reason": outcome.stop_reason,
                "error_class": outcome.error_class,
                "detail": outcome.detail,
                "compactions": rollout.n_compactions,
            },
        },
        "extra": {"task_id": rollout.task_id, "seed": rollout.seed},
    }


def write_atif(path: str | Path, trajectory: dict[str, Any]) -> Path:
    """Writes the trajectory as JSON, atomically. Raises OSError where the disk is full."""
    return write_durably(Path(path), json.dumps(trajectory, allow_nan=False))


def _acted(rollout: Rollout, pack: PromptPack, model_name: str) -> Iterator[dict[str, Any]]:
    """The steps after the task message: turns, and each compaction after the turn it followed."""
    actions = {segment.ordinal: iter(_actions(segment, rollout.turns)) for segment in rollout.segments}
    waiting = list(rollout.compactions)
    for number, turn in enumerate(rollout.turns):
        while waiting and waiting[0].after_turn <= number:
            yield from _compacted(waiting.pop(0), rollout, pack, model_name)
        yield _agent_step(turn.action, model_name, next(actions[turn.segment], {}), _observed(turn))
    for record in waiting:
        yield from _compacted(record, rollout, pack, model_name)


def _agent_step(message: str, model_name: str, metrics: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    step = {"source": "agent", "model_name": model_name, "message": message, **more}
    return {**step, "metrics": metrics} if metrics else step


def _observed(turn: TurnRecord) -> dict[str, Any]:
    more: dict[str, Any] = {"extra": {"tokens": turn.tokens}}
    if not turn.calls:
        return {"observation": {"results": [{"content": turn.observation}]}, **more}
    calls = [{"tool_call_id": c.id, "function_name": c.name, "arguments": c.arguments} for c in turn.calls]
    results = [{"source_call_id": c.id, "content": c.answer} for c in turn.calls]
    return {"tool_calls": calls, "observation": {"results": results}, **more}


def _compacted(
    record: CompactionRecord, rollout: Rollout, pack: PromptPack, model_name: str
) -> Iterator[dict[str, Any]]:
    segment = rollout.segments[record.segment]
    metrics = _metrics(segment.token_ids, segment.logprobs) if segment.kind == "summary" else {}
    marked = {
        "tokens_before": record.tokens_before,
        "tokens_after": record.tokens_after,
        "dropped": record.dropped,
        "kept": record.kept,
        "rejected": record.rejected,
        "discarded": list(record.discarded),
    }
    yield _agent_step(record.reply or record.summary, model_name, metrics, {"extra": {"compaction": marked}})
    if record.tokens_after is not None:
        yield {"source": "user", "message": pack.resume_message(record.summary)}


def _actions(segment: Segment, turns: tuple[TurnRecord, ...]) -> list[dict[str, Any]]:
    """Metrics of each action of an execution segment. Empty where a reply of no token hides which tokens are whose."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], segment.optimized, [False]])))
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    if len(runs) != sum(turn.segment == segment.ordinal for turn in turns):
        return []
    return [_metrics(segment.token_ids[a:b], segment.logprobs[a:b]) for a, b in runs]


def _metrics(token_ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    return {
        "completion_tokens": len(token_ids),
        "completion_token_ids": token_ids.tolist(),
        "logprobs": logprobs.tolist(),
    }
