"""LoRA on a real, tiny model: what learns, what is handed out, and that it goes on bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rl.checkpoint import latest_checkpoint, new_checkpoint
from rl.engines.torch_engine import TorchEngine
from rl.errors import MissingPackage, UnsupportedModel
from rl.lora import add_adapters, learned_weights, load_learned_weights, merged_weights
from rl.models import load_policy, save_policy
from rl.rows import Row
from rl.settings import LoraSettings, SFTSettings, SFTStage, TrainerSettings
from rl.sft import run_sft
from rl.trainer import Trainer
from tests.rl.engines.served import MIXTURES, build
from tests.rl.samples import random_rows

LORA = LoraSettings(rank=4, alpha=8)
LINEAR = 7
"""Linear layers of a Llama layer"""


def trainer(checkpoint: Path, **changes: Any) -> Trainer:
    return Trainer(checkpoint, TrainerSettings(**{"policy_lr": 1e-2, "critic_lr": 1e-2, "lora": LORA} | changes))


def steps(t: Trainer, first: int, last: int) -> list[dict[str, float]]:
    rows = random_rows()
    metrics = []
    for step in range(first, last):
        rng = np.random.default_rng(step)
        targets = [np.full(row.n_optimized, float(i % 2)) for i, row in enumerate(rows)]
        metrics.append(t.update_critic(rows, targets))
        metrics[-1] |= t.update_policy(rows, [rng.normal(size=row.n_optimized) for row in rows])
    return metrics


def flat(values: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(values)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_first_forward_pass_is_the_base_models_bit_for_bit(random_checkpoint: Path, dtype: str) -> None:
    rows = random_rows()
    plain, adapted = trainer(random_checkpoint, lora=None, dtype=dtype), trainer(random_checkpoint, dtype=dtype)
    for one, other in ((plain.logprobs(rows), adapted.logprobs(rows)), (plain.values(rows), adapted.values(rows))):
        assert np.array_equal(flat(one), flat(other))
    weights = adapted.weights()
    assert all(torch.equal(w, weights[name]) for name, w in plain.weights().items())


def test_only_adapters_and_the_value_head_learn(random_checkpoint: Path) -> None:
    t, base = trainer(random_checkpoint), load_policy(random_checkpoint)
    before = {name: p.detach().clone() for model in (t.policy, t.critic) for name, p in model.named_parameters()}
    metrics = steps(t, 0, 2)[-1]
    changed = {
        name
        for model in (t.policy, t.critic)
        for name, p in model.named_parameters()
        if not torch.equal(p, before[name])
    }
    assert {"head.weight", "head.bias"} <= changed
    assert all(".lora_" in name for name in changed - {"head.weight", "head.bias"})
    assert len([name for name in changed if name.startswith("model.")]) == 2 * 2 * LINEAR
    trained = sum(p.numel() for p in t.policy.parameters() if p.requires_grad)
    assert metrics["train/trainable_parameters"] == trained < sum(p.numel() for p in base.parameters()) / 2


def test_named_targets_alone_get_adapters(random_checkpoint: Path) -> None:
    t = trainer(random_checkpoint, lora=LoraSettings(rank=2, targets="q_proj,v_proj"))
    adapted = {name.split(".")[-4] for name, _ in t.policy.named_parameters() if ".lora_" in name}
    assert adapted == {"q_proj", "v_proj"}


def test_targets_that_are_not_there_are_refused_with_those_that_are(random_checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"lora.targets: lm_head is no linear layer .* down_proj, gate_proj"):
        trainer(random_checkpoint, lora=LoraSettings(targets=("q_proj", "lm_head")))


@pytest.mark.parametrize("change", [{"rank": 0}, {"alpha": 0}, {"dropout": 0.1}])
def test_settings_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        LoraSettings.model_validate(change)


def test_without_peft_the_command_that_installs_it_is_named(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingPackage, match=r"pip install 'compactionrl\[lora\]'"):
        trainer(random_checkpoint)


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"gradient_checkpointing": True}])
def test_merged_weights_give_the_adapters_logprobs(random_checkpoint: Path, tmp_path: Path, options: Any) -> None:
    t = trainer(random_checkpoint, **options)
    steps(t, 0, 3)
    adapted = flat(t.logprobs(random_rows()))
    t.save_policy(tmp_path / "policy")
    merged = trainer(tmp_path / "policy", lora=None).logprobs(random_rows())
    np.testing.assert_allclose(flat(merged), adapted, rtol=0, atol=1e-5)
    assert not np.allclose(adapted, flat(trainer(random_checkpoint).logprobs(random_rows())), atol=1e-3), "it learned"


@pytest.mark.parametrize("kind", MIXTURES)
def test_of_a_mixture_all_linear_layers_learn_and_its_experts_and_router_stay(kind: str, tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path / "start")
    start = load_policy(tmp_path / "start")
    t = trainer(tmp_path / "start", packed=True, gradient_checkpointing=True)
    steps(t, 0, 3)
    adapted = flat(t.logprobs(random_rows()))
    t.save_policy(tmp_path / "policy")
    merged = trainer(tmp_path / "policy", lora=None)
    np.testing.assert_allclose(flat(merged.logprobs(random_rows())), adapted, rtol=0, atol=1e-5)
    before, after = start.state_dict(), merged.policy.state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    linear = {f"{name}.weight" for name, module in start.model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert changed == {f"model.{name}" for name in linear}
    assert any("experts" in name for name in before.keys() - changed)


def test_packing_and_gradient_checkpointing_change_nothing(random_checkpoint: Path) -> None:
    expected = steps(trainer(random_checkpoint, dtype="float64"), 0, 1)[0]
    for options in ({"packed": True}, {"gradient_checkpointing": True}, {"micro_batch_tokens": 64}):
        got = steps(trainer(random_checkpoint, dtype="float64", **options), 0, 1)[0]
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_what_is_handed_out_and_saved_has_the_base_models_names_and_types(
    random_checkpoint: Path, tmp_path: Path
) -> None:
    t = trainer(random_checkpoint, dtype="bfloat16")
    steps(t, 0, 1)
    base, weights = load_policy(random_checkpoint, torch.bfloat16).state_dict(), t.weights()
    assert {name: (w.shape, w.dtype) for name, w in weights.items()} == {n: (w.shape, w.dtype) for n, w in base.items()}
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert all(torch.equal(w, weights[name]) for name, w in t.live_weights().items()), "the same from GPU to GPU"
    t.save_policy(tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy", torch.bfloat16).state_dict()
    assert all(torch.equal(w, loaded[name]) for name, w in weights.items())
    assert not list((tmp_path / "policy").glob("adapter*"))


def test_an_engine_takes_the_weights(small_checkpoint: Path) -> None:
    t = trainer(small_checkpoint)
    TorchEngine(load_policy(small_checkpoint), slots=2, max_length=64).load_weights(t.weights(), 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_it_goes_on_bit_for_bit(random_checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    whole = trainer(random_checkpoint, dtype=dtype)
    expected = steps(whole, 0, 6)
    first = trainer(random_checkpoint, dtype=dtype)
    got = steps(first, 0, 3)
    with new_checkpoint(tmp_path, 3, {}) as folder:
        first.save(folder)
        assert not (folder / "policy").exists(), "adapters are enough"
    second = trainer(random_checkpoint, dtype=dtype)
    second.load(latest_checkpoint(tmp_path))  # type: ignore[arg-type]
    got += steps(second, 3, 6)
    assert got == expected
    assert all(torch.equal(w, second.weights()[name]) for name, w in whole.weights().items())
    assert np.array_equal(flat(whole.values(random_rows())), flat(second.values(random_rows())))


def test_a_checkpoint_of_other_adapters_is_refused(random_checkpoint: Path) -> None:
    one, other = load_policy(random_checkpoint), load_policy(random_checkpoint)
    add_adapters(one, one.get_decoder(), LORA)
    add_adapters(other, other.get_decoder(), LoraSettings(rank=4, targets=("q_proj",)))
    for a, b in ((one, other), (other, one)):
        with pytest.raises(ValueError, match=r"weights of other adapters: model\.layers\.0"):
            load_learned_weights(a, learned_weights(b))


def test_adapters_do_not_touch_the_random_state_and_are_the_same_again(random_checkpoint: Path) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.get_rng_state()
        model = load_policy(random_checkpoint)
        add_adapters(model, model.get_decoder(), LORA)
        assert torch.equal(torch.get_rng_state(), expected)
        found.append(learned_weights(model))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(w, found[1][name]) for name, w in found[0].items())


def test_fine_tuning_moves_adapters_alone_and_saves_a_whole_model(random_checkpoint: Path, tmp_path: Path) -> None:
    rows: list[Row] = random_rows()
    policy = load_policy(random_checkpoint)
    add_adapters(policy, policy.get_decoder(), LORA)
    settings = SFTSettings(stages=(SFTStage(steps=30, tokens_per_step=200),), lr=1e-2, packed=True)
    metrics = list(run_sft(policy, [rows], settings, seed=0))
    assert metrics[-1]["sft/loss"] < metrics[0]["sft/loss"]
    save_policy(policy, tmp_path / "policy", random_checkpoint)
    loaded = load_policy(tmp_path / "policy").state_dict()
    base, merged = load_policy(random_checkpoint).state_dict(), merged_weights(policy)
    changed = {name for name, w in base.items() if not torch.equal(w, loaded[name])}
    assert len(changed) == 2 * LINEAR
    assert all("_proj" in name for name in changed)
    assert all(torch.equal(w, loaded[name]) for name, w in merged.items())
