"""Packed rows are the same rows: values, logprobs, gradients; a model that mixes them is found out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rl.batching import micro_batches
from rl.models import load_policy, token_logprobs
from rl.packing import ATTENTION, enable_packing
from rl.rows import rows_of
from rl.settings import SFTSettings, SFTStage, TrainerSettings
from rl.sft import run_sft
from rl.trainer import Trainer
from tests.rl.samples import VOCABULARY, random_rollout, random_rows

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=8)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "qwen3 with experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
    "mistral with a sliding window": lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=5)),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp("model")
        make().save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def mixing_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a recurrent state, which goes on from one packed row into the next."""
    torch.manual_seed(0)
    sizes = {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
    state = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_dt_rank": 4}
    folder = tmp_path_factory.mktemp("mixing")
    JambaForCausalLM(JambaConfig(**SIZES, **sizes, **state, pad_token_id=0)).save_pretrained(folder)
    return folder


def update(t: Trainer, rows: Any) -> dict[str, Any]:
    """Values, logprobs, metrics, and the gradients of both models before they are spent."""
    t.critic.head.weight.data.fill_(0.1)
    out: dict[str, Any] = {"values": np.concatenate(t.values(rows)), "logprobs": np.concatenate(t.logprobs(rows))}
    advantages = [np.sin(np.arange(row.n_optimized) + i) for i, row in enumerate(rows)]
    targets = [np.full(row.n_optimized, float(i % 2)) for i, row in enumerate(rows)]
    gradients: dict[str, torch.Tensor] = {}
    for label, model in (("policy", t.policy), ("critic", t.critic)):
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, key=f"{label} {name}": gradients.__setitem__(key, p.grad.clone())
            )
    metrics = t.update_critic(rows, targets, updates=1) | t.update_policy(rows, advantages)
    return out | {"metrics": metrics, "gradients": gradients}


