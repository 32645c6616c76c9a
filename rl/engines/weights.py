"""New weights for a model that is serving: checked as a whole before anything is touched."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from compaction.protocols import EngineError

Shapes = Mapping[str, tuple[int, ...]]
Tied = Mapping[str, str]
"""Names that stand for another's tensor: the head's for the embedding's, where they are tied"""
LAYER = re.compile(r".*?\.\d+\.")
"""The part of a weight's name that names its layer"""


def check_weights(state_dict: Mapping[str, Tensor], shapes: Shapes, tied: Tied) -> None:
    """Raises EngineError for missing, unknown or mis-shaped names and for non-finite values.

    `shapes`: every name that the model has. A tied one may be left out, but must not differ.
    """
    missing = [name for name in shapes if name not in state_dict and name not in tied]
    unknown = [name for name in state_dict if name not in shapes]
    if missing or unknown:
        raise EngineError(f"weights do not fit the model: missing {missing[:5]}, unknown {unknown[:5]}")
    for name, value in state_dict.items():
        if tuple(value.shape) != shapes[name]:
            raise EngineError(f"weights do not fit the model: {name} is {tuple(value.shape)}, expected {shapes[name]}")
        if not torch.isfinite(value).all():
            raise EngineError(f"weights are not usable: {name} holds non-finite values")
    for name, source in tied.items():
        if name in state_dict and not torch.equal(state_dict[name], state_dict[source]):
            raise EngineError(f"weights do not fit the model: {name} and {source} are tied but differ")


def as_stored(model: Any, state_dict: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A state dict of `model` under the names, and in the parts, of the checkpoint's files that it was loaded from.

    They differ where `transformers` fuses weights when it loads them: the experts of a mixture, for one. It goes layer
    by layer, since what is parted is copied.
    """
    from transformers.core_model_loading import revert_weight_conversion

    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in state_dict.items():
        layer = LAYER.match(name)
        layers[layer[0] if layer else ""][name] = tensor
    for part in layers.values():
        yield from revert_weight_conversion(model, part).items()


@torch.no_grad()
def load_in_place(model: Any, state_dict: Mapping[str, Tensor]) -> None:
    """Copies `state_dict` into the model's own tensors.

    Raises EngineError, with nothing changed, for weights that do not fit (see `check_weights`).
    """
    current = model.state_dict()
    shapes = {name: tuple(value.shape) for name, value in current.items()}
    check_weights(state_dict, shapes, model.all_tied_weights_keys)
    for name, value in state_dict.items():
        current[name].copy_(value)
