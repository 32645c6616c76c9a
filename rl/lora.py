"""LoRA: a model's own weights stay as they are, and small adapters beside its decoder's linear layers learn.

An adapter adds (alpha / rank) · B · A to a layer's weight. B is zero at the start, so that the first forward pass is
the model's own, bit for bit. Whoever serves or keeps the model gets the sums, under the model's own names. Experts of
a mixture stay as they are: adapters of a whole stack of them would need its size in memory in every forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rl.errors import UnsupportedModel
from rl.pretrained import check_adapters_installed
from rl.settings import LoraSettings

ADAPTER = "default"
"""peft's name of the one adapter in each layer"""
SEED = 0
"""Of A: the same in every process, whatever ran before"""


def add_adapters(model: Any, decoder: Any, settings: LoraSettings) -> None:
    """Freezes `model` and puts adapters into `decoder`, the part of it that is run; the head stays as it is.

    Adapters are float32 where the weights are of lower precision. Raises MissingPackage without peft, and
    UnsupportedModel for targets that the decoder has not.
    """
    check_adapters_installed()
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=[f"0.{name}" for name in _targets(decoder, settings.targets)],
        lora_dropout=0.0,
    )
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        # In a list: where peft sees a mixture, it takes experts in place of linear layers of the same name.
        inject_adapter_in_model(config, nn.ModuleList([decoder]), adapter_name=ADAPTER)
    for parameter in decoder.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's state dict under its own names, adapters added in; without adapters its tensors as they are.

    The sums are of the weights' own precision: what is sampled with, saved and evaluated is the same.
    """
    weights = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        layer, adapted, own = name.partition(".base_layer.")
        if own == "weight":
            delta = model.get_submodule(layer).get_delta_weight(ADAPTER)  # type: ignore[operator]
            tensor = (tensor + delta).to(tensor.dtype)
        weights[f"{layer}.{own}" if adapted else name] = tensor
    return weights


def learned_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's state dict without what is frozen."""
    frozen = _frozen(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def load_learned_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Back into a model with the same adapters. Raises ValueError for weights of another one."""
    missing, unknown = model.load_state_dict(weights, strict=False)
    if lacking := sorted(set(missing) - _frozen(model)) or unknown:
        raise ValueError(f"weights of other adapters: {lacking[0]} is in one of the two only")


def _frozen(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def _targets(decoder: nn.Module, targets: tuple[str, ...] | str) -> list[str]:
    """The decoder's linear layers of those names."""
    layers = [name for name, module in decoder.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    kinds = {name.rpartition(".")[2] for name in layers}
    if targets == "all-linear":
        return layers
    if unknown := sorted(set(targets) - kinds):
        raise UnsupportedModel(
            f"lora.targets: {', '.join(unknown)} is no linear layer of this decoder; it has "
            f"{', '.join(sorted(kinds))}, or take all-linear"
        )
    return [name for name in layers if name.rpartition(".")[2] in targets]
