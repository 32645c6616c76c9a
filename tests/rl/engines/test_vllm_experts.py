"""Mixtures of experts in vLLM: fused in memory, where they are trained, one by one in the files that vLLM reads.

They have a process of their own: one that has served another kind of model has no groups of ranks for experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from compaction.protocols import EngineError
from rl.models import load_policy, save_policy
from rl.serving import VllmServing
from rl.settings import VllmSettings
from tests.rl.engines.served import END, MIXTURES, build, full_logprobs, request, run
from tests.rl.small import collect, local_loop

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

TOLERANCE = 1e-4
PROMPT = (1, 2, 3)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize("kind", MIXTURES)
def test_served_experts_are_the_trainers_after_every_update(
    elsewhere: ProcessPoolExecutor, kind: str, tmp_path: Path
) -> None:
    elsewhere.submit(_updates, kind, tmp_path).result()


def _updates(kind: str, folder: Path) -> None:
    trained, engine = _started(kind, folder)
    for version, model in enumerate(trained):
        if version:
            engine.load_weights(model.state_dict(), version)
        assert _sampled_exactly(engine, model, version)


def test_trap_3_experts_that_are_not_packed_again_are_others(elsewhere: ProcessPoolExecutor, tmp_path: Path) -> None:
    """What WeightReceiver makes kernels anew for; where this fails one day, that can go."""
    elsewhere.submit(_plain_reload, tmp_path).result()


def _plain_reload(folder: Path) -> None:
    (start, trained, _), engine = _started("qwen3-experts", folder)
    stored = engine._updates._checkpoint.checked(trained.state_dict())

    def plainly(worker: Any) -> None:
        worker.model_runner.reload_weights(weights_iterator=iter(stored.items()))

    engine._engine.collective_rpc(plainly)
    assert not _sampled_exactly(engine, start, 0)
    assert not _sampled_exactly(engine, trained, 0)


def test_an_update_that_breaks_among_the_experts_leaves_the_old_weights_serving(
    elsewhere: ProcessPoolExecutor, tmp_path: Path
) -> None:
    elsewhere.submit(_broken, tmp_path).result()


class BreaksOff(dict[str, torch.Tensor]):
    """Half of an expert is read, then no more."""

    def items(self) -> Any:
        for name, tensor in super().items():
            if name == "model.layers.1.mlp.experts.2.up_proj.weight":
                raise ConnectionError("the line broke")
            yield name, tensor


def _broken(folder: Path) -> None:
    (start, trained, _), engine = _started("glm4-experts", folder)
    checkpoint = engine._updates._checkpoint
    broken = BreaksOff(checkpoint.checked(trained.state_dict()))
    with patch.object(checkpoint, "checked", lambda _: broken), pytest.raises(EngineError, match="the line broke"):
        engine.load_weights(trained.state_dict(), 1)
    assert _sampled_exactly(engine, start, 0)
    engine.load_weights(trained.state_dict(), 2)
    assert _sampled_exactly(engine, trained, 2)


@pytest.mark.slow
def test_between_a_trainers_updates_sampled_logprobs_are_the_trainers(
    elsewhere: ProcessPoolExecutor, small_checkpoint: Path, tmp_path: Path
) -> None:
    elsewhere.submit(_training, small_checkpoint, tmp_path / "policy").result()


def _training(source: Path, checkpoint: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=load_policy(source).config.vocab_size,
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, max_position_embeddings=256,
        initializer_range=0.2,
    )  # fmt: skip
    save_policy(Qwen3MoeForCausalLM(config), checkpoint, source)
    served = VllmServing(checkpoint, 4, 128, VllmSettings())
    loop, worker, _ = local_loop(checkpoint, served=served, steps=2, batch_size=4)
    results = collect(loop)
    assert worker.loaded == [1, 2]
    for result in results:
        assert result.metrics["train/grad_norm"] > 0.0
        assert result.metrics["train/logprob_mismatch"] < TOLERANCE


def _started(kind: str, folder: Path) -> tuple[list[Any], Any]:
    """The model in three versions, the first of them served."""
    from rl.engines.vllm_engine import VllmEngine

    trained = [build(kind, eos=END, seed=seed) for seed in range(3)]
    trained[0].save_pretrained(folder)
    return trained, VllmEngine(folder, VllmSettings(), slots=2, max_length=120)


def _sampled_exactly(engine: Any, model: Any, version: int) -> bool:
    completion = run(engine.generate(request(f"r{version}", PROMPT, n=12)))
    assert set(completion.versions) == {version}
    expected = full_logprobs(model, PROMPT, completion)
    return bool(np.abs(completion.logprobs - expected).max() < TOLERANCE)
