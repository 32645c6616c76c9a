"""Means, intervals and paired tests against hand-computed numbers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from evaluation.analysis.statistics import (
    Interval,
    bootstrap_interval,
    compare,
    mcnemar_exact,
    mean_std,
    sign_flip_test,
)

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "vectors.json").read_text())
scores = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=30)


@pytest.mark.parametrize("vector", VECTORS["mean_std"])
def test_mean_and_deviation_match_the_vectors(vector):
    mean, std = mean_std(vector["scores"])
    assert mean == pytest.approx(vector["mean"], rel=1e-12)
    assert std == (None if vector["std"] is None else pytest.approx(vector["std"], rel=1e-9))


def test_mean_of_nothing_is_none():
    assert mean_std([]) == (None, None)


@pytest.mark.parametrize("vector", VECTORS["mcnemar"])
def test_mcnemar_matches_the_vectors(vector):
    assert mcnemar_exact(vector["b"], vector["c"]) == pytest.approx(vector["p"], rel=1e-12)
    assert mcnemar_exact(vector["c"], vector["b"]) == pytest.approx(vector["p"], rel=1e-12)


def test_interval_of_a_fair_coin_has_the_normal_width():
    interval = bootstrap_interval([0.0, 1.0] * 200)
    half_width = 1.96 * 0.5 / np.sqrt(400)
    assert interval.low == pytest.approx(0.5 - half_width, abs=0.004)
    assert interval.high == pytest.approx(0.5 + half_width, abs=0.004)


def test_interval_repeats_exactly_and_moves_with_the_seed():
    values = np.random.default_rng(3).random(50)
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


def test_interval_of_few_distinct_values_agrees_with_that_of_many():
    few = np.array([0.0, 0.25, 1.0] * 60)
    many = few + np.linspace(-1e-6, 1e-6, len(few))
    assert bootstrap_interval(few).low == pytest.approx(bootstrap_interval(many).low, abs=0.006)
    assert bootstrap_interval(few).high == pytest.approx(bootstrap_interval(many).high, abs=0.006)


def test_interval_of_equal_values_is_a_point_and_of_one_value_none():
    assert bootstrap_interval([0.5, 0.5, 0.5]) == Interval(0.5, 0.5)
    assert bootstrap_interval([0.5]) is None
    assert bootstrap_interval([]) is None


@settings(max_examples=10, deadline=None)
@given(scores)
def test_interval_stays_inside_the_values(values):
    interval = bootstrap_interval(values)
    assert min(values) <= interval.low <= interval.high <= max(values)


def test_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(60):
        interval = bootstrap_interval(rng.binomial(1, 0.4, size=100).astype(float), seed=trial)
        covered += interval.low <= 0.4 <= interval.high
    assert covered >= 51  # 57 expected; fewer than 51 has probability below 1%


def test_sign_flip_of_all_positive_differences_is_two_patterns_of_all():
    assert sign_flip_test([0.1, 0.4, 0.2, 0.3, 0.5]) == pytest.approx(2 / 2**5)


def test_sign_flip_ignores_ties_and_handles_none_left():
    assert sign_flip_test([0.1, 0.0, 0.4, 0.2, 0.0]) == pytest.approx(2 / 2**3)
    assert sign_flip_test([0.0, 0.0]) == 1.0
    assert sign_flip_test([0.7]) == 1.0
    assert sign_flip_test([]) == 1.0


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=8))
def test_sign_flip_equals_brute_force(differences):
    nonzero = np.array([d for d in differences if d], dtype=float)
    if len(nonzero) == 0:
        return
    means = [abs(np.dot(signs, nonzero)) for signs in product([1, -1], repeat=len(nonzero))]
    expected = np.mean([mean >= abs(nonzero.sum()) - 1e-9 for mean in means])
    assert sign_flip_test(differences) == pytest.approx(expected)


def test_sampled_sign_flip_agrees_with_mcnemar_on_binary_pairs():
    differences = [1.0] * 40 + [-1.0] * 25 + [0.0] * 200
    assert sign_flip_test(differences) == pytest.approx(mcnemar_exact(40, 25), abs=0.012)


def test_sampled_sign_flip_is_never_zero_and_repeats():
    differences = np.full(500, 0.5)
    assert sign_flip_test(differences) == sign_flip_test(differences) == pytest.approx(1 / 10_000)


def test_sign_flip_agrees_with_scipy_on_many_pairs():
    differences = np.random.default_rng(5).normal(0.12, 1.0, size=200)
    expected = stats.permutation_test(
        (differences, np.zeros(200)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        n_resamples=9_999,
        rng=np.random.default_rng(1),
    )
    assert sign_flip_test(differences) == pytest.approx(expected.pvalue, abs=0.015)


def test_comparison_at_one_repeat_is_mcnemar_on_common_tasks_only():
    a = {"t1": 1.0, "t2": 1.0, "t3": 1.0, "t4": 0.0, "only-a": 1.0}
    b = {"t1": 0.0, "t2": 0.0, "t3": 1.0, "t4": 0.0, "only-b": 0.0}
    result = compare(a, b, repeats=1)
    assert (result.n_tasks, result.n_only_one, result.test) == (4, 2, "mcnemar")
    assert (result.mean_a, result.mean_b, result.difference) == (0.75, 0.25, 0.5)
    assert result.p == mcnemar_exact(2, 0) == 0.5


def test_comparison_of_repeats_is_the_sign_flip_test_also_when_means_happen_to_be_whole():
    a, b = {"t1": 1.0, "t2": 1.0, "t3": 1.0}, {"t1": 0.0, "t2": 0.0, "t3": 0.0}
    assert compare(a, b, repeats=3).test == "sign-flip"
    assert compare(a, b, repeats=3).p == pytest.approx(0.25)


def test_comparison_of_partial_rewards_at_one_repeat_is_the_sign_flip_test():
    assert compare({"t1": 0.5, "t2": 1.0}, {"t1": 0.0, "t2": 0.0}, repeats=1).test == "sign-flip"


def test_comparison_without_common_tasks_says_nothing():
    result = compare({"a": 1.0}, {"b": 0.0}, repeats=1)
    assert (result.n_tasks, result.n_only_one) == (0, 2)
    assert result.difference is result.interval is result.p is result.test is None


def test_pairing_narrows_the_interval_where_tasks_differ_in_difficulty():
    rng = np.random.default_rng(0)
    difficulty = rng.random(200)
    a = {str(i): float(d) for i, d in enumerate(difficulty)}
    b = {str(i): float(max(0.0, d - 0.05)) for i, d in enumerate(difficulty)}
    paired = compare(a, b, repeats=3).interval
    alone = bootstrap_interval(list(a.values()))
    assert paired.high - paired.low < 0.2 * (alone.high - alone.low)
    assert paired.low > 0
