"""Packed rows: one sequence of many rows, in which each row attends to itself alone.

The attention of a packed sequence is the stock one, called once per row. So no mask exists, which for N tokens would
hold N² numbers, nothing is computed between rows, and on CUDA the flash kernels stay usable.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "sdpa_by_row"
"""Name under which `transformers` finds the attention below"""

PROBE_ROWS = (40, 9, 1, 6)
"""Row lengths of the check: a long row first, so that what leaks into the next one is seen"""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest relative difference of hidden states, packed against alone"""

logger = logging.getLogger(__name__)


def attention_by_row(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_lengths: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within rows of `row_lengths`, which fill the sequence; without them, one row per sequence.

    As with the flash kernels, whose place this takes, there is no mask: rows and `sliding_window` say it all.
    """
    lengths = [query.shape[2]] if row_lengths is None else list(row_lengths)
    # split, not slices: its backward joins the rows' gradients once, where each slice would fill a whole tensor.
    rows = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    attended = [sdpa_attention_forward(module, q, k, v, _sliding(q, sliding_window), **options)[0] for q, k, v in rows]
    return (attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)), None


AttentionInterface.register(ATTENTION, attention_by_row)


def packing_inputs(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What a decoder is given beside the ids of packed rows."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"position_ids": positions[None].to(device), "row_lengths": tuple(lengths)}


def enable_packing(model: Any, decoder: Any) -> bool:
    """Makes `model`, whose `decoder` is run, keep packed rows apart.

    A model that mixes rows all the same (in a convolution, a recurrent state, an attention of its own) is found out by
    a short probe: it is left as it was, one log line says so, and the answer is False.
    """
    stock = model.config._attn_implementation
    if stock == ATTENTION:
        return True
    why = "its attention cannot be exchanged"
    # Models say so themselves where their attention needs more than rows and a sliding window.
    if model._supports_flash_attn:
        alone = _probe_alone(decoder)
        model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation == ATTENTION:
            error = _packing_error(decoder, alone)
            if error <= TOLERANCE[decoder.dtype]:
                return True
            why = f"rows influence each other (relative difference {error:.1e})"
        model.set_attn_implementation(stock)
    logger.warning("%s does not support packed rows: %s; rows are padded", type(model).__name__, why)
    return False


def _probe_rows(decoder: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = decoder.config.get_text_config().vocab_size
    return [torch.randint(vocabulary, (1, n), generator=generator).to(decoder.device) for n in PROBE_ROWS]


@torch.no_grad()
def _probe_alone(decoder: Any) -> list[Tensor]:
    return [decoder(input_ids=row, use_cache=False).last_hidden_state for row in _probe_rows(decoder)]


@torch.no_grad()
def _packing_error(decoder: Any, alone: Sequence[Tensor]) -> float:
    """The largest relative difference between a row's hidden states in the packed probe and `alone`."""
    packed = decoder(
        input_ids=torch.cat(_probe_rows(decoder), dim=1), use_cache=False, **packing_inputs(PROBE_ROWS, decoder.device)
    ).last_hidden_state
    rows = zip(packed.split(PROBE_ROWS, dim=1), alone, strict=True)
    return max(float((together - by_itself).norm() / by_itself.norm()) for together, by_itself in rows)


def _sliding(query: Tensor, window: int | None) -> Tensor | None:
    """[length, length] of what a row of more than `window` tokens sees; None where it sees all before it."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    at = torch.arange(length, device=query.device)
    back = at[:, None] - at[None, :]
    return (back >= 0) & (back < window)
