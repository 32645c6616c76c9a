"""Models that benchmarks make: Llamas with random weights and no end token, so that lengths alone end a reply."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SMALL_VOCABULARY = 8192


def llama_checkpoint(folder: Path, *, vocabulary: int, width: int, layers: int, heads: int, feed_forward: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width // heads,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def small_checkpoint(folder: Path) -> Path:
    """14 million parameters, 10 of them in the layers: large enough for its arithmetic to count."""
    return llama_checkpoint(folder, vocabulary=SMALL_VOCABULARY, width=384, layers=6, heads=6, feed_forward=1024)