def assert_same(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> None:
    for name in ("values", "logprobs"):
        np.testing.assert_allclose(a[name], b[name], rtol=tolerance, atol=tolerance)
    assert a["gradients"].keys() == b["gradients"].keys()
    for name, gradient in a["gradients"].items():
        assert torch.norm(gradient - b["gradients"][name]) <= tolerance * torch.norm(gradient) + 1e-30, name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
@pytest.mark.parametrize("budget", [70, 10_000])
def test_packed_rows_give_the_numbers_of_padded_ones(checkpoints, model, dtype, tolerance, budget):
    rows = random_rows()
    results = [
        update(
            Trainer(checkpoints[model], TrainerSettings(packed=packed, dtype=dtype, micro_batch_tokens=budget)), rows
        )
        for packed in (True, False)
    ]
    if dtype == "float64":
        # The trainer hands out float32.
        assert results[0]["metrics"] == pytest.approx(results[1]["metrics"], rel=1e-6)
    assert_same(*results, tolerance)


@pytest.mark.parametrize("model", MODELS)
def test_packed_logprobs_equal_those_of_each_row_alone_in_stock_transformers(checkpoints, model):
    policy = load_policy(checkpoints[model], torch.float64)
    rows = random_rows()
    wanted = [row.optimized for row in rows]
    alone = torch.cat(
        [token_logprobs(policy, micro_batches([r], [w], 1)[0], 1.0) for r, w in zip(rows, wanted, strict=True)]
    )
    assert enable_packing(policy, policy.get_decoder())
    (batch,) = micro_batches(rows, wanted, 10_000, packed=True)
    packed = torch.empty_like(alone)
    packed[batch.places] = token_logprobs(policy, batch, 1.0)
    assert (packed - alone).abs().max() < 1e-9


@given(seed=st.integers(0, 1000), budget=st.integers(1, 200))
def test_packed_micro_batches_cover_every_wanted_token_once_without_padding(seed, budget):
    rows = random_rows(seed)
    batches = micro_batches(rows, [r.optimized for r in rows], budget, packed=True)
    flat = np.concatenate([r.token_ids[r.optimized] for r in rows])
    places = np.concatenate([b.places.numpy() for b in batches])
    assert sorted(places.tolist()) == list(range(len(flat)))
    for batch in batches:
        assert batch.token_ids.shape == (1, sum(batch.row_lengths))
        assert batch.token_ids.numel() <= budget or len(batch.row_lengths) == 1
        assert np.array_equal(batch.targets.numpy(), flat[batch.places.numpy()])
    run = sum(b.token_ids.numel() for b in batches)
    assert run == sum(int(np.flatnonzero(r.optimized)[-1]) for r in rows)


def test_shared_rows_at_three_compactions_give_the_numbers_of_separate_ones_with_fewer_tokens(checkpoints):
    """The window of each of the three summaries is run once instead of twice."""
    rollouts = [
        random_rollout(np.random.default_rng(i), [[4, 4, 4], [3]] * 3 + [[2]], rollout_id=f"r{i}") for i in range(4)
    ]
    results, tokens = [], []
    for share in (True, False):
        t = Trainer(checkpoints["qwen3"], TrainerSettings(packed=True, dtype="float64"))
        rows = [row for r in rollouts for row in rows_of(r, share_prefix=share)]
        batches = micro_batches(rows, [r.optimized for r in rows], 10_000, packed=True)
        tokens.append(sum(b.token_ids.numel() for b in batches))
        results.append(update_by_token(t, rows))
    for name, values in results[0].items():
        np.testing.assert_allclose(values, results[1][name], rtol=1e-6)
    # 6 of context, 3 actions of 4, 3 observations of 3 between and behind them; 2 of instruction, 3 of summary.
    window, tail, last = 6 + 3 * 4 + 3 * 3, 2 + 3, 6 + 2
    assert tokens[0] == 4 * (3 * (window + tail - 1) + last - 1)
    # A window alone ends before its last action's last token.
    assert tokens[1] == 4 * (3 * (window - 3 - 1 + window + tail - 1) + last - 1)
    assert tokens[1] >= 1.6 * tokens[0]


def update_by_token(t: Trainer, rows: Any) -> dict[str, Any]:
    """Numbers that do not depend on how rollouts are cut into rows: advantages follow from the token."""
    t.critic.head.weight.data.fill_(0.1)
    on = [row.token_ids[row.optimized] for row in rows]
    metrics = t.update_critic(rows, [ids % 2.0 for ids in on], updates=1)
    metrics |= t.update_policy(rows, [np.sin(ids.astype(float)) for ids in on])
    order = sorted(range(len(rows)), key=lambda i: (rows[i].rollout_id, rows[i].ordinals.min(initial=99)))
    names = ("train/loss", "train/grad_norm", "critic/loss", "critic/grad_norm")
    logprobs = np.concatenate([t.logprobs(rows)[i] for i in order])
    return {name: metrics[name] for name in names} | {"logprobs": logprobs}


# Models that mix rows -----------------------------------------------------------------------------------------------


def test_a_model_that_mixes_packed_rows_pads_them_and_says_so_once(mixing_checkpoint, caplog):
    rows = random_rows()
    with caplog.at_level(logging.WARNING, logger="rl.packing"):
        t = Trainer(mixing_checkpoint, TrainerSettings(packed=True))
    (line,) = [record.message for record in caplog.records if record.name == "rl.packing"]
    assert "JambaForCausalLM does not support packed rows: rows influence each other" in line
    padded = Trainer(mixing_checkpoint, TrainerSettings())
    for a, b in zip(t.logprobs(rows), padded.logprobs(rows), strict=True):
        assert np.array_equal(a, b)
    assert t.policy.config._attn_implementation == "sdpa"


def test_an_attention_that_ignores_the_rows_is_found_out(checkpoints, monkeypatch):
    policy = load_policy(checkpoints["llama"])
    monkeypatch.setattr("rl.packing.packing_inputs", lambda lengths, device: {})
    assert not enable_packing(policy, policy.get_decoder())


def test_a_packed_policy_is_saved_as_an_ordinary_checkpoint(checkpoints, tmp_path):
    t = Trainer(checkpoints["llama"], TrainerSettings(packed=True))
    assert t.policy.config._attn_implementation == ATTENTION
    t.save_policy(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()
    t.save(tmp_path / "trainer")
    Trainer(checkpoints["llama"], TrainerSettings(packed=True)).load(tmp_path / "trainer")


# Settings that change no number -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_gradient_checkpointing_changes_no_number(checkpoints, packed):
    rows = random_rows()
    plain, again = (
        update(Trainer(checkpoints["qwen3"], TrainerSettings(packed=packed, gradient_checkpointing=on)), rows)
        for on in (False, True)
    )
    assert_same(plain, again, 1e-6)


@pytest.mark.parametrize("change", [{"packed": True}, {"gradient_checkpointing": True}, {"logits_at_once": 100}])
def test_fine_tuning_gives_the_same_numbers(checkpoints, change):
    rows = random_rows()
    runs = []
    for values in ({}, change):
        settings = SFTSettings(stages=(SFTStage(steps=3, tokens_per_step=60),), lr=1e-3, warmup=0.0, **values)
        runs.append(list(run_sft(load_policy(checkpoints["qwen3"], torch.float64), [rows], settings, seed=0)))
    for a, b in zip(*runs, strict=True):
        assert a == pytest.approx(b, rel=1e-9)


def test_bfloat16_weights_move_as_float32_ones_do_at_a_small_learning_rate(checkpoints):
    """Each step is far below what a bfloat16 weight can be changed by."""
    rows = random_rows()
    changes = {}
    for dtype in ("float32", "bfloat16"):
        t = Trainer(checkpoints["llama"], TrainerSettings(packed=True, dtype=dtype, policy_lr=3e-5))
        before = flat_weights(t)
        for _ in range(40):
            t.update_policy(rows, [np.ones(row.n_optimized) for row in rows])
        changes[dtype] = flat_weights(t) - before
    exact = changes["float32"]
    assert torch.dot(changes["bfloat16"], exact) / torch.dot(exact, exact) == pytest.approx(1.0, abs=0.2)


def flat_weights(t: Trainer) -> torch.Tensor:
    return torch.cat([weight.flatten().double() for weight in t.weights().values()])


def test_bfloat16_training_goes_on_bit_for_bit(checkpoints, tmp_path):
    rows = random_rows()
    advantages = [np.ones(row.n_optimized) for row in rows]
    settings = TrainerSettings(packed=True, dtype="bfloat16", policy_lr=1e-4)
    whole = Trainer(checkpoints["llama"], settings)
    for _ in range(3):
        whole.update_policy(rows, advantages)
    whole.save(tmp_path)
    resumed = Trainer(checkpoints["llama"], settings)
    resumed.load(tmp_path)
    assert whole.update_policy(rows, advantages) == resumed.update_policy(rows, advantages)
    assert all(torch.equal(weight, resumed.weights()[name]) for name, weight in whole.weights().items())
