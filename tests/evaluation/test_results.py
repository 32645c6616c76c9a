"""A cell's figures from its trials, by hand."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from evaluation.grid import Cell
from evaluation.results import CellResult, summarize_cell
from evaluation.trial import TrialResult

CELL = Cell("base", 0, 512, 3, 1)


def trial(task: str, reward: float | None, repeat: int = 0, summaries: tuple[int, ...] = (), **change) -> TrialResult:
    cell = change.pop("cell", CELL)
    fields = {
        "key": cell.trial_key("trail/test", task, repeat),
        "seed": 0,
        "temperature": cell.temperature,
        "reward": reward,
        "error_class": "environment" if reward is None else None,
        "stop_reason": "error" if reward is None else "finished",
        "compactions": len(summaries),
        "compacted": bool(summaries),
        "summary_tokens": summaries,
        "rejected_summaries": 0,
        "turns": 10,
        "generated_tokens": 100,
        "prompt_tokens": 1000,
        "cached_tokens": 0,
        "commands": 9,
        "repeated_commands": 0,
        "cost": 0.25,
        "count_source": "exact",
    }
    return TrialResult(**{**fields, **change})


def test_figures_of_two_tasks_and_three_repeats():
    rewards = {"a": (1.0, 0.0, 1.0), "b": (0.0, 0.0, 1.0)}
    trials = [trial(task, r, i) for task, rs in rewards.items() for i, r in enumerate(rs)]
    result = summarize_cell(CELL, trials)
    assert (result.n_tasks, result.repeats, result.n_trials, result.scored, result.errored) == (2, 3, 6, 6, 0)
    assert result.task_scores == {"a": pytest.approx(2 / 3), "b": pytest.approx(1 / 3)}
    assert result.pass_at_1 == pytest.approx(0.5)
    assert result.pass_at_1_std == pytest.approx(0.5)  # repeats score 0.5, 0, 1
    assert result.ci_low == pytest.approx(1 / 3)
    assert result.ci_high == pytest.approx(2 / 3)


def test_unscored_trials_are_in_no_score_and_in_the_counts():
    trials = [trial("a", 1.0), trial("a", None, 1), trial("b", 0.0), trial("b", 1.0, 1), trial("c", None)]
    result = summarize_cell(CELL, trials)
    assert (result.n_tasks, result.scored, result.errored) == (3, 3, 2)
    assert result.error_classes == {"environment": 2}
    assert result.coverage == pytest.approx(0.6)
    assert result.task_scores == {"a": 1.0, "b": 0.5}
    assert result.pass_at_1 == pytest.approx(0.75)


def test_an_agents_timeout_is_a_zero_that_counts():
    trials = [trial("a", 1.0), *(trial("a", 0.0, i, stop_reason="deadline") for i in (1, 2))]
    assert summarize_cell(CELL, trials).pass_at_1 == pytest.approx(1 / 3)


def test_a_cell_without_any_reward_says_null():
    result = summarize_cell(CELL, [trial("a", None), trial("b", None)])
    assert result.pass_at_1 is result.pass_at_1_std is result.ci_low is result.ci_high is None
    assert result.pass_at_1_compacted is result.pass_at_1_uncompacted is result.summary_tokens is None
    assert "NaN" not in result.model_dump_json()


def test_split_by_compacted_and_summary_lengths():
    trials = [
        trial("a", 1.0, summaries=(30, 40)),
        trial("b", 0.0, summaries=(20,)),
        trial("c", 0.0, compacted=True, stop_reason="summary_failed"),
        trial("d", 1.0),
    ]
    result = summarize_cell(CELL, trials)
    assert result.pass_at_1_compacted == pytest.approx(1 / 3)
    assert result.pass_at_1_uncompacted == 1.0
    assert result.compacted_share == 0.75
    assert result.compactions_per_rollout == 0.75
    assert result.summary_tokens == 30.0
    assert result.task_summary_tokens == {"a": 35.0, "b": 20.0}
    assert result.stop_reasons == {"finished": 3, "summary_failed": 1}


def test_one_repeat_has_no_deviation_and_one_task_no_interval():
    result = summarize_cell(CELL, [trial("a", 1.0)])
    assert result.pass_at_1 == 1.0
    assert result.pass_at_1_std is result.ci_low is None


@pytest.mark.parametrize(
    ("trials", "message"),
    [
        ([], "no trials"),
        ([trial("a", 1.0), trial("a", 0.0)], "two results for task a, repeat 0"),
        ([trial("a", 1.0, cell=Cell("base", 0, 512, 1, 1))], "task a ran"),
        ([trial("a", 1.0, cell=Cell("supo", 0, 512, 3, 1))], "task a ran"),
        ([trial("a", 1.0, temperature=0.0)], "task a ran"),
    ],
)
def test_trials_that_do_not_belong_together_are_refused(trials, message):
    with pytest.raises(ValueError, match=message):
        summarize_cell(CELL, trials)


rewards = st.sampled_from([None, 0.0, 0.5, 1.0])


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(rewards, min_size=1, max_size=3), min_size=1), st.randoms())
def test_order_of_trials_changes_nothing_and_json_keeps_all(by_task, shuffle: random.Random):
    trials = [trial(task, r, i) for task, rs in by_task.items() for i, r in enumerate(rs)]
    result = summarize_cell(CELL, trials)
    shuffle.shuffle(trials)
    assert summarize_cell(CELL, trials) == result
    assert CellResult.model_validate(json.loads(json.dumps(result.model_dump(), allow_nan=False))) == result
    if result.pass_at_1 is not None:
        assert min(result.task_scores.values()) <= result.pass_at_1 <= max(result.task_scores.values())


def test_nan_and_counts_that_do_not_add_up_are_refused():
    fields = summarize_cell(CELL, [trial("a", 1.0), trial("b", 0.0)]).model_dump()
    with pytest.raises(ValidationError, match="finite"):
        CellResult(**{**fields, "pass_at_1": float("nan")})
    with pytest.raises(ValidationError, match="are not 2 trials"):
        CellResult(**{**fields, "errored": 1})
