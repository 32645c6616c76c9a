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
        try:
            self.model_runner.reload_weights(weights_iterator=iter(state_dict.items()))
        except Exception:
            self._forget_unfinished()
            raise

    def _forget_unfinished(self) -> None:
        """A load that broke off leaves layers with a part of it, from which the next load would go on: they get the
        tensors back that they had before."""
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

        for layer in self.model_runner.get_model().modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model_runner.get_model(), self.model_runner.model_config)

    def _pack_experts_again(self) -> None:
        """On a CPU vLLM puts experts into their kernel's order when it makes the kernel, and only then: without a
        kernel it makes one again. (On a GPU it does at every load what the kernel wants, and captured graphs hold on to
        the kernel.)"""
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        for module in self.model_runner.get_model().modules():
            method: Any = getattr(module, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None
