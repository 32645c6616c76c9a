"""Rollouts and rows with random contents, and a random tiny checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compaction.rollout import Outcome, Rollout, Segment
from compaction.settings import AgentSettings

VOCABULARY = 61


def random_segment(
    rng: np.random.Generator, ordinal: int, actions: Sequence[int], *, context: int = 6, observation: int = 3
) -> Segment:
    """Actions of the given lengths; an observation follows each one of an execution segment."""
    summary = ordinal % 2 == 1
    mask: list[bool] = []
    for length in actions:
        mask += [True] * length
        if not summary:
            mask += [False] * observation
    optimized = np.array(mask, dtype=bool)
    n = len(optimized)
    return Segment(
        "summary" if summary else "execution",
        ordinal,
        rng.integers(0, VOCABULARY, 2 if summary else context).astype(np.int32),
        rng.integers(0, VOCABULARY, n).astype(np.int32),
        optimized,
        np.where(optimized, -rng.uniform(0.5, 6.0, n), 0).astype(np.float32),
        np.where(optimized, 0, -1).astype(np.int32),
    )


def random_rollout(
    rng: np.random.Generator, actions: Sequence[Sequence[int]], *, reward: float = 1.0, rollout_id: str = "r0"
) -> Rollout:
    """One segment per entry of `actions`: the lengths of its actions (a summary has one)."""
    segments = tuple(random_segment(rng, i, lengths) for i, lengths in enumerate(actions))
    return Rollout(rollout_id, "task", 0, AgentSettings(), segments, Outcome(reward, "finished"))


def random_batch(seed: int = 0, n: int = 6) -> list[Rollout]:
    """Rollouts with 0 to 2 compactions, one of them ending in an empty window."""
    rng = np.random.default_rng(seed)
    batch = []
    for i in range(n):
        actions: list[list[int]] = []
        for window in range(1 + i % 3):
            if window:
                actions.append([int(rng.integers(2, 6))])
            actions.append([int(k) for k in rng.integers(1, 6, rng.integers(1, 4))])
        if i == n - 1:
            actions += [[3], []]
        batch.append(random_rollout(rng, actions, reward=float(i % 2), rollout_id=f"r{i}"))
    return batch


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, large enough that its logprobs differ between places."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
