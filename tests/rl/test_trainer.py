"""The trainer on a real, tiny model: order, invariance to the split, on-policy ratio, guards, continuation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GraniteConfig, GraniteForCausalLM

from rl.advantages import AdvantageSettings, batch_advantages
from rl.batching import micro_batches
from rl.checkpoint import latest_checkpoint, load_checkpoint, new_checkpoint
from rl.errors import CheckpointNotFound, TrainingDiverged
from rl.losses import policy_loss, token_weights
from rl.models import load_critic, load_policy, token_logprobs
from rl.rows import Row, gather_segments, rows_of, scatter_segments
from rl.settings import LossSettings, TrainerSettings
from rl.trainer import Trainer
from tests.rl.engines.served import build
from tests.rl.samples import random_batch, random_rows


def trainer(checkpoint: Path, **changes: Any) -> Trainer:
    return Trainer(checkpoint, TrainerSettings(**{"policy_lr": 1e-2, "critic_lr": 1e-2} | changes))


def random_advantages(rows: list[Row], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=row.n_optimized) for row in rows]


def on_policy(rows: list[Row], logprobs: list[np.ndarray]) -> list[Row]:
    """The same rows with the logprobs of the model that is to be trained."""
    out = []
    for row, values in zip(rows, logprobs, strict=True):
        sampled = np.zeros(len(row.token_ids), np.float32)
        sampled[row.optimized] = values
        out.append(replace(row, logprobs=sampled))
    return out


def full_forward(model: Any, row: Row, temperature: float) -> torch.Tensor:
    """[n_optimized] logprobs by a plain forward pass over the whole row, language head everywhere."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0] / temperature
    at = np.flatnonzero(row.optimized)
    return F.log_softmax(logits, -1)[at - 1, row.token_ids[at].astype(np.int64)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(random_checkpoint, temperature):
    rows = random_rows()
    model = load_policy(random_checkpoint)
    got = trainer(random_checkpoint, temperature=temperature, micro_batch_tokens=64).logprobs(rows)
    for row, logprobs in zip(rows, got, strict=True):
        np.testing.assert_allclose(logprobs, full_forward(model, row, temperature), rtol=0, atol=1e-5)


def test_values_are_read_at_the_position_before_the_token(random_checkpoint):
    t = trainer(random_checkpoint, critic_loss="mse")
    torch.nn.init.normal_(t.critic.head.weight)
    row = random_rows()[0]
    with torch.no_grad():
        hidden = t.critic.backbone(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None]).last_hidden_state
        everywhere = t.critic.head(hidden)[0, :, 0].numpy()
    np.testing.assert_allclose(t.values([row])[0], everywhere[np.flatnonzero(row.optimized) - 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "start"), [("bce", 0.5), ("mse", 0.0)])
def test_the_critic_starts_from_the_policy_with_a_zero_head(random_checkpoint, kind, start):
    t = trainer(random_checkpoint, critic_loss=kind)
    assert all(np.all(v == start) for v in t.values(random_rows()))
    backbone = dict(t.critic.backbone.named_parameters())
    assert all(torch.equal(p, backbone[name]) for name, p in t.policy.get_decoder().named_parameters())


