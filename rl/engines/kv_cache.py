"""Keys and values of the engine's slots, and the layout of one ragged step over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        return self.keys[layer][rows, :, :length], self.values[layer][rows, :, :length]

    def clear(self) -> None:
        """Forgets everything, so that a non-finite value cannot outlive the weights that made it."""
        self.keys.zero_()
        self.values.zero_()


@dataclass(frozen=True)
class AttentionGroup:
    """Rows of one step whose attention runs as one padded call."""

    tokens: slice
    """Which of the step's tokens"""
    rows: slice | Tensor
    """Slots whose keys and values are read; a slice spares the copy, and may cover rows that have no token"""
    n_rows: int
    row_of: Tensor
    """[n] which of `rows` token i belongs to"""
    column_of: Tensor
    """[n] the place of token i among its row's new tokens"""
    width: int
    """Most new tokens of a row"""
    length: int
    """Keys attended to, at most"""
    mask: Tensor
    """[rows, 1, width, length] additive: 0 where a key is visible, -inf elsewhere"""


@dataclass(frozen=True)
class StepLayout:
    """The new tokens of one step, row after row without padding, and how they attend."""

    token_ids: Tensor
    """[n]"""
    slots: Tensor
    """[n]"""
    positions: Tensor
    """[n]"""
    last: Tensor
    """[rows] index of each row's last new token, in the order the rows were given"""
    groups: tuple[AttentionGroup, ...]


@dataclass(frozen=True)
class NewTokens:
    """Tokens of one slot that have no keys and values yet."""

    slot: int
    start: int
    """Position of the first one"""
    token_ids: Sequence[int]


def lay_out(rows: Sequence[NewTokens], *, dtype: torch.dtype, device: torch.device) -> StepLayout:
    """Lays the rows out for one forward. Rows with one token come first and attend without padding."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids) > 1)
    sizes = np.array([len(rows[i].token_ids) for i in order])
    ends = np.cumsum(sizes)
    slots = np.array([rows[i].slot for i in order])
    starts = np.array([rows[i].start for i in order])
    columns = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    row_of = np.repeat(np.arange(len(rows)), sizes)
    positions = starts[row_of] + columns
    ids = np.concatenate([np.asarray(rows[i].token_ids, dtype=np.int64) for i in order])
    last = np.empty(len(rows), dtype=np.int64)
    last[order] = ends - 1

    single = int((sizes == 1).sum())
    groups = []
    for first, stop in ((0, single), (single, len(rows))):
        if first == stop:
            continue
        begin = 0 if first == 0 else int(ends[first - 1])
        tokens = slice(begin, int(ends[stop - 1]))
        groups.append(
            _group(tokens, slots[first:stop], row_of[tokens] - first, columns[tokens], positions[tokens], dtype, device)
        )

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    return StepLayout(tensor(ids), tensor(slots[row_of]), tensor(positions), tensor(last), tuple(groups))


def _group(
    tokens: slice,
    slots: np.ndarray,
    row_of: np.ndarray,
    column_of: np.ndarray,
    positions: np.ndarray,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionGroup:
    low, high = int(slots.min()), int(slots.max()) + 1
    width, length = int(column_of.max()) + 1, int(positions.max()) + 1
    rows: slice | Tensor
    if high - low <= 2 * len(slots):
        rows, n_rows, row_of = slice(low, high), high - low, slots[row_of] - low
    else:
        rows, n_rows = torch.from_numpy(slots).to(device), len(slots)
    row_index = torch.from_numpy(row_of).to(device)
    column_index = torch.from_numpy(column_of).to(device)
    # A place without a token sees its first key only: a softmax over nothing would be NaN.
    seen = torch.zeros(n_rows, width, dtype=torch.long, device=device)
    seen[row_index, column_index] = torch.from_numpy(positions).to(device)
    hidden = torch.arange(length, device=device) > seen[:, None, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return AttentionGroup(tokens, rows, n_rows, row_index, column_index, width, length, mask)
