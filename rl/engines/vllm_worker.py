"""What runs inside vLLM's workers, mixed into their class: it takes weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class WeightReceiver:
    """Takes a whole state dict in checkpoint names.

    `reload_weights`, not the model's `load_weights`: on a CPU the linear layers hold their weights in another order
    once they have served, and plain loading finds tensors of size 0.
    """

    model_runner: Any

    def take_weights(self, state_dict: dict[str, Tensor]) -> None:
        self.model_runner.reload_weights(weights_iterator=iter(state_dict.items()))
