"""Sizes of the checks, and the random models and rows that they run on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl.rows import Row


@dataclass(frozen=True)
class Case:
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    rows: int
    shortest: int
    longest: int
    micro_batch_tokens: int
    steps: int
    """Of training on a toy batch"""
    lr: float
    timed_updates: int
    speed_dtype: str


SMALL = Case(2, 64, 128, 2, 1, 500, 8, 12, 120, 256, 12, 3e-3, 1, "float32")
LARGE = Case(24, 1_024, 3_072, 16, 8, 151_936, 48, 100, 4_000, 16_384, 20, 3e-4, 3, "bfloat16")
"""About the size of Qwen3-0.6B"""


def make_checkpoint(case: Case, folder: Path) -> tuple[Path, int]:
    """A Qwen3 with random weights, and the number of them."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        intermediate_size=case.feed_forward,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.width // case.heads,
        max_position_embeddings=2 * case.longest,
        tie_word_embeddings=True,
        initializer_range=0.8 / case.width**0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return folder, sum(p.numel() for p in model.parameters())


def random_rows(case: Case) -> list[Row]:
    """Rows of very different lengths; the first quarter of each is context."""
    rng = np.random.default_rng(0)
    lengths = np.geomspace(case.shortest, case.longest, case.rows).astype(int)
    rows = []
    for i, n in enumerate(lengths):
        on = np.arange(n) >= n // 4
        rows.append(
            Row(
                f"r{i}",
                rng.integers(0, case.vocabulary, n).astype(np.int32),
                np.where(on, 0, -1).astype(np.int32),
                np.where(on, -np.log(case.vocabulary), 0.0).astype(np.float32),
                np.where(on, 0, -1).astype(np.int32),
                np.zeros(n, dtype=bool),
            )
        )
    return rows
