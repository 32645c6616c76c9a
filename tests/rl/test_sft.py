"""SFT: what is weighed, in what order, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.errors import TrainingDiverged
from rl.models import load_policy
from rl.rows import rows_of
from rl.settings import SFTSettings, SFTStage, TrainerSettings
from rl.sft import lr_factor, run_sft, sft_weights
from rl.trainer import Trainer
from tests.rl.samples import random_rollout, random_rows


def settings(steps: int = 5, tokens: int = 100, **changes) -> SFTSettings:
    return SFTSettings(stages=(SFTStage(steps=steps, tokens_per_step=tokens),), **changes)


def test_actions_and_summaries_weigh_one_observations_a_little_and_the_window_nothing():
    row = rows_of(random_rollout(np.random.default_rng(0), [[2, 1], [2], [1]]))[0]
    #        context       action    observation action  observation instruction summary
    expected = [0.0] * 6 + [1.0] * 2 + [0.1] * 3 + [1.0] + [0.1] * 3 + [0.0] * 2 + [1.0] * 2
    assert sft_weights(row, 0.1).tolist() == expected
    assert sft_weights(row, 0.0).tolist() == [float(w == 1.0) for w in expected]


def test_the_loss_falls_and_is_that_of_actions_and_summaries(random_checkpoint):
    policy = load_policy(random_checkpoint)
    metrics = list(run_sft(policy, [random_rows()], settings(60, 200, lr=1e-2), seed=0))
    assert metrics[-1]["sft/loss"] < 0.7 * metrics[0]["sft/loss"]


def test_the_first_loss_is_the_mean_over_optimized_tokens(random_checkpoint):
    rows = random_rows()
    everything = sum(len(r.token_ids) for r in rows)
    first = next(run_sft(load_policy(random_checkpoint), [rows], settings(1, everything), seed=0))
    expected = -np.concatenate(Trainer(random_checkpoint, TrainerSettings()).logprobs(rows)).mean()
    assert first["sft/loss"] == pytest.approx(expected, rel=1e-5)
    assert first["sft/tokens"] == everything


def test_without_context_weight_observations_do_not_matter(random_checkpoint):
    rows = random_rows()
    last = [np.flatnonzero(r.optimized)[-1] for r in rows]
    changed = []
    for row, end in zip(rows, last, strict=True):
        ids = row.token_ids.copy()
        ids[end + 1 :] = 0
        changed.append(replace(row, token_ids=ids))
    a, b = load_policy(random_checkpoint), load_policy(random_checkpoint)
    runs = [list(run_sft(m, [r], settings(context_weight=0.0), seed=0)) for m, r in ((a, rows), (b, changed))]
    assert runs[0] == runs[1]


def test_one_seed_gives_bit_equal_weights_and_another_an_other_order(random_checkpoint):
    runs = []
    for seed in (0, 0, 1):
        policy = load_policy(random_checkpoint)
        metrics = list(run_sft(policy, [random_rows()], settings(), seed=seed))
        runs.append((metrics, policy.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(w, runs[1][1][name]) for name, w in runs[0][1].items())
    assert runs[0][0] != runs[2][0]


def test_stages_read_their_own_rows_under_one_cosine(random_checkpoint):
    rows = random_rows()
    stages = (SFTStage(steps=2, tokens_per_step=1), SFTStage(steps=2, tokens_per_step=1))
    metrics = list(
        run_sft(
            load_policy(random_checkpoint), [rows[:1], rows[-1:]], SFTSettings(stages=stages, lr=1e-3, warmup=0), seed=0
        )
    )
    lengths = [float(len(rows[0].token_ids))] * 2 + [float(len(rows[-1].token_ids))] * 2
    assert [m["sft/tokens"] for m in metrics] == lengths
    rates = [m["sft/learning_rate"] for m in metrics]
    assert rates == pytest.approx([1e-3 * 0.5 * (1 + np.cos(np.pi * i / 4)) for i in range(4)])


def test_the_learning_rate_rises_over_the_warmup_and_then_falls_to_zero():
    assert [lr_factor(x, 0.2) for x in (0.0, 0.1, 0.2)] == pytest.approx([0.0, 0.5, 1.0])
    assert [lr_factor(x, 0.2) for x in (0.6, 1.0)] == pytest.approx([0.5, 0.0])
    assert lr_factor(0.0, 0.0) == 1.0


def test_every_row_is_read_once_per_epoch(random_checkpoint):
    rows = random_rows()
    everything = sum(len(r.token_ids) for r in rows)
    one_row_a_step = list(run_sft(load_policy(random_checkpoint), [rows], settings(len(rows), 1), seed=3))
    assert sum(m["sft/tokens"] for m in one_row_a_step) == everything


@pytest.mark.parametrize("rows", [[], [[]], [random_rows(), random_rows()]])
def test_a_stage_without_rows_is_refused(random_checkpoint, rows):
    with pytest.raises(ValueError, match="non-empty list of rows"):
        next(run_sft(load_policy(random_checkpoint), rows, settings(), seed=0))


def test_steps_that_are_not_finite_end_the_run(random_checkpoint):
    policy = load_policy(random_checkpoint)
    policy.get_input_embeddings().weight.data.fill_(torch.inf)
    with pytest.raises(TrainingDiverged):
        list(run_sft(policy, [random_rows()], settings(), seed=0))
