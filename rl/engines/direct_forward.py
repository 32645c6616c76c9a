"""The forward of a `transformers` decoder over the engine's slots, written out over the model's own modules.

The model's own `forward` spends more on its bookkeeping than a small model on its arithmetic, and cannot attend to
cache rows in place. Weights are read from the model, so loading them there is enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rl.engines.kv_cache import AttentionGroup, SlotCache, StepLayout

SUPPORTED = ("llama", "qwen2", "qwen3")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_supported(config: Any) -> None:
    """Raises ValueError where the direct forward would not compute what the model computes."""
    if config.model_type not in SUPPORTED:
        raise ValueError(
            f"model type {config.model_type!r} is not supported by the torch engine; use one of {SUPPORTED}"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(f"{config.model_type} with sliding-window layers is not supported by the torch engine")
    rope = config.rope_parameters["rope_type"]
    if rope in _LENGTH_DEPENDENT_ROPE:
        raise ValueError(
            f"rope type {rope!r} depends on the sequence length; the torch engine supports fixed ones only"
        )


class DirectForward:
    """Logits of a Llama, Qwen2 or Qwen3 style causal LM for one ragged step."""

    def __init__(self, model: Any, *, max_length: int):
        check_supported(model.config)
        self.model = model
        self.layers = list(model.model.layers)
        weight = model.model.embed_tokens.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.head_size = self.layers[0].self_attn.head_dim
        self.kv_heads = model.config.num_key_value_heads
        positions = torch.arange(max_length, device=self.device)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=self.dtype, device=self.device), position_ids=positions)
        self.cos, self.sin = cos[0, :, None], sin[0, :, None]

    def new_cache(self, slots: int, max_length: int) -> SlotCache:
        """An empty cache that fits the model."""
        return SlotCache(
            layers=len(self.layers),
            slots=slots,
            kv_heads=self.kv_heads,
            max_length=max_length,
            head_size=self.head_size,
            dtype=self.dtype,
            device=self.device,
        )

    def __call__(self, step: StepLayout, cache: SlotCache) -> Tensor:
        """Logits [rows, vocabulary] behind each row's last new token; stores the new keys and values."""
        hidden = functional.embedding(step.token_ids, self.model.model.embed_tokens.weight)
        cos, sin = self.cos[step.positions], self.sin[step.positions]
        for index, layer in enumerate(self.layers):
            # Behind the last layer's keys and values only the last token of each row is of use.
            wanted = step.last.tokens if index == len(self.layers) - 1 else None
            normed = _norm(layer.input_layernorm, hidden)
            query, key, value = self._heads(layer.self_attn, normed, cos, sin, wanted)
            cache.write(index, step.slots, step.positions, key, value)
            if wanted is not None:
                hidden = hidden[wanted]
                attended = _attend(query, step.last, index, cache)
            elif step.earlier is None:
                attended = _attend(query, step.last, index, cache)
            else:
                attended = torch.empty_like(query)
                for group in (step.last, step.earlier):
                    attended[group.tokens] = _attend(query[group.tokens], group, index, cache)
            hidden = hidden + layer.self_attn.o_proj(attended.flatten(1))
            hidden = hidden + layer.mlp(_norm(layer.post_attention_layernorm, hidden))
        return self.model.lm_head(_norm(self.model.model.norm, hidden))

    def _heads(
        self, attention: Any, hidden: Tensor, cos: Tensor, sin: Tensor, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (of the `wanted` tokens), rotated keys, values: [n, heads, head_size] each."""
        of_query, at_query = (hidden, (cos, sin)) if wanted is None else (hidden[wanted], (cos[wanted], sin[wanted]))
        query = attention.q_proj(of_query).view(len(of_query), -1, self.head_size)
        key = attention.k_proj(hidden).view(len(hidden), -1, self.head_size)
        value = attention.v_proj(hidden).view(len(hidden), -1, self.head_size)
        if hasattr(attention, "q_norm"):
            query, key = _norm(attention.q_norm, query), _norm(attention.k_norm, key)
        return _rotate(query, *at_query), _rotate(key, cos, sin), value


def _attend(query: Tensor, group: AttentionGroup, layer: int, cache: SlotCache) -> Tensor:
    """Attention of one group's [n, heads, head_size] queries over its rows of the cache; same shape."""
    keys, values = cache.read(layer, group.rows, group.length)
    if group.dense:
        padded = query[:, None]
    else:
        padded = query.new_zeros(group.n_rows, group.width, *query.shape[1:])
        padded[group.row_of, group.column_of] = query
    attended = functional.scaled_dot_product_attention(
        padded.transpose(1, 2), keys, values, attn_mask=group.mask, enable_gqa=query.shape[1] != keys.shape[1]
    )
    attended = attended.transpose(1, 2)
    return attended[:, 0] if group.dense else attended[group.row_of, group.column_of]


def _norm(module: Any, hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [n, heads, head_size], halves rotated as `transformers` does."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
