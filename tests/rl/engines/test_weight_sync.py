"""What a checkpoint's weights must be called before they go to a vLLM; no vLLM is needed to know."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig

from compaction.protocols import EngineError
from rl.engines.weight_sync import CheckpointWeights, HttpSync, ReloadSync, WeightUpdates
from rl.errors import UnsupportedModel
from rl.settings import TrainerSettings
from rl.trainer import Trainer
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
    assert weights.mixture


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


def test_names_that_are_others_in_memory_go_as_they_are_in_the_files_tied_ones_too(tmp_path: Path) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = saved(tmp_path, GPTNeoXConfig(**sizes, intermediate_size=48, tie_word_embeddings=True))
    weights = CheckpointWeights(tmp_path)
    sent, head = weights.checked(model.state_dict()), model.get_output_embeddings().weight
    in_files = load_file(tmp_path / "model.safetensors")
    assert in_files.keys() <= sent.keys()
    (under_its_own_name,) = sent.keys() - in_files.keys()
    assert torch.equal(sent[under_its_own_name], head)
    assert all(torch.equal(tensor, weights.read()[name]) for name, tensor in sent.items())
    assert not weights.mixture


def test_what_transformers_leaves_out_of_its_models_may_be_in_the_files(tmp_path: Path) -> None:
    """Published GLM-4.5 files hold a layer that predicts several tokens at once."""
    model = build("glm4-experts")
    model.save_pretrained(tmp_path)
    ignored = "model.layers.46.eh_proj.weight"
    add_to(tmp_path, ignored)
    weights = CheckpointWeights(tmp_path)
    assert ignored not in weights.read()
    assert weights.checked(model.state_dict()).keys() == weights.read().keys()


def test_a_checkpoint_with_weights_that_are_not_trained_is_refused_before_anything_is(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    add_to(tmp_path, "model.layers.0.mlp.experts.7.up_proj.weight")
    with pytest.raises(UnsupportedModel, match=r"hold different weights .*experts\.7.*save_pretrained"):
        CheckpointWeights(tmp_path)


def add_to(checkpoint: Path, name: str) -> None:
    file = checkpoint / "model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(2)}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["llama", *MIXTURES])
def test_a_trainers_stored_weights_are_those_of_the_checkpoint_that_it_saves(kind: str, tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path / "start")
    trainer = Trainer(tmp_path / "start", TrainerSettings(), device="cpu")
    for parameter in trainer.policy.parameters():
        parameter.data *= 0.5
    trainer.save_policy(tmp_path / "saved")
    sent, in_files = dict(trainer.stored_weights()), load_file(tmp_path / "saved" / "model.safetensors")
    assert sent.keys() - {HEAD} == in_files.keys() - {HEAD}
    assert all(torch.equal(tensor, sent[name]) for name, tensor in in_files.items())


@pytest.mark.parametrize(
    ("mixture", "device", "refused"), [(True, "cpu", True), (True, "cuda", False), (False, "cpu", False)]
)
def test_a_server_on_a_cpu_is_not_asked_to_serve_a_mixture(
    mixture: bool, device: str, refused: bool, tmp_path: Path
) -> None:
    config = {"logprobs_mode": "processed_logprobs", "max_model_len": 100}
    with answering({"vllm_config": {"model_config": config, "device_config": {"device": device}}}) as address:
        sync = HttpSync(address, tmp_path, None)
        with pytest.raises(EngineError, match=r"runs on a CPU.*vllm\.servers empty") if refused else nullcontext():
            sync.init_weight_transfer_engine({"max_length": 100, "mixture": mixture})
        sync.close()


@contextmanager
def answering(content: Any) -> Iterator[str]:
    """A server that answers every GET so; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
