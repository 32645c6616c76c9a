"""Micro-batches: rows padded to the right or packed, cut by a token budget, read only where something is learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl.rows import Row


@dataclass(frozen=True)
class MicroBatch:
    """B rows padded to T tokens, or one sequence of packed rows, and the n places at which the model is read.

    Causal attention never looks to the right, so right padding needs no attention mask.
    """

    token_ids: torch.Tensor
    """[B, T] int64, padded with 0; packed [1, T] without padding"""
    read: torch.Tensor
    """[n] int64 into the flattened [B * T]: the position before each wanted token"""
    targets: torch.Tensor
    """[n] int64: the wanted token itself"""
    places: torch.Tensor
    """[n] int64: where the token stands among all wanted tokens of the batch, rows in their given order"""
    row_lengths: tuple[int, ...] | None = None
    """Packed: the lengths of the rows, which fill the sequence one behind the other"""


def micro_batches(
    rows: Sequence[Row],
    wanted: Sequence[np.ndarray],
    token_budget: int,
    device: torch.device | str = "cpu",
    *,
    packed: bool = False,
) -> list[MicroBatch]:
    """Cut rows into micro-batches of at most `token_budget` tokens, padding included, longest rows first.

    `wanted[i]` is a [T] bool mask over `rows[i]`. What stands behind a row's last wanted token is not run, nor is that
    token itself: it is read one position earlier. A row longer than the budget gets a micro-batch of its own; rows with
    nothing wanted are left out.
    """
    positions = [np.flatnonzero(mask) for mask in wanted]
    counts = np.array([len(p) for p in positions], dtype=np.int64)
    offsets = np.cumsum(counts) - counts
    lengths = np.array([p[-1] if len(p) else 0 for p in positions], dtype=np.int64)
    # Stable: the same rows always fall into the same micro-batches.
    order = [int(i) for i in np.argsort(-lengths, kind="stable") if lengths[i]]
    batches = []
    start = 0
    while start < len(order):
        taken = _packed_rows(lengths[order[start:]], token_budget) if packed else token_budget // lengths[order[start]]
        chosen = order[start : start + max(1, int(taken))]
        batches.append(_micro_batch(rows, positions, offsets, chosen, packed, device))
        start += len(chosen)
    return batches


def _packed_rows(lengths: np.ndarray, token_budget: int) -> int:
    """How many of the next rows fit into one sequence."""
    return int(np.searchsorted(np.cumsum(lengths), token_budget, side="right"))


def _micro_batch(
    rows: Sequence[Row],
    positions: Sequence[np.ndarray],
    offsets: np.ndarray,
    chosen: Sequence[int],
    packed: bool,
    device: torch.device | str,
) -> MicroBatch:
    lengths = np.array([positions[i][-1] for i in chosen], dtype=np.int64)
    width = int(lengths[0])
    begins = np.cumsum(lengths) - lengths if packed else np.arange(len(chosen)) * width
    token_ids = np.zeros(int(lengths.sum()) if packed else len(chosen) * width, dtype=np.int64)
    read, targets, places = [], [], []
    for begin, i in zip(begins, chosen, strict=True):
        at = positions[i]
        token_ids[begin : begin + at[-1]] = rows[i].token_ids[: at[-1]]
        read.append(begin + at - 1)
        targets.append(rows[i].token_ids[at])
        places.append(offsets[i] + np.arange(len(at)))

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return MicroBatch(
        tensor(token_ids.reshape(1 if packed else len(chosen), -1)),
        tensor(np.concatenate(read)),
        tensor(np.concatenate(targets)),
        tensor(np.concatenate(places)),
        tuple(lengths.tolist()) if packed else None,
    )
