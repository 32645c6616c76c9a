"""New weights for a model that is serving: checked as a whole, then copied in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compaction.protocols import EngineError


@torch.no_grad()
def load_in_place(model: Any, state_dict: Mapping[str, Tensor]) -> None:
    """Copies `state_dict` into the model's own tensors. The head of tied embeddings may be left out.

    Raises EngineError, with nothing changed, for missing, unknown or mis-shaped names and for non-finite values.
    """
    current = model.state_dict()
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    tied = model.config.tie_word_embeddings
    missing = [name for name in current if name not in state_dict and not (tied and name == head)]
    unknown = [name for name in state_dict if name not in current]
    if missing or unknown:
        raise EngineError(f"weights do not fit the model: missing {missing[:5]}, unknown {unknown[:5]}")
    for name, value in state_dict.items():
        if value.shape != current[name].shape:
            raise EngineError(
                f"weights do not fit the model: {name} is {tuple(value.shape)}, expected {tuple(current[name].shape)}"
            )
        if not torch.isfinite(value).all():
            raise EngineError(f"weights are not usable: {name} holds non-finite values")
    if tied and head in state_dict and not torch.equal(state_dict[head], state_dict[embedding]):
        raise EngineError(f"weights do not fit the model: {head} and {embedding} are tied but differ")
    for name, value in state_dict.items():
        current[name].copy_(value)
