"""What a checkpoint's weights must be called before they go to a vLLM; no vLLM is needed to know."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from compaction.protocols import EngineError
from rl.engines.weight_sync import CheckpointWeights, ReloadSync, WeightUpdates
from rl.errors import UnsupportedModel
from tests.rl.engines.served import MIXTURES, build

HEAD = "lm_head.weight"


class Breaks:
    """A way in that keeps what it took; its next update breaks off when it is told to."""

    def __init__(self) -> None:
        self.taken: dict[str, torch.Tensor] = {}
        self.versions: list[str] = []
        self.breaks_next = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.breaks_next:
            self.breaks_next = False
            raise ConnectionError("the line broke")
        self.taken = update_info["state_dict"]

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.versions += [] if weight_version is None else [weight_version]

    def serves(self, weights: dict[str, torch.Tensor]) -> bool:
        return self.taken.keys() == weights.keys() and all(torch.equal(self.taken[n], w) for n, w in weights.items())


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
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    untied = {name: tensor for name, tensor in model.state_dict().items() if name != HEAD}
    for sent in (weights.checked(untied), weights.read()):
        assert torch.equal(sent[HEAD], model.state_dict()["transformer.wte.weight"])


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_that_are_fused_in_memory_go_one_by_one_as_they_are_in_the_files(kind: str, tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path / "start")
    weights = CheckpointWeights(tmp_path / "start")
    trained = build(kind, seed=1)
    trained.save_pretrained(tmp_path / "trained")
    in_files = CheckpointWeights(tmp_path / "trained").read()
    sent = weights.checked(trained.state_dict())
    assert sum(".experts." in name for name in sent) > sum(".experts." in name for name in trained.state_dict())
    assert sent.keys() == in_files.keys()
    assert all(torch.equal(tensor, in_files[name]) for name, tensor in sent.items())


def test_behind_an_update_that_fails_come_the_last_weights_taken_as_vllm_must_get_them(tmp_path: Path) -> None:
    models = {seed: build("qwen3-experts", seed=seed).state_dict() for seed in range(4)}
    build("qwen3-experts", seed=0).save_pretrained(tmp_path)
    weights, sync = CheckpointWeights(tmp_path), Breaks()
    updates = WeightUpdates(sync, weights)

    def fails(version: int) -> None:
        sync.breaks_next = True
        with pytest.raises(EngineError, match=f"did not take the weights of version {version} "):
            updates.load(models[version], version)

    fails(1)
    assert sync.serves(weights.read())
    updates.load(models[2], 2)
    fails(3)
    assert sync.serves(weights.checked(models[2]))
    assert sync.versions == ["2"]


def test_a_checkpoint_that_transformers_would_write_otherwise_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.mlp.experts.7.up_proj.weight": torch.zeros(2)}, file)
    with pytest.raises(UnsupportedModel, match=r"named otherwise in the files.*experts\.7.*save_pretrained"):
        CheckpointWeights(tmp_path)
