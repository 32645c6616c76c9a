"""Advantages: reference numbers, the paper's worked numbers, brute force, and properties."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.advantages import (
    AdvantageSettings,
    advantage_metrics,
    batch_advantages,
    cross_segment_factor,
    group_advantages,
    length_adaptive_lambda,
    rollout_advantages,
    segment_factors,
)
from rl.rows import Row, gather_segments, scatter_segments

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())


def values_of(rollout: dict, train_summaries: bool) -> list[np.ndarray]:
    return [
        np.array(s["values"] if train_summaries or s["kind"] == "execution" else [], dtype=np.float64)
        for s in rollout["segments"]
    ]


def settings_of(expected: dict) -> AdvantageSettings:
    return AdvantageSettings(**{k: v for k, v in expected["settings"].items() if k != "train_summaries"})


CASES = [(c, e) for c, case in enumerate(VECTORS["cases"]) for e in range(len(case["expected"]))]


@pytest.mark.parametrize(("case", "expectation"), CASES)
def test_reference_advantages(case, expectation):
    rollouts = VECTORS["cases"][case]["rollouts"]
    expected = VECTORS["cases"][case]["expected"][expectation]
    train_summaries = expected["settings"]["train_summaries"]
    got = batch_advantages(
        [values_of(r, train_summaries) for r in rollouts], [r["reward"] for r in rollouts], settings_of(expected)
    )
    for rollout, segments, want in zip(rollouts, got, expected["advantages"], strict=True):
        for segment, a, w in zip(rollout["segments"], segments, want, strict=True):
            if train_summaries or segment["kind"] == "execution":
                np.testing.assert_allclose(a, w, rtol=0, atol=1e-12)
            else:
                assert len(a) == 0
                assert not any(w)


@pytest.mark.parametrize("case", VECTORS["token_rows"])
@pytest.mark.parametrize("cross_segment", ["discount", "none", "exact"])
def test_observations_are_skipped_and_values_read_before_the_token(case, cross_segment):
    """Rows with observations between the actions; V of token t stands at position t − 1 of the critic's output."""
    rows, read = [], []
    for ordinal, segment in enumerate(case["segments"]):
        mask = np.array(segment["optimized_mask"], bool)
        n = len(mask)
        on = np.where(mask, ordinal, -1).astype(np.int32)
        rows.append(
            Row("r", np.zeros(n, np.int32), on, np.zeros(n, np.float32), np.where(mask, 0, -1).astype(np.int32), ~mask)
        )
        read.append(np.array(segment["critic_output"])[np.flatnonzero(mask) - 1])
    settings = AdvantageSettings(cross_segment=cross_segment)
    segments = rollout_advantages(gather_segments(rows, read)["r"], case["reward"], settings)
    for row, a, want in zip(
        rows, scatter_segments(rows, {"r": segments}), case["expected"][cross_segment], strict=True
    ):
        whole = np.zeros(len(row.token_ids))
        whole[row.optimized] = a
        np.testing.assert_allclose(whole, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", VECTORS["group_advantages"])
def test_reference_group_advantages(case):
    np.testing.assert_allclose(group_advantages(case["rewards"]), case["expected"], rtol=0, atol=1e-12)


# The paper's worked numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [100, 2_000, 12_000, 120_000])
def test_the_reward_reaches_the_first_token_with_the_same_weight_at_any_length(length):
    assert length_adaptive_lambda(1.5, length) ** length == pytest.approx(math.exp(-1 / 1.5), rel=4e-3)


def test_two_compactions_worked_example():
    """Executions of 12,000, summaries of 2,200, λ from l = 12,000: 26,200 tokens come after the first summary."""
    lengths = [12_000, 2_200, 12_000, 2_200, 12_000]
    later = sum(lengths[2:])
    assert later == 26_200
    assert cross_segment_factor(later, 12_000, alpha=1.5) == pytest.approx(0.233, abs=5e-4)
    assert segment_factors(lengths, AdvantageSettings(cross_segment="none"))[1] == 1.0


@pytest.mark.parametrize(
    ("later", "length", "expected"),
    [
        (30_000, 800, 1.4e-11),
        (40_000, 2_048, 2.2e-6),
        (30_000, 30_000, 0.513),
        (90_000, 30_000, 0.135),
        (90_000, 120_000, 0.607),
    ],
)
def test_the_choice_of_length_decides_whether_summaries_learn(later, length, expected):
    assert cross_segment_factor(later, length, alpha=1.5) == pytest.approx(expected, rel=0.03)


# Hand-computed ------------------------------------------------------------------------------------------------------


def test_two_tokens_by_hand():
    """γ = 1, α·l = 3, λ = 2/3: δ = (0.4 − 0.5, 1 − 0.4), A = (−0.1 + 2/3·0.6, 0.6)."""
    (a,) = rollout_advantages([np.array([0.5, 0.4])], 1.0, AdvantageSettings())
    np.testing.assert_allclose(a, [0.3, 0.6], atol=1e-15)


def test_the_reward_stands_at_the_end_of_every_segment():
    """Values 0, so a segment's last token has the reward times its factor (γλ)^N with N tokens after the segment."""
    segments = [np.zeros(2), np.zeros(1), np.zeros(3)]
    decay = length_adaptive_lambda(1.5, 6)
    a = rollout_advantages(segments, 1.0, AdvantageSettings())
    assert [float(s[-1]) for s in a] == pytest.approx([decay**4, decay**3, 1.0])
    assert float(a[0][0]) == pytest.approx(decay**5), "the reward's true distance"
    b = rollout_advantages(segments, 1.0, AdvantageSettings(cross_segment="none"))
    assert [float(s[-1]) for s in b] == [1.0, 1.0, 1.0]


def brute_force_exact(values: list[np.ndarray], reward: float, gamma: float, alpha: float) -> np.ndarray:
    """Σ over all later tokens, one by one, no recursion."""
    v = np.concatenate(values)
    n = len(v)
    decay = gamma * length_adaptive_lambda(alpha, n)
    delta = [(reward if i == n - 1 else 0.0) + gamma * (v[i + 1] if i + 1 < n else 0.0) - v[i] for i in range(n)]
    return np.array([sum(decay ** (j - i) * delta[j] for j in range(i, n)) for i in range(n)])


segment_values = st.lists(
    st.lists(st.floats(0, 1), max_size=6).map(lambda v: np.array(v, dtype=np.float64)), min_size=1, max_size=7
)
gammas = st.sampled_from([1.0, 0.99, 0.5])
alphas = st.sampled_from([0.01, 0.05, 0.3, 1.5, 10.0])


@given(values=segment_values, reward=st.floats(0, 1), gamma=gammas, alpha=alphas)
def test_exact_is_brute_force(values, reward, gamma, alpha):
    settings = AdvantageSettings(cross_segment="exact", gamma=gamma, alpha=alpha)
    got = rollout_advantages(values, reward, settings)
    assert [len(a) for a in got] == [len(v) for v in values]
    np.testing.assert_allclose(np.concatenate(got), brute_force_exact(values, reward, gamma, alpha), rtol=0, atol=1e-12)


@given(
    values=segment_values,
    reward=st.floats(0, 1),
    gamma=gammas,
    alpha=alphas,
    length=st.sampled_from(["rollout", "segment"]),
    cross=st.sampled_from(["discount", "none"]),
)
def test_no_settings_and_no_empty_segment_make_a_nan(values, reward, gamma, alpha, length, cross):
    settings = AdvantageSettings(gamma=gamma, alpha=alpha, lambda_length=length, cross_segment=cross)
    got = rollout_advantages(values, reward, settings)
    assert [len(a) for a in got] == [len(v) for v in values]
    assert all(np.isfinite(a).all() for a in got)
    factors = segment_factors([len(v) for v in values], settings)
    assert np.all((factors >= 0) & (factors <= 1))


@given(values=segment_values, reward=st.floats(0, 1), gamma=gammas, alpha=alphas)
def test_discount_is_none_times_the_factor(values, reward, gamma, alpha):
    discount = AdvantageSettings(gamma=gamma, alpha=alpha)
    none = AdvantageSettings(gamma=gamma, alpha=alpha, cross_segment="none")
    total = sum(len(v) for v in values)
    later = total
    for v, a, b in zip(
        values, rollout_advantages(values, reward, discount), rollout_advantages(values, reward, none), strict=True
    ):
        later -= len(v)
        np.testing.assert_allclose(
            a, (gamma * length_adaptive_lambda(alpha, total)) ** later * b, rtol=1e-9, atol=1e-15
        )


@given(values=segment_values, reward=st.floats(0, 1), where=st.integers(0, 7))
def test_an_empty_segment_changes_nothing(values, reward, where):
    settings = AdvantageSettings()
    with_empty = [*values[:where], np.zeros(0), *values[where:]]
    a = np.concatenate(rollout_advantages(values, reward, settings))
    b = np.concatenate(rollout_advantages(with_empty, reward, settings))
    assert np.array_equal(a, b)


def test_a_single_segment_is_the_same_in_all_three_forms():
    values = [np.array([0.3, 0.1, 0.7])]
    forms = [
        rollout_advantages(values, 1.0, AdvantageSettings(cross_segment=c))[0] for c in ("discount", "none", "exact")
    ]
    np.testing.assert_allclose(forms[0], forms[1], atol=1e-15)
    np.testing.assert_allclose(forms[0], forms[2], atol=1e-15)


def test_lambda_is_clamped():
    assert length_adaptive_lambda(0.05, 3) == 0.0
    assert length_adaptive_lambda(1.5, 0) == 0.0
    assert length_adaptive_lambda(1.5, 10**18) < 1.0


def test_the_factor_keeps_its_precision_at_long_lengths():
    """(1 − 1/(αl))^N with αl = 1.5e9: the direct power loses seven digits, the log1p form none."""
    n, length = 10**9, 10**9
    x = -1 / (1.5 * length)
    expected = math.exp(n * (x - x * x / 2))
    assert cross_segment_factor(n, length, alpha=1.5) == pytest.approx(expected, rel=1e-13)


def test_exact_with_a_segment_length_is_refused():
    with pytest.raises(ValueError, match="lambda_length=rollout"):
        AdvantageSettings(cross_segment="exact", lambda_length="segment")


# Batches ------------------------------------------------------------------------------------------------------------


def test_a_group_counts_each_rollout_once_however_many_segments_it_has():
    values = [[np.zeros(2)] * 3, [np.zeros(2)]]
    got = batch_advantages(values, [1.0, 0.0], AdvantageSettings(estimator="group"), groups=["t", "t"])
    assert [[a.tolist() for a in segments] for segments in got] == [[[1.0, 1.0]] * 3, [[-1.0, -1.0]]]


def test_groups_are_kept_apart():
    settings = AdvantageSettings(estimator="group")
    values = [[np.zeros(1)]] * 4
    got = batch_advantages(values, [1.0, 1.0, 0.0, 1.0], settings, groups=["a", "b", "a", "b"])
    assert [float(s[0][0]) for s in got] == [1.0, 0.0, -1.0, 0.0]


@given(reward=st.floats(0, 1), n=st.integers(0, 9))
def test_equal_rewards_give_zero_and_no_nan(reward, n):
    assert group_advantages([reward] * n).tolist() == [0.0] * n


def test_the_group_estimator_needs_groups():
    with pytest.raises(ValueError, match="group"):
        batch_advantages([[np.zeros(1)]], [1.0], AdvantageSettings(estimator="group"))


def test_whitening_is_over_the_whole_batch():
    rng = np.random.default_rng(0)
    values = [[rng.uniform(size=4), rng.uniform(size=2)], [rng.uniform(size=3), np.zeros(0)]]
    got = batch_advantages(values, [1.0, 0.0], AdvantageSettings(whiten=True))
    flat = np.concatenate([a for segments in got for a in segments])
    assert flat.mean() == pytest.approx(0.0, abs=1e-12)
    assert flat.std() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("values", [[], [[np.zeros(0)]], [[np.zeros(2)]]])
def test_whitening_of_nothing_or_of_equal_advantages_is_no_nan(values):
    settings = AdvantageSettings(whiten=True, estimator="group")
    got = batch_advantages(values, [1.0] * len(values), settings, groups=["t"] * len(values))
    assert all(np.isfinite(a).all() for segments in got for a in segments)


def test_metrics_tell_summaries_from_executions():
    settings = AdvantageSettings()
    values = [[np.zeros(4), np.zeros(2), np.zeros(4)]]
    metrics = advantage_metrics(batch_advantages(values, [1.0], settings), settings)
    decay = length_adaptive_lambda(1.5, 10)
    assert metrics["train/discount_factor_summary"] == pytest.approx(decay**4)
    assert metrics["train/discount_factor_execution"] == pytest.approx((1 + decay**6) / 2)
    assert metrics["train/discount_factor_min"] == pytest.approx(decay**6)
    assert 0 < metrics["train/advantage_abs_summary"] < 1


def test_metrics_leave_out_what_the_batch_does_not_hold():
    settings = AdvantageSettings()
    assert "train/discount_factor_summary" not in advantage_metrics([[np.zeros(3)]], settings)
    assert advantage_metrics([], settings) == {}
