"""Rollouts in Parquet: one row each, exact round trip, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from compaction.protocols import Usage
from compaction.rollout import CallRecord, CompactionRecord, Outcome, Rollout, Segment, TurnRecord
from compaction.settings import AgentSettings

_SEGMENT = pa.struct(
    [
        ("kind", pa.string()),
        ("ordinal", pa.int32()),
        ("context_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("optimized", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
    ]
)
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("task_id", pa.string()),
        ("seed", pa.int64()),
        ("reward", pa.float64()),
        ("stop_reason", pa.string()),
        ("error_class", pa.string()),
        ("detail", pa.string()),
        ("settings", pa.string()),
        ("segments", pa.list_(_SEGMENT)),
        ("turns", pa.string()),
        ("compactions", pa.string()),
        ("usage", pa.string()),
        ("count_source", pa.string()),
        ("instruction", pa.string()),
        ("seconds", pa.string()),
    ]
)
"""`settings`, `turns`, `compactions`, `usage` and `seconds` hold JSON"""
_ADDED = {"instruction"}
"""Columns that files of earlier versions lack: what was paid for stays readable"""


def write_rollouts(path: str | Path, rollouts: Sequence[Rollout]) -> Path:
    """Writes all rollouts to one Parquet file, atomically. Raises OSError where the disk is full."""
    path = Path(path)
    table = pa.Table.from_pylist([_to_row(r) for r in rollouts], schema=SCHEMA)
    partial = path.with_name(f".{path.name}.partial")
    try:
        pq.write_table(table, partial, compression="zstd")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_rollouts(path: str | Path) -> list[Rollout]:
    """The rollouts of a file, as written. Raises FileNotFoundError, or ValueError for a file of another kind."""
    table = pq.read_table(path)
    missing = set(SCHEMA.names) - _ADDED - set(table.schema.names)
    if missing:
        raise ValueError(f"{path} holds no rollouts: columns {sorted(missing)} are missing")
    return [_from_row(row) for row in table.to_pylist()]


def _to_row(rollout: Rollout) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "task_id": rollout.task_id,
        "seed": rollout.seed,
        **asdict(rollout.outcome),
        "settings": rollout.settings.model_dump_json(),
        "segments": [{name: getattr(s, name) for name in _SEGMENT.names} for s in rollout.segments],
        "turns": json.dumps([asdict(t) for t in rollout.turns]),
        "compactions": json.dumps([asdict(c) for c in rollout.compactions]),
        "usage": json.dumps(asdict(rollout.usage)),
        "count_source": rollout.count_source,
        "instruction": rollout.instruction,
        "seconds": json.dumps(rollout.seconds),
    }


def _from_row(row: dict[str, Any]) -> Rollout:
    return Rollout(
        id=row["id"],
        task_id=row["task_id"],
        seed=row["seed"],
        settings=AgentSettings.model_validate_json(row["settings"]),
        segments=tuple(_segment(s) for s in row["segments"]),
        outcome=Outcome(row["reward"], row["stop_reason"], row["error_class"], row["detail"]),
        turns=tuple(_turn(t) for t in json.loads(row["turns"])),
        compactions=tuple(
            CompactionRecord(**{**c, "discarded": tuple(c["discarded"])}) for c in json.loads(row["compactions"])
        ),
        usage=Usage(**json.loads(row["usage"])),
        count_source=row["count_source"],
        instruction=row.get("instruction") or "",
        seconds=json.loads(row["seconds"]),
    )


def _turn(row: dict[str, Any]) -> TurnRecord:
    calls = (CallRecord(**{**call, "commands": tuple(call["commands"])}) for call in row.get("calls", ()))
    return TurnRecord(**{**row, "calls": tuple(calls)})


def _segment(row: dict[str, Any]) -> Segment:
    return Segment(
        kind=row["kind"],
        ordinal=row["ordinal"],
        context_ids=np.asarray(row["context_ids"], np.int32),
        token_ids=np.asarray(row["token_ids"], np.int32),
        optimized=np.asarray(row["optimized"], bool),
        logprobs=np.asarray(row["logprobs"], np.float32),
        versions=np.asarray(row["versions"], np.int32),
    )
