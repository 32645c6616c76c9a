from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compaction.atif import atif_trajectory, write_atif
from compaction.protocols import TaskLimits
from tests.compaction.parts import FilesTask, play, replies, small_settings

LONG = ["cat a", "cat b"] * 8

# The keys of ATIF-v1.8, in which others are forbidden.
ROOT = {"schema_version", "session_id", "trajectory_id", "agent", "steps", "notes", "final_metrics", "extra"}
STEP = {"step_id", "timestamp", "source", "model_name", "message", "tool_calls", "observation", "metrics", "extra"}
AGENT_ONLY = {"model_name", "tool_calls", "metrics"}
METRICS = {"prompt_tokens", "completion_tokens", "cached_tokens", "completion_token_ids", "logprobs", "extra"}
TOTALS = {"total_prompt_tokens", "total_completion_tokens", "total_cached_tokens", "total_steps", "extra"}


def exported(
    renderer, actions: list[str] = LONG, summary: str = "out a at b", **changes: Any
) -> tuple[Any, dict[str, Any]]:
    rollout, _ = play(replies(actions, summary), settings=small_settings(**changes), renderer=renderer)
    return rollout, atif_trajectory(rollout, model_name="tiny")


@pytest.mark.parametrize("changes", [{}, {"cap": 0}, {"mode": "training"}])
@pytest.mark.parametrize("summary", ["out a at b", "no summary"])
def test_a_trajectory_has_the_formats_keys_and_no_others(renderer, summary: str, changes: dict[str, Any]):
    _, trajectory = exported(renderer, summary=summary, **changes)
    assert set(trajectory) <= ROOT
    assert trajectory["schema_version"] == "ATIF-v1.8"
    assert set(trajectory["final_metrics"]) <= TOTALS
    assert [s["step_id"] for s in trajectory["steps"]] == list(range(1, len(trajectory["steps"]) + 1))
    for step in trajectory["steps"]:
        assert set(step) <= STEP
        assert step["source"] in {"system", "user", "agent"}
        assert isinstance(step["message"], str)
        assert set(step.get("metrics", {})) <= METRICS
        assert step["source"] == "agent" or not AGENT_ONLY & set(step)


def test_turns_and_compactions_stand_in_the_order_they_happened(renderer):
    rollout, trajectory = exported(renderer)
    steps = trajectory["steps"]
    assert [s["message"] for s in steps[:3]] == ["trail", "cat a", rollout.turns[0].action]
    marks = [i for i, s in enumerate(steps) if "compaction" in s.get("extra", {})]
    assert len(marks) == len(rollout.compactions) > 0
    for mark, record in zip(marks, rollout.compactions, strict=True):
        agent_steps = [s for s in steps[:mark] if s["source"] == "agent" and "observation" in s]
        assert len(agent_steps) == record.after_turn
        assert steps[mark]["extra"]["compaction"]["dropped"] == record.dropped
        assert (steps[mark]["message"], steps[mark + 1]["message"]) == (record.summary, "out a at b")
        assert steps[mark + 1]["source"] == "user"


def test_every_sampled_token_is_in_the_trajectory_once(renderer):
    rollout, trajectory = exported(renderer)
    ids = [i for s in trajectory["steps"] for i in s.get("metrics", {}).get("completion_token_ids", [])]
    assert ids == np.concatenate([s.token_ids[s.optimized] for s in rollout.segments]).tolist()


def test_a_failed_compaction_is_marked_with_why_and_what_was_discarded(renderer):
    _, trajectory = exported(renderer, summary="no summary")
    last = trajectory["steps"][-1]
    assert last["extra"]["compaction"]["rejected"] == "no_body"
    assert last["extra"]["compaction"]["discarded"] == ["no summary"] * 3
    assert trajectory["final_metrics"]["extra"]["stop_reason"] == "summary_failed"


def test_a_rollout_without_a_turn_is_exported_too(renderer):
    task = FilesTask(limits=TaskLimits(max_turns=0))
    rollout, _ = play(replies([]), task=task, renderer=renderer)
    assert [s["source"] for s in atif_trajectory(rollout, model_name="tiny")["steps"]] == ["system", "user"]


def test_a_written_trajectory_is_plain_json(renderer, tmp_path: Path):
    _, trajectory = exported(renderer)
    path = write_atif(tmp_path / "trajectory.json", trajectory)
    assert json.loads(path.read_text(encoding="utf-8")) == trajectory
    assert list(tmp_path.iterdir()) == [path]
