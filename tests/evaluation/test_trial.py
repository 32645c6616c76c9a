"""A trial's counts come from its rollout, and its key says what the rollout ran."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from compaction.protocols import Usage
from compaction.rollout import CallRecord, CompactionRecord, Outcome, Rollout, Segment, TurnRecord
from compaction.settings import AgentSettings, CompactionSettings
from evaluation.grid import Cell
from evaluation.trial import TrialKey, trial_result

CELL = Cell("compactionrl", 1, 512, 3, 2)


def segment(kind: str, ordinal: int, sampled: int, observed: int = 0) -> Segment:
    n = sampled + observed
    optimized = np.arange(n) < sampled
    return Segment(
        kind=kind,
        ordinal=ordinal,
        context_ids=np.zeros(3, np.int32),
        token_ids=np.arange(n, dtype=np.int32),
        optimized=optimized,
        logprobs=np.where(optimized, -0.5, 0.0).astype(np.float32),
        versions=np.where(optimized, 0, -1).astype(np.int32),
    )


def compaction(segment: int, succeeded: bool, discarded: tuple[str, ...] = ()) -> CompactionRecord:
    return CompactionRecord(
        segment=segment,
        after_turn=1,
        tokens_before=400,
        tokens_after=120 if succeeded else None,
        dropped=1,
        kept=0,
        summary="out b1 f7 at c2",
        discarded=discarded,
        rejected=None if succeeded else "did not end by itself",
    )


def rollout(compactions=(), segments=(), outcome=None, cap=3) -> Rollout:
    return Rollout(
        id="r0",
        task_id="trail-7",
        seed=5,
        settings=AgentSettings(compaction=CompactionSettings(window=512, cap=cap, keep_recent=2), temperature=1.0),
        segments=segments or (segment("execution", 0, 4, 2),),
        outcome=outcome or Outcome(1.0, "finished"),
        turns=(TurnRecord(0, "cat b1", "f7", 40),),
        compactions=compactions,
        usage=Usage(prompt_tokens=900, completion_tokens=37, cached_tokens=600, calls=4),
    )


def test_counts_are_those_of_the_rollout():
    two = rollout(
        compactions=(compaction(1, True, discarded=("out",)), compaction(3, True)),
        segments=(
            segment("execution", 0, 4, 2),
            segment("summary", 1, 6),
            segment("execution", 2, 5, 1),
            segment("summary", 3, 9),
            segment("execution", 4, 3),
        ),
    )
    result = trial_result(CELL.trial_key("trail/test", "trail-7", 0), two)
    assert (result.reward, result.error_class, result.stop_reason) == (1.0, None, "finished")
    assert (result.compactions, result.compacted, result.summary_tokens) == (2, True, (6, 9))
    assert result.rejected_summaries == 1
    assert (result.turns, result.generated_tokens, result.prompt_tokens, result.cached_tokens) == (1, 37, 900, 600)
    assert (result.seed, result.temperature) == (5, 1.0)


def test_a_failed_compaction_is_no_compaction_but_the_trial_counts_as_compacted():
    failed = rollout(
        compactions=(compaction(1, False, discarded=("x", "y")),),
        segments=(segment("execution", 0, 4, 2), segment("summary", 1, 6)),
        outcome=Outcome(0.0, "summary_failed"),
    )
    result = trial_result(CELL.trial_key("trail/test", "trail-7", 0), failed)
    assert (result.compactions, result.compacted, result.summary_tokens) == (0, True, ())
    assert result.rejected_summaries == 2


@pytest.mark.parametrize(
    ("discarded", "rejected", "expected"),
    [((), None, 0), (("x",), None, 1), (("x", "y", "z"), "empty", 3), ((), "empty", 1), ((), "grew", 0),
     ((), "context_length", 0)],
)  # fmt: skip
def test_each_summary_that_was_not_accepted_counts_once(discarded, rejected, expected):
    record = replace(compaction(1, False, discarded=discarded), rejected=rejected)
    segments = (segment("execution", 0, 4, 2), segment("summary", 1, 6))
    failed = rollout(compactions=(record,), segments=segments, outcome=Outcome(0.0, "summary_failed"))
    assert trial_result(CELL.trial_key("trail/test", "trail-7", 0), failed).rejected_summaries == expected


def test_infrastructure_failure_has_no_reward_and_an_error_class():
    broken = rollout(outcome=Outcome(None, "error", "environment", "no space left"))
    result = trial_result(CELL.trial_key("trail/test", "trail-7", 0), broken)
    assert (result.reward, result.error_class) == (None, "environment")


def test_cap_0_is_named_with_keep_recent_null():
    result = trial_result(Cell("base", 0, 512, 0, None).trial_key("trail/test", "trail-7", 2), rollout(cap=0))
    assert (result.key.keep_recent, result.key.repeat) == (None, 2)


@pytest.mark.parametrize(("cap", "keep_recent"), [(0, 2), (3, None)])
def test_keep_recent_is_null_exactly_at_cap_0(cap, keep_recent):
    with pytest.raises(ValidationError, match="null at cap 0"):
        TrialKey(dataset="d", task="t", variant="base", window=512, cap=cap, keep_recent=keep_recent, repeat=0)


@pytest.mark.parametrize("change", [{"task": "trail-8"}, {"window": 256}, {"cap": 1}, {"keep_recent": 0}])
def test_a_key_that_names_another_run_is_refused(change):
    key = TrialKey(**{**dict(CELL.trial_key("trail/test", "trail-7", 0)), **change})
    with pytest.raises(ValueError, match="its key says"):
        trial_result(key, rollout())


def test_result_survives_json():
    result = trial_result(CELL.trial_key("trail/test", "trail-7", 0), rollout())
    assert type(result).model_validate_json(result.model_dump_json()) == result


def test_the_commands_of_function_calls_are_counted_and_those_behind_thinking_too():
    calls = (
        CallRecord("1", "execute_commands", {}, ("ls", "cat a"), "b"),
        CallRecord("2", "task_complete", {}, (), "verify"),
    )
    acted = rollout()
    by_calls = replace(
        acted,
        settings=acted.settings.model_copy(update={"scaffold": "tools"}),
        turns=(TurnRecord(0, "I look.", "b", 40, calls), TurnRecord(0, "no call", "advice", 50)),
    )
    said = "<think>the exit is near</think>\n```bash\nls\n```"
    behind = replace(acted, turns=(TurnRecord(0, said, "b", 40), TurnRecord(0, "<think>ls", "advice", 50)))
    key = CELL.trial_key("trail/test", "trail-7", 0)
    assert [trial_result(key, each).commands for each in (by_calls, behind)] == [2, 1]
