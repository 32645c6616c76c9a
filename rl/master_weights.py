"""Training weights of low precision: the optimiser keeps them, and sums their gradients, in float32.

A step of 1e-6 is lost in a bfloat16 weight of 0.01, which has no neighbour nearer than 6e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from rl.batching import MicroBatch
from rl.optimization import GuardedOptimizer


class MasterOptimizer(GuardedOptimizer):
    """Steps on float32 copies of the parameters, and rounds them into the parameters after each step."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], **settings: Any) -> None:
        self._rounded = list(parameters)
        self._masters = [torch.nn.Parameter(p.detach().float()) for p in self._rounded]
        super().__init__(self._masters, **settings)
        for rounded, master in zip(self._rounded, self._masters, strict=True):
            rounded.register_post_accumulate_grad_hook(_adder(master))

    def step(self, batches: Sequence[MicroBatch], loss_of: Callable[[MicroBatch], torch.Tensor]) -> tuple[float, float]:
        result = super().step(batches, loss_of)
        self._round()
        return result

    def state(self) -> dict[str, Any]:
        return super().state() | {"masters": [master.detach() for master in self._masters]}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)

    @torch.no_grad()
    def _round(self) -> None:
        for rounded, master in zip(self._rounded, self._masters, strict=True):
            rounded.copy_(master)


def guarded_optimizer(model: torch.nn.Module, **settings: Any) -> GuardedOptimizer:
    """The optimiser of what learns in `model`, with float32 copies where it is of lower precision."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    low = any(p.dtype not in (torch.float32, torch.float64) for p in parameters)
    return (MasterOptimizer if low else GuardedOptimizer)(parameters, **settings)


def _adder(master: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
    def add(rounded: torch.Tensor) -> None:
        """After each micro-batch: its gradient moves to the master."""
        assert rounded.grad is not None
        if master.grad is None:
            master.grad = rounded.grad.float()
        else:
            master.grad += rounded.grad
        rounded.grad = None

    return add
