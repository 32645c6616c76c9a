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
        self._pack_experts_again()
        self.model_runner.reload_weights(weights_iterator=iter(state_dict.items()))

    def _pack_experts_again(self) -> None:
        """On a CPU vLLM puts experts into their kernel's order when it makes the kernel, and only then: without one it
        makes it again. (On a GPU nothing is packed, and captured graphs hold on to the kernel.)"""
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        for module in self.model_runner.get_model().modules():
            method: Any = getattr(module, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None
