"""The forward of a `transformers` decoder over the engine's slots, written out over the model's own modules.

The model's own `forward` spends more on its bookkeeping than a small model on its arithmetic, and cannot attend to
cache rows in place. For the same reason projections that read the same input run as one: their weights in the model
become views of one tensor, so that weights copied into the model's own tensors are served at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rl.engines.kv_cache import AttentionGroup, SlotCache, StepLayout
from rl.engines.model_types import check_length, check_model_type
from rl.errors import UnsupportedModel

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_supported(config: Any) -> None:
    """Raises UnsupportedModel where the direct forward would not compute what the model computes."""
    check_model_type(config.model_type)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UnsupportedModel(f"{config.model_type} with sliding-window layers is not supported by the torch engine")
    rope = config.rope_parameters["rope_type"]
    if rope in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModel(
            f"rope type {rope!r} depends on the sequence length; the torch engine supports fixed ones only"
        )


class DirectForward:
    """Logits of a Llama, Qwen2 or Qwen3 style causal LM for one ragged step."""

    def __init__(self, model: Any, *, max_length: int):
        """Raises UnsupportedModel for a model that it cannot compute, or not at `max_length` tokens."""
        check_supported(model.config)
        check_length(max_length, model.config.max_position_embeddings)
        self.model = model
        self.layers = [_Layer(layer) for layer in model.model.layers]
        weight = model.model.embed_tokens.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.head_size = model.model.layers[0].self_attn.head_dim
        self.heads, self.kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        positions = torch.arange(max_length, device=self.device)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=self.dtype, device=self.device), position_ids=positions)
        # Rotating swaps the halves and negates what comes first; the sign is kept in the table.
        sin[..., : self.head_size // 2].neg_()
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
            query, key, value = self._heads(layer, hidden, cos, sin)
            cache.write(index, step.slots, step.positions, key, value)
            if wanted is not None:
                hidden = hidden[wanted]
                attended = _attend(query[wanted], step.last, index, cache)
            elif step.earlier is None:
                attended = _attend(query, step.last, index, cache)
            else:
                attended = torch.empty_like(query)
                for group in (step.last, step.earlier):
                    attended[group.tokens] = _attend(query[group.tokens], group, index, cache)
            hidden = hidden + layer.attention.o_proj(attended.flatten(1))
            hidden = hidden + layer.feed_forward(hidden)
        return self.model.lm_head(_norm(self.model.model.norm, hidden))

    def _heads(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys, values: [n, heads, head_size] each."""
        projected = functional.linear(_norm(layer.input_norm, hidden), *layer.query_key_value)
        projected = projected.view(len(hidden), -1, self.head_size)
        rotating = self.heads + self.kv_heads
        both, value = projected[:, :rotating], projected[:, rotating:]
        if layer.head_norms is not None:
            of_query, of_key = layer.head_norms
            both = torch.cat((_norm(of_query, both[:, : self.heads]), _norm(of_key, both[:, self.heads :])), dim=1)
        both = _rotate(both, cos, sin)
        return both[:, : self.heads], both[:, self.heads :], value


class _Layer:
    """One decoder layer's modules, with the projections of one input fused."""

    def __init__(self, layer: Any):
        self.attention = layer.self_attn
        self.input_norm, self.post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_key_value = _fuse(self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        normed = hasattr(self.attention, "q_norm")
        self.head_norms = (self.attention.q_norm, self.attention.k_norm) if normed else None
        self.gate_up = _fuse(layer.mlp.gate_proj, layer.mlp.up_proj)
        self.down, self.activation = layer.mlp.down_proj, layer.mlp.act_fn

    def feed_forward(self, hidden: Tensor) -> Tensor:
        gate, up = functional.linear(_norm(self.post_norm, hidden), *self.gate_up).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


@torch.no_grad()
def _fuse(*projections: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the projections side by side; the modules' own parameters become views of them."""

    def side_by_side(parameters: list[torch.nn.Parameter]) -> Tensor:
        fused = torch.cat([parameter.data for parameter in parameters])
        for parameter, view in zip(parameters, fused.split([len(p) for p in parameters]), strict=True):
            parameter.data = view
        return fused

    weight = side_by_side([projection.weight for projection in projections])
    has_bias = projections[0].bias is not None
    return weight, side_by_side([projection.bias for projection in projections]) if has_bias else None


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
    """Rotary position embedding of [n, heads, head_size], halves rotated as `transformers` does; `sin` bears signs."""
    first, second = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cos, torch.cat((second, first), dim=-1), sin)