def test_the_ratio_is_one_on_the_first_update_of_on_policy_rows(random_checkpoint):
    t = trainer(random_checkpoint)
    rows = on_policy(random_rows(), t.logprobs(random_rows()))
    metrics = t.update_policy(rows, random_advantages(rows))
    assert metrics["train/clip_fraction"] == 0.0
    assert metrics["train/kl_to_sampler"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["train/logprob_mismatch"] == pytest.approx(0.0, abs=1e-5)
    assert t.update_policy(rows, random_advantages(rows))["train/kl_to_sampler"] > 1e-6


def test_shared_and_separate_rows_give_the_same_numbers_with_fewer_tokens(random_checkpoint):
    rollouts = random_batch()
    results, forward_tokens = [], []
    for share in (True, False):
        t = trainer(random_checkpoint, dtype="float64", micro_batch_tokens=128)
        torch.nn.init.normal_(t.critic.head.weight, std=0.1)
        t.critic.head.weight.data.fill_(0.1)
        rows = [row for r in rollouts for row in rows_of(r, share_prefix=share)]
        values = gather_segments(rows, t.values(rows))
        rewards = [float(r.outcome.reward or 0) for r in rollouts]
        advantages = batch_advantages(list(values.values()), rewards, AdvantageSettings())
        per_row = scatter_segments(rows, dict(zip(values, advantages, strict=True)))
        metrics = t.update_policy(rows, per_row)
        results.append((values, metrics["train/loss"], metrics["train/grad_norm"]))
        forward_tokens.append(sum(len(r.token_ids) for r in rows))
    (a, loss_a, norm_a), (b, loss_b, norm_b) = results
    for rollout_id, segments in a.items():
        np.testing.assert_allclose(np.concatenate(segments), np.concatenate(b[rollout_id]), rtol=1e-6)
    assert loss_a == pytest.approx(loss_b, rel=1e-6)
    assert norm_a == pytest.approx(norm_b, rel=1e-6)
    assert forward_tokens[0] < forward_tokens[1]


# Invariance to micro-batching ---------------------------------------------------------------------------------------

Weigh = Callable[[list[Row], LossSettings], list[np.ndarray]]


def loss_and_gradient(
    checkpoint: Path, rows: list[Row], budget: int, mean: str, weigh: Weigh
) -> tuple[float, torch.Tensor]:
    """In fp64, summed over micro-batches. `weigh` gives the weights of all rows; a mutant counts them by parts."""
    settings = LossSettings(mean=mean)
    model = load_policy(checkpoint, torch.float64)
    advantages = {id(row): np.sin(np.arange(row.n_optimized) + row.token_ids[0]) for row in rows}
    flat = {
        "advantages": np.concatenate([advantages[id(row)] for row in rows]),
        "sampled": np.concatenate([row.logprobs[row.optimized] for row in rows]).astype(np.float64),
        "weights": np.concatenate(weigh(rows, settings)),
    }
    tensors = {name: torch.from_numpy(values) for name, values in flat.items()}
    total = 0.0
    for batch in micro_batches(rows, [row.optimized for row in rows], budget):
        at = batch.places
        logprobs = token_logprobs(model, batch, 1.0)
        loss = policy_loss(
            logprobs, tensors["sampled"][at], tensors["advantages"][at], tensors["weights"][at], settings
        ).loss
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


def counted_per_micro_batch(rows: list[Row], settings: LossSettings) -> list[np.ndarray]:
    """The mutant: |M| counted over a part of the batch (here pairs of rows), parts averaged."""
    parts = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    return [weights / len(parts) for part in parts for weights in token_weights(part, settings)]


@pytest.mark.parametrize("mean", ["token", "segment"])
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_order(random_checkpoint, mean):
    rows = random_rows()
    loss, gradient = loss_and_gradient(random_checkpoint, rows, 10_000, mean, token_weights)
    for budget in (1, 70, 200):
        for order in (rows, rows[::-1], [rows[i] for i in np.random.default_rng(budget).permutation(len(rows))]):
            other, other_gradient = loss_and_gradient(random_checkpoint, order, budget, mean, token_weights)
            assert other == pytest.approx(loss, rel=1e-9)
            assert torch.norm(other_gradient - gradient) <= 1e-9 * torch.norm(gradient)


def test_a_count_per_micro_batch_would_be_seen(random_checkpoint):
    rows = random_rows()
    loss, gradient = loss_and_gradient(random_checkpoint, rows, 200, "token", token_weights)
    mutant, mutant_gradient = loss_and_gradient(random_checkpoint, rows, 200, "token", counted_per_micro_batch)
    assert abs(mutant - loss) > 1e-3 * abs(loss)
    assert torch.norm(mutant_gradient - gradient) > 1e-3 * torch.norm(gradient)


@pytest.mark.parametrize("budget", [40, 10_000])
def test_the_trainers_metrics_do_not_depend_on_micro_batches(random_checkpoint, budget):
    rows = random_rows()
    reference = trainer(random_checkpoint, dtype="float64", micro_batch_tokens=100)
    other = trainer(random_checkpoint, dtype="float64", micro_batch_tokens=budget)
    targets = [np.full(row.n_optimized, float(i % 2)) for i, row in enumerate(rows)]
    for update in (lambda t: t.update_policy(rows, random_advantages(rows)), lambda t: t.update_critic(rows, targets)):
        a, b = update(reference), update(other)
        assert a == pytest.approx(b, rel=1e-6)


# Order and leaks ----------------------------------------------------------------------------------------------------


def test_the_critics_learning_rate_leaves_this_batchs_advantages_bit_equal(random_checkpoint):
    rollouts = random_batch()
    rows = random_rows()
    weights = []
    for lr in (1e-3, 1e-1):
        t = trainer(random_checkpoint, critic_lr=lr)
        values = gather_segments(rows, t.values(rows))
        targets = [np.full(row.n_optimized, 1.0) for row in rows]
        t.update_critic(rows, targets)
        advantages = batch_advantages(
            list(values.values()), [float(r.outcome.reward or 0) for r in rollouts], AdvantageSettings()
        )
        t.update_policy(rows, scatter_segments(rows, dict(zip(values, advantages, strict=True))))
        weights.append((advantages, t.weights(), t.values(rows)))
    for a, b in zip(weights[0][0], weights[1][0], strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(w, weights[1][1][name]) for name, w in weights[0][1].items())
    assert not np.array_equal(weights[0][2][0], weights[1][2][0]), "the critics themselves differ"


def test_policy_and_critic_may_be_updated_in_either_order(random_checkpoint):
    rows = random_rows()
    targets = [np.full(row.n_optimized, 1.0) for row in rows]
    a, b = trainer(random_checkpoint), trainer(random_checkpoint)
    a.update_critic(rows, targets)
    a.update_policy(rows, random_advantages(rows))
    b.update_policy(rows, random_advantages(rows))
    b.update_critic(rows, targets)
    assert all(torch.equal(w, b.weights()[name]) for name, w in a.weights().items())
    assert all(np.array_equal(x, y) for x, y in zip(a.values(rows), b.values(rows), strict=True))


# Learning -----------------------------------------------------------------------------------------------------------


def test_the_policy_moves_towards_good_tokens_and_away_from_bad_ones(random_checkpoint):
    t = trainer(random_checkpoint, policy_lr=3e-3)
    rows = on_policy(random_rows(), t.logprobs(random_rows()))
    signs = [np.where(np.arange(row.n_optimized) % 2, 1.0, -1.0) for row in rows]
    before = np.concatenate(t.logprobs(rows))
    t.update_policy(rows, signs)
    change = np.concatenate(t.logprobs(rows)) - before
    flat = np.concatenate(signs)
    assert change[flat > 0].mean() > 0 > change[flat < 0].mean()


@pytest.mark.parametrize("kind", ["bce", "mse"])
def test_the_critic_learns_its_targets(random_checkpoint, kind):
    t = trainer(random_checkpoint, critic_loss=kind, critic_lr=1e-2)
    rows = random_rows()
    targets = [np.full(row.n_optimized, float(i % 2)) for i, row in enumerate(rows)]
    first = t.update_critic(rows, targets, updates=40)
    last = t.update_critic(rows, targets)
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert last["critic/explained_variance"] > 0.8
    assert last["critic/loss"] < first["critic/loss"]


def test_excluded_tokens_move_nothing(random_checkpoint):
    rows = random_rows()
    a, b = trainer(random_checkpoint), trainer(random_checkpoint)
    included = [np.full(row.n_optimized, i != 0) for i, row in enumerate(rows)]
    advantages = random_advantages(rows)
    a.update_policy(rows, advantages, included)
    b.update_policy(rows, [np.full(rows[0].n_optimized, 99.0), *advantages[1:]], included)
    assert all(torch.equal(w, b.weights()[name]) for name, w in a.weights().items())


def test_equal_targets_leave_out_the_explained_variance(random_checkpoint):
    rows = random_rows()
    metrics = trainer(random_checkpoint).update_critic(rows, [np.ones(row.n_optimized) for row in rows])
    assert "critic/explained_variance" not in metrics
    assert np.isfinite(list(metrics.values())).all()


def test_tokens_of_other_versions_are_not_in_the_mismatch(random_checkpoint):
    t = trainer(random_checkpoint)
    rows = random_rows()
    assert "train/logprob_mismatch" in t.update_policy(rows, random_advantages(rows))
    assert t.version == 1
    assert "train/logprob_mismatch" not in t.update_policy(rows, random_advantages(rows))


def test_an_empty_batch_changes_nothing(random_checkpoint):
    t = trainer(random_checkpoint)
    before = t.weights()
    assert t.values([]) == []
    metrics = t.update_policy([], []) | t.update_critic([], [])
    assert np.isfinite(list(metrics.values())).all()
    assert all(torch.equal(w, t.weights()[name]) for name, w in before.items())


# Guard --------------------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_is_skipped_counted_and_ends_after_a_bound(random_checkpoint):
    t = trainer(random_checkpoint, max_skipped=3)
    rows = random_rows()
    poisoned = [np.full(row.n_optimized, np.nan) for row in rows]
    before = t.weights()
    for count in (1, 2):
        metrics = t.update_policy(rows, poisoned)
        assert metrics["train/skipped_steps"] == count
        assert "train/loss" not in metrics, "what is not finite is not logged"
        assert all(torch.equal(w, t.weights()[name]) for name, w in before.items())
    t.update_policy(rows, random_advantages(rows))
    assert t.update_policy(rows, poisoned)["train/skipped_steps"] == 3, "a good step starts the count in a row anew"
    t.update_policy(rows, poisoned)
    with pytest.raises(TrainingDiverged, match="3 steps in a row"):
        t.update_policy(rows, poisoned)


def test_a_poisoned_critic_target_is_skipped_too(random_checkpoint):
    t = trainer(random_checkpoint)
    rows = random_rows()
    t.update_critic(rows, [np.full(row.n_optimized, np.inf) for row in rows], updates=1)
    assert all(np.all(v == 0.5) for v in t.values(rows))


# Continuation -------------------------------------------------------------------------------------------------------


def steps(t: Trainer, first: int, last: int) -> list[dict[str, float]]:
    rows = random_rows()
    targets = [np.full(row.n_optimized, float(i % 2)) for i, row in enumerate(rows)]
    return [
        t.update_critic(rows, targets) | t.update_policy(rows, random_advantages(rows, step))
        for step in range(first, last)
    ]


def test_a_resumed_trainer_goes_on_bit_for_bit(random_checkpoint, tmp_path):
    whole = trainer(random_checkpoint)
    expected = steps(whole, 0, 6)
    first = trainer(random_checkpoint)
    got = steps(first, 0, 3)
    with new_checkpoint(tmp_path, 3, {"cursor": 3}) as folder:
        first.save(folder)
    checkpoint = load_checkpoint(latest_checkpoint(tmp_path))
    second = trainer(random_checkpoint)
    second.load(checkpoint.folder)
    got += steps(second, checkpoint.state["cursor"], 6)
    assert got == expected
    assert second.version == whole.version == 6
    assert all(torch.equal(w, second.weights()[name]) for name, w in whole.weights().items())
    assert all(
        np.array_equal(a, b) for a, b in zip(whole.values(random_rows()), second.values(random_rows()), strict=True)
    )


def test_weights_hold_the_tied_head_and_load_into_a_fresh_model(random_checkpoint):
    t = trainer(random_checkpoint)
    steps(t, 0, 1)
    weights = t.weights()
    assert "lm_head.weight" in weights
    fresh = load_policy(random_checkpoint)
    fresh.load_state_dict(weights)
    before = weights["lm_head.weight"].clone()
    steps(t, 1, 2)
    assert torch.equal(before, weights["lm_head.weight"]), "later steps do not change what was handed out"


def test_a_saved_policy_is_an_ordinary_checkpoint(random_checkpoint, tmp_path):
    (random_checkpoint / "tokenizer_config.json").write_text("{}")
    t = trainer(random_checkpoint)
    steps(t, 0, 1)
    t.save_policy(tmp_path / "policy")
    assert (tmp_path / "policy" / "tokenizer_config.json").exists()
    loaded = load_policy(tmp_path / "policy").state_dict()
    assert all(torch.equal(w, loaded[name]) for name, w in t.weights().items())


def test_a_saved_policy_does_not_bear_the_card_and_the_pairing_of_what_it_started_from(random_checkpoint, tmp_path):
    start = tmp_path / "start"
    shutil.copytree(random_checkpoint, start)
    for name in ("README.md", "compaction.json", "LICENSE"):
        (start / name).write_text("of the base model")
    trainer(start).save_policy(tmp_path / "policy")
    kept = {path.name for path in (tmp_path / "policy").iterdir()}
    assert "LICENSE" in kept
    assert not {"README.md", "compaction.json"} & kept


def test_a_missing_checkpoint_folder_is_named(tmp_path):
    with pytest.raises(CheckpointNotFound, match="nowhere holds no model checkpoint"):
        Trainer(tmp_path / "nowhere", TrainerSettings())


def test_a_model_that_scales_its_logits_is_refused(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    GraniteForCausalLM(GraniteConfig(**sizes, **heads, logits_scaling=8.0)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="changes its logits after the head"):
        Trainer(tmp_path, TrainerSettings())


def test_the_critic_routes_by_the_policys_own_bias_whatever_the_precision(tmp_path: Path) -> None:
    build("glm4-experts").save_pretrained(tmp_path)
    bias = "layers.1.mlp.gate.e_score_correction_bias"
    policy, critic = load_policy(tmp_path, torch.bfloat16), load_critic(tmp_path, torch.bfloat16)
    assert critic.head.weight.dtype == torch.bfloat16
    ours = critic.backbone.state_dict()[bias]
    assert ours.dtype == torch.float32
    assert torch.equal(ours, policy.model.state_dict()[bias])
