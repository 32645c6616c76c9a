"""LoRA: a model's own weights stay as they are, and small adapters beside its decoder's linear layers learn.

A mixture's experts and its router, which `transformers` holds as parameters, are linear layers too. An adapter adds
(alpha / rank) · B · A to a layer's weight. B is zero at the start, so that the first forward pass is
the model's own, bit for bit. Whoever serves or keeps the model gets the sums, under the model's own names.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
    UnsupportedModel for targets that the decoder has not, or holds fused with others.
    """
    check_adapters_installed()
    from peft import LoraConfig, inject_adapter_in_model

    targets = settings.targets if settings.targets == "all-linear" else list(settings.targets)
    if targets != "all-linear":
        _check_targets(decoder, settings.targets)
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=0.0)
        with warnings.catch_warnings():
            # Of what peft itself set for fused experts, and then does not look for among parameters.
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys", RuntimeWarning)
            try:
                inject_adapter_in_model(config, decoder, adapter_name=ADAPTER)
            except ValueError as error:
                raise UnsupportedModel(f"lora.targets {settings.targets}: {error}") from error
    for parameter in decoder.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's state dict under its own names, adapters added in; without adapters its tensors as they are.

    The sums are of the weights' own precision: what is sampled with, saved and evaluated is the same.
    """
    adapters = {
        _own_name(f"{name}.{getattr(module, 'parameter_name', 'weight')}"): module  # experts are adapted as parameters
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        if adapter := adapters.get(own := _own_name(name)):
            tensor = (tensor + adapter.get_delta_weight(ADAPTER)).to(tensor.dtype)
        weights[own] = tensor
    return weights


def _own_name(name: str) -> str:
    """Without what adapters put around a layer, once for each parameter of it that they adapt."""
    return name.replace(".base_layer", "")


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


def _check_targets(decoder: nn.Module, targets: tuple[str, ...] | str) -> None:
    layers = {name.rpartition(".")[2] for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    if unknown := sorted(set(targets) - layers):
        raise UnsupportedModel(
            f"lora.targets: {', '.join(unknown)} is no linear layer of this decoder; it has "
            f"{', '.join(sorted(layers))}, or take all-linear"
        )
