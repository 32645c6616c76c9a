"""Losses: reference numbers and gradients, the global count |M|, and the paper's share of summaries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.losses import critic_loss, policy_loss, predicted_values, token_weights
from rl.rows import Row
from rl.settings import LossSettings

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())
CASES = [
    (c, e, i)
    for c, case in enumerate(VECTORS["cases"])
    for e, expected in enumerate(case["expected"])
    for i in range(len(expected["losses"]))
]


def row_of(rollout_id: str, lengths: list[tuple[int, int]]) -> Row:
    """A row with one context token and (ordinal, number of tokens) stretches."""
    ordinals = np.array([-1] + [o for o, n in lengths for _ in range(n)], np.int32)
    n = len(ordinals)
    return Row(
        rollout_id,
        np.zeros(n, np.int32),
        ordinals,
        np.zeros(n, np.float32),
        np.where(ordinals >= 0, 0, -1).astype(np.int32),
        np.zeros(n, bool),
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("case", "expectation", "index"), CASES)
def test_reference_losses_and_gradients(case, expectation, index, dtype, tolerance):
    expected = VECTORS["cases"][case]["expected"][expectation]
    want = expected["losses"][index]
    settings = LossSettings(**{k: want[k] for k in ("mean", "clip", "eps_low", "eps_high")})
    rows, new, sampled, advantages, gradients = [], [], [], [], []
    wanted = iter(want["d_loss_d_new_logprob"])
    for r, rollout in enumerate(VECTORS["cases"][case]["rollouts"]):
        for ordinal, segment in enumerate(rollout["segments"]):
            gradient = next(wanted)
            if segment["kind"] == "summary" and not expected["settings"]["train_summaries"]:
                assert not any(gradient)
                continue
            rows.append(row_of(str(r), [(ordinal, len(segment["values"]))]))
            new += segment["new_logprobs"]
            sampled += segment["sampled_logprobs"]
            advantages += expected["advantages"][r][ordinal]
            gradients += gradient
    weights = np.concatenate(token_weights(rows, settings))
    logprobs = torch.tensor(new, dtype=dtype, requires_grad=True)
    loss = policy_loss(
        logprobs,
        torch.tensor(sampled, dtype=dtype),
        torch.tensor(advantages, dtype=dtype),
        torch.tensor(weights, dtype=dtype),
        settings,
    ).loss
    loss.backward()
    if want["loss"] is not None:
        assert loss.item() == pytest.approx(want["loss"], abs=tolerance)
    np.testing.assert_allclose(logprobs.grad.numpy(), gradients, rtol=0, atol=tolerance)
    assert len(new) == want["optimized_tokens"]
    assert sum(r.n_optimized > 0 for r in rows) == want["optimized_segments"]


# Weights ------------------------------------------------------------------------------------------------------------


def share_of_summaries(mean: str) -> float:
    """Rollout A without compaction (20,000 tokens) beside B with three (4 × 20,000 + 3 × 2,200)."""
    b = [row_of("b", [(2 * i, 20_000)] + ([(2 * i + 1, 2_200)] if i < 3 else [])) for i in range(4)]
    rows = [row_of("a", [(0, 20_000)]), *b]
    weights = np.concatenate(token_weights(rows, LossSettings(mean=mean)))
    ordinals = np.concatenate([r.ordinals for r in rows])
    assert weights.sum() == pytest.approx(1.0)
    return float(weights[ordinals % 2 == 1].sum())


def test_token_mean_gives_summaries_their_share_of_tokens():
    assert share_of_summaries("token") == pytest.approx(0.062, abs=5e-4)


def test_segment_mean_gives_summaries_their_share_of_segments():
    assert share_of_summaries("segment") == pytest.approx(0.375)


@given(
    lengths=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    mean=st.sampled_from(["token", "segment"]),
)
def test_weights_sum_to_one_over_what_is_included(lengths, seed, mean):
    rows = [row_of(str(i), list(enumerate(ns))) for i, ns in enumerate(lengths)]
    rng = np.random.default_rng(seed)
    included = [rng.uniform(size=r.n_optimized) < 0.5 for r in rows]
    weights = token_weights(rows, LossSettings(mean=mean), included)
    assert all(np.all(w[~m] == 0) and np.all(w[m] > 0) for w, m in zip(weights, included, strict=True))
    total = sum(w.sum() for w in weights)
    assert total == pytest.approx(1.0 if any(m.any() for m in included) else 0.0)


def test_excluded_tokens_are_in_no_count():
    rows = [row_of("a", [(0, 4)]), row_of("b", [(0, 4), (1, 2)])]
    included = [np.array([1, 1, 0, 0], bool), np.array([1, 1, 1, 1, 0, 0], bool)]
    token = np.concatenate(token_weights(rows, LossSettings(), included))
    assert np.unique(token).tolist() == [0.0, 1 / 6]
    segment = token_weights(rows, LossSettings(mean="segment"), included)
    assert segment[0].tolist() == [1 / 4, 1 / 4, 0, 0]
    assert segment[1].tolist() == [1 / 8] * 4 + [0, 0]


@pytest.mark.parametrize("mean", ["token", "segment"])
def test_the_count_of_an_empty_batch_is_one(mean):
    rows = [row_of("a", [(0, 2)])]
    (weights,) = token_weights(rows, LossSettings(mean=mean), [np.zeros(2, bool)])
    assert weights.tolist() == [0.0, 0.0]
    assert token_weights([], LossSettings(mean=mean)) == []


# Loss ---------------------------------------------------------------------------------------------------------------


def loss_at(log_ratio: float, advantage: float, settings: LossSettings, weight: float = 1.0):
    logprob = torch.tensor([-1.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    result = policy_loss(logprob, -one, advantage * one, weight * one, settings)
    result.loss.backward()
    return result, float(logprob.grad)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "moves"),
    [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False), (0.1, 1.0, True)],
)
def test_ppo_clips_only_what_went_far_enough(log_ratio, advantage, moves):
    result, gradient = loss_at(log_ratio, advantage, LossSettings())
    assert (gradient != 0) is moves
    assert float(result.clip_fraction) == float(not moves)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("log_ratio", "inside"), [(0.0, True), (-1.5, True), (1.3, True), (-1.7, False), (1.4, False)])
def test_double_sided_drops_tokens_outside_whatever_the_sign(log_ratio, inside, advantage):
    settings = LossSettings(clip="double_sided", eps_low=0.8, eps_high=3.0)
    result, gradient = loss_at(log_ratio, advantage, settings)
    assert gradient == pytest.approx(-np.exp(log_ratio) * advantage if inside else 0.0)
    assert float(result.clip_fraction) == float(not inside)


@pytest.mark.parametrize("clip", ["ppo", "double_sided"])
@pytest.mark.parametrize("log_ratio", [-1e4, -200.0, 200.0, 1e4])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_extreme_ratios_stay_finite(clip, log_ratio, weight):
    result, gradient = loss_at(log_ratio, -1.0, LossSettings(clip=clip), weight)
    assert np.isfinite([gradient, float(result.loss.detach()), float(result.kl_to_sampler)]).all()


@pytest.mark.parametrize("clip", ["ppo", "double_sided"])
def test_tokens_of_weight_zero_give_zero_whatever_their_numbers(clip):
    logprobs = torch.tensor([-1.0, -torch.inf, torch.nan], requires_grad=True)
    result = policy_loss(
        logprobs,
        torch.tensor([-1.0, -1.0, -1.0]),
        torch.tensor([1.0, torch.nan, 1.0]),
        torch.tensor([1.0, 0.0, 0.0]),
        LossSettings(clip=clip),
    )
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert logprobs.grad[1:].tolist() == [0.0, 0.0]


def test_the_distance_to_the_sampler_is_zero_on_policy_and_never_negative():
    assert float(loss_at(0.0, 1.0, LossSettings())[0].kl_to_sampler) == 0.0
    assert all(float(loss_at(x, 1.0, LossSettings())[0].kl_to_sampler) > 0 for x in (-0.3, 0.3))


def test_critic_losses_by_hand():
    predictions = torch.tensor([0.0, 2.0], dtype=torch.float64)
    targets = torch.tensor([1.0, 0.0], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
    bce = 0.5 * np.log(2) + 0.5 * (2 + np.log1p(np.exp(-2)))
    assert float(critic_loss(predictions, targets, weights, "bce")) == pytest.approx(bce)
    assert float(critic_loss(predictions, targets, weights, "mse")) == pytest.approx(0.25 * 1 + 0.25 * 4)
    assert predicted_values(predictions, "mse").tolist() == [0.0, 2.0]
    assert predicted_values(predictions, "bce").tolist() == pytest.approx([0.5, 1 / (1 + np.exp(-2))])
