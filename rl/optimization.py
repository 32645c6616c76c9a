"""One optimiser step over micro-batches, with a guard against numbers that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rl.batching import MicroBatch
from rl.errors import TrainingDiverged


class GuardedOptimizer:
    """AdamW; a step whose loss or gradient is not finite is skipped and counted, `max_skipped` in a row are the end."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        clip_grad: float,
        max_skipped: int,
    ) -> None:
        self._parameters = list(parameters)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        self._clip_grad = clip_grad
        self._max_skipped = max_skipped
        self._in_a_row = 0
        self.skipped = 0
        self.trainable = sum(p.numel() for p in self._parameters)
        """Number of parameters that it moves"""

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def step(self, batches: Sequence[MicroBatch], loss_of: Callable[[MicroBatch], torch.Tensor]) -> tuple[float, float]:
        """One step on the sum of `loss_of` over all micro-batches: (loss, gradient norm before clipping).

        Nothing moves without micro-batches. Raises TrainingDiverged.
        """
        total = 0.0
        for batch in batches:
            loss = loss_of(batch)
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_grad))
        if not (np.isfinite(total) and np.isfinite(norm)):
            self._skip(total, norm)
        elif batches:
            self._optimizer.step()
            self._in_a_row = 0
        self._optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _skip(self, loss: float, norm: float) -> None:
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= self._max_skipped:
            raise TrainingDiverged(
                f"{self._in_a_row} steps in a row had a loss or gradient that is not finite (last: loss {loss}, "
                f"gradient norm {norm}); lower the learning rate"
            )

    def state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "skipped": self.skipped, "in_a_row": self._in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]
