"""Keys and values of the engine's slots, and the layout of one ragged step over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class SlotCache:
    """Static keys and values, [layers, slots, kv_heads, max_length, head_size] each.

    What lies beyond a slot's filled length is stale but finite, and never attended to.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        max_length: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (layers, slots, kv_heads, max_length, head_size)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores [n, kv_heads, head_size] keys and values, token i at (slots[i], positions[i])."""
        self.keys[layer][slots, :, positions] = keys
        self.values[layer][slots, :, positions] = values

    def read(self, layer: int, rows: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, length, head_size]; a view where `rows` is a slice."""
        keys, values = self.keys[layer], self.values[layer]
        if isinstance(rows, slice):
            return keys[rows, :, :length], values[rows, :, :length]
        return keys[:, :, :length].index_select(0, rows), values[:, :, :length].index_select(0, rows)

    def clear(self) -> None:
        """Forgets everything, so that a non-finite value cannot outlive the weights that made it."""
        self.keys.zero_()
        self.values.zero_()


@dataclass(frozen=True)
class AttentionGroup:
    """Tokens of one step whose attention runs as one padded call."""

    tokens: Tensor | None
    """[n] which of the step's tokens; None for all"""
    rows: slice | Tensor
    """Slots whose keys and values are read; a slice spares the copy, and may cover rows that have no query"""
    n_rows: int
    row_of: Tensor
    """[n] which of `rows` query i belongs to"""
    column_of: Tensor
    """[n] the place of query i among its row's queries"""
    width: int
    """Most queries of a row"""
    dense: bool
    """Query i is the only one of row i: nothing to pad"""
    length: int
    """Keys attended to, at most"""
    mask: Tensor | None
    """[rows, 1, width, length] additive: 0 where a key is visible, -inf elsewhere; None where all are"""


@dataclass(frozen=True)
class StepLayout:
    """The new tokens of one step, row after row without padding, and how they attend."""

    token_ids: Tensor
    """[n]"""
    slots: Tensor
    """[n]"""
    positions: Tensor
    """[n]"""
    last: AttentionGroup
    """The last new token of each row, in the order of the rows: the only one that the last layer needs"""
    earlier: AttentionGroup | None
    """The tokens before it; None where each row has one token"""


class NewTokens(NamedTuple):
    """Tokens of one slot that have no keys and values yet."""

    slot: int
    start: int
    """Position of the first one"""
    token_ids: Sequence[int]


def lay_out(rows: Sequence[NewTokens], *, dtype: torch.dtype, device: torch.device) -> StepLayout:
    """Lays rows of distinct slots out for one forward."""
    sizes = np.array([len(row.token_ids) for row in rows])
    slots = np.array([row.slot for row in rows])
    starts = np.array([row.start for row in rows])
    token_ids = np.array(list(chain.from_iterable(row.token_ids for row in rows)))
    one_each = len(token_ids) == len(rows)
    last = np.cumsum(sizes) - 1
    group = partial(_group, dtype=dtype, device=device)
    each = np.arange(len(rows))
    last_group = group(None if one_each else last, slots, each, np.zeros_like(each), starts + sizes - 1)
    if one_each:
        positions, slot_of, earlier_group = starts, slots, None
    else:
        row_of = np.repeat(each, sizes)
        slot_of = slots[row_of]
        columns = np.arange(len(token_ids)) - (last + 1 - sizes)[row_of]
        positions = columns + starts[row_of]
        earlier = np.delete(np.arange(len(token_ids)), last)
        longer = np.flatnonzero(sizes > 1)
        row_among_longer = np.repeat(np.arange(len(longer)), sizes[longer] - 1)
        earlier_group = group(earlier, slots[longer], row_among_longer, columns[earlier], positions[earlier])
    return StepLayout(
        torch.from_numpy(token_ids).to(device),
        torch.from_numpy(slot_of).to(device),
        torch.from_numpy(positions).to(device),
        last_group,
        earlier_group,
    )


def _group(
    tokens: np.ndarray | None,
    slots: np.ndarray,
    row_of: np.ndarray,
    column_of: np.ndarray,
    positions: np.ndarray,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionGroup:
    """Attention of queries at `positions`; query i belongs to slots[row_of[i]] and is its column_of[i]-th."""
    low, high = int(slots.min()), int(slots.max()) + 1
    length = int(positions.max()) + 1
    width = int(column_of.max()) + 1
    rows: slice | Tensor
    if high - low <= 2 * len(slots):
        rows, n_rows, row_of = slice(low, high), high - low, slots[row_of] - low
    else:
        rows, n_rows = torch.from_numpy(slots).to(device), len(slots)
    dense = len(row_of) == n_rows and bool((row_of == np.arange(n_rows)).all())
    mask = None
    if not dense or int(positions.min()) + 1 < length:
        # A place without a query sees its row's first key only: a softmax over nothing would be NaN.
        seen = np.zeros((n_rows, width), dtype=np.int64)
        seen[row_of, column_of] = positions
        hidden = torch.arange(length, device=device) > torch.from_numpy(seen).to(device)[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return AttentionGroup(
        tokens=None if tokens is None else torch.from_numpy(tokens).to(device),
        rows=rows,
        n_rows=n_rows,
        row_of=torch.from_numpy(row_of).to(device),
        column_of=torch.from_numpy(column_of).to(device),
        width=width,
        dense=dense,
        length=length,
        mask=mask,
    )
