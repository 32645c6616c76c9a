from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compaction.protocols import Completion
from compaction.rollout import CompactionRecord, Outcome, Rollout, Segment, SegmentBuilder
from compaction.settings import AgentSettings


def segment(kind: str = "execution", ordinal: int = 0, **changes: Any) -> Segment:
    fields: dict[str, Any] = {
        "context_ids": np.array([1, 2], np.int32),
        "token_ids": np.array([3, 4, 5], np.int32),
        "optimized": np.array([True, False, True]),
        "logprobs": np.array([-1.0, 0.0, -0.5], np.float32),
        "versions": np.array([7, -1, 8], np.int32),
    }
    return Segment(kind=kind, ordinal=ordinal, **{**fields, **changes})  # type: ignore[arg-type]


def rollout(*segments: Segment, compactions: tuple[CompactionRecord, ...] = ()) -> Rollout:
    outcome = Outcome(1.0, "finished")
    return Rollout("r", "t", 0, AgentSettings(), segments, outcome, compactions=compactions)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, "logprobs has 2 entries for 3 tokens"),
        ({"logprobs": np.array([-1, -1, -1], np.float32)}, "not sampled"),
        ({"versions": np.array([7, 7, 8], np.int32)}, "not sampled"),
        ({"versions": np.array([-1, -1, 8], np.int32)}, "without a weight version"),
        ({"logprobs": np.array([np.nan, 0, -1], np.float32)}, "finite"),
        ({"logprobs": np.array([0.5, 0, -1], np.float32)}, "at most 0"),
    ],
)
def test_a_segment_that_does_not_add_up_is_refused(changes: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        segment(**changes)


def test_a_segment_counts_its_optimized_tokens():
    assert segment().n_optimized == 2


def test_segments_are_equal_when_all_their_arrays_are():
    assert segment() == segment()
    assert segment() != segment(token_ids=np.array([3, 4, 6], np.int32))


def test_a_built_segment_marks_exactly_the_sampled_tokens():
    builder = SegmentBuilder("execution", np.array([1]))
    builder.observed(np.array([2]))
    builder.sampled(Completion(np.array([3, 4]), np.array([-1.0, -2.0]), np.array([0, 1]), "stop"))
    built = builder.build(0)
    assert built.token_ids.tolist() == [2, 3, 4]
    assert built.optimized.tolist() == [False, True, True]
    assert built.versions.tolist() == [-1, 0, 1]


def test_a_segment_may_be_empty():
    empty = SegmentBuilder("execution", np.array([1])).build(0)
    assert (empty.n_optimized, len(empty.token_ids)) == (0, 0)
    assert empty.token_ids.dtype == np.int32


def test_segments_alternate_and_are_numbered_in_order():
    rollout(segment(), segment("summary", 1), segment("execution", 2))
    with pytest.raises(ValueError, match="segment 1 is execution with ordinal 1, expected summary 1"):
        rollout(segment(), segment("execution", 1))
    with pytest.raises(ValueError, match="ordinal 2, expected summary 1"):
        rollout(segment(), segment("summary", 2))


def test_windows_pair_each_execution_with_the_summary_that_ended_it():
    windows = list(rollout(segment(), segment("summary", 1), segment("execution", 2)).windows())
    assert [(a.ordinal, b and b.ordinal) for a, b in windows] == [(0, 1), (2, None)]


def test_only_compactions_that_led_on_are_counted():
    done = CompactionRecord(1, 3, 90, 40, 2, 1, "out a")
    failed = CompactionRecord(3, 5, 90, None, 0, 0, "", rejected="grew")
    made = rollout(
        segment(), segment("summary", 1), segment(ordinal=2), segment("summary", 3), compactions=(done, failed)
    )
    assert made.n_compactions == 1
    assert made.summary_tokens == [2]


@pytest.mark.parametrize(
    ("reward", "error_class"), [(None, None), (1.0, "engine"), (1.5, None), (-0.1, None), (float("nan"), None)]
)
def test_an_outcome_is_a_reward_in_range_or_an_error_class(reward: float | None, error_class: str | None):
    with pytest.raises(ValueError, match=r"reward"):
        Outcome(reward, "finished", error_class)
