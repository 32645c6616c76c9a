"""New weights for a model that is serving: checked as a whole before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compaction.protocols import EngineError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Shapes = Mapping[str, tuple[int, ...]]


def check_weights(state_dict: Mapping[str, Tensor], shapes: Shapes, *, tied: bool) -> None:
    """Raises EngineError for missing, unknown or mis-shaped names and for non-finite values.

    `shapes`: every name that the model has. With `tied` embeddings the head may be left out, but must not differ.
    """
    missing = [name for name in shapes if name not in state_dict and not (tied and name == HEAD)]
    unknown = [name for name in state_dict if name not in shapes]
    if missing or unknown:
        raise EngineError(f"weights do not fit the model: missing {missing[:5]}, unknown {unknown[:5]}")
    for name, value in state_dict.items():
        if tuple(value.shape) != shapes[name]:
            raise EngineError(f"weights do not fit the model: {name} is {tuple(value.shape)}, expected {shapes[name]}")
        if not torch.isfinite(value).all():
            raise EngineError(f"weights are not usable: {name} holds non-finite values")
    if tied and HEAD in state_dict and not torch.equal(state_dict[HEAD], state_dict[EMBEDDING]):
        raise EngineError(f"weights do not fit the model: {HEAD} and {EMBEDDING} are tied but differ")


@torch.no_grad()
def load_in_place(model: Any, state_dict: Mapping[str, Tensor]) -> None:
    """Copies `state_dict` into the model's own tensors.

    Raises EngineError, with nothing changed, for weights that do not fit (see `check_weights`).
    """
    current = model.state_dict()
    shapes = {name: tuple(value.shape) for name, value in current.items()}
    check_weights(state_dict, shapes, tied=model.config.tie_word_embeddings)
    for name, value in state_dict.items():
        current[name].copy_(value)
