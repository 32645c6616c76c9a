"""What a checkpoint's weights must be called before they go to a vLLM; no vLLM is needed to know."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig

from compaction.protocols import EngineError
from rl.engines.weight_sync import CheckpointWeights, ReloadSync, WeightUpdates
from rl.errors import UnsupportedModel
from tests.rl.engines.served import build

HEAD = "lm_head.weight"


def saved(folder: Path, config: Any) -> Any:
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model


def test_untied_heads_are_asked_for_by_name(tmp_path: Path) -> None:
    model = build("qwen3")
    model.save_pretrained(tmp_path)
    weights = CheckpointWeights(tmp_path)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != HEAD}
    with pytest.raises(EngineError, match="missing"):
        WeightUpdates(ReloadSync(SimpleNamespace()), weights).load(state, 1)


def test_a_tied_head_goes_along_under_its_own_name_whatever_the_embedding_is_called(tmp_path: Path) -> None:
    model = saved(tmp_path, GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=60, n_positions=64))
    weights = CheckpointWeights(tmp_path)
    assert HEAD not in weights.read()
    assert torch.equal(weights.checked(weights.read())[HEAD], model.state_dict()["transformer.wte.weight"])


def test_a_model_whose_names_are_others_in_memory_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 2, "moe_intermediate_size": 16, "intermediate_size": 32, "vocab_size": 60}
    saved(tmp_path, Qwen3MoeConfig(**sizes, **experts, head_dim=16))
    with pytest.raises(UnsupportedModel, match=r"named otherwise in memory .*experts"):
        CheckpointWeights(tmp_path)
