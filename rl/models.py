"""Policy and critic: stock `transformers` models, read only at the places where something is learned."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from compaction.pairing import CARD, PAIRING
from rl.batching import MicroBatch
from rl.errors import CheckpointNotFound
from rl.logprobs import LOGITS_AT_ONCE, gathered_logprobs
from rl.lora import merged_weights
from rl.packing import packing_inputs

disable_progress_bar()

OF_THE_SOURCE = (CARD, PAIRING)
"""Files that speak of a checkpoint's own weights and training: another checkpoint does not inherit them"""


def chosen_device(name: str = "auto") -> torch.device:
    """The device of that name; auto is CUDA where there is one, else the CPU."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type == "cuda":
        # cuBLAS repeats its sums bit for bit only with a workspace of its own, and refuses to run where determinism is
        # asked for without one. Read when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return device


def load_policy(folder: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model from an ordinary checkpoint folder, in eval mode.

    Eval mode also while training: dropout would make the first update's ratio differ from 1.
    Raises CheckpointNotFound, and ValueError for a model whose logits are more than its head on its last hidden state.
    """
    model = _loaded(AutoModelForCausalLM, folder, dtype)
    _check_plain_head(model)
    return model.eval()


class Critic(nn.Module):
    """The policy's backbone with a scalar head, zero at the start: V is 0.5 (bce) or 0 (mse) everywhere."""

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


def load_critic(folder: Path | str, dtype: torch.dtype = torch.float32) -> Critic:
    """A critic that starts from a policy's checkpoint (paper section "Method": backbone plus scalar value head)."""
    backbone = _loaded(AutoModel, folder, dtype)
    hidden_size = AutoConfig.from_pretrained(folder).get_text_config().hidden_size
    critic = Critic(backbone, hidden_size)
    critic.head.to(dtype)  # alone: of the backbone a few buffers stay in float32 whatever the precision
    return critic.eval()


def token_logprobs(
    model: Any, batch: MicroBatch, temperature: float, logits_at_once: int = LOGITS_AT_ONCE
) -> torch.Tensor:
    """[n] log-probability of each wanted token at the sampling temperature (0 = greedy, read at temperature 1).

    The language head runs at the n read positions alone.
    """
    hidden = _hidden_at(model.get_decoder(), batch)
    return gathered_logprobs(model.get_output_embeddings(), hidden, batch.targets, temperature or 1.0, logits_at_once)


def token_values(critic: Critic, batch: MicroBatch) -> torch.Tensor:
    """[n] value-head outputs, read at the position before each wanted token (a logit for bce, V for mse)."""
    predictions = critic.head(_hidden_at(critic.backbone, batch)).squeeze(-1)
    return predictions if predictions.dtype == torch.float64 else predictions.float()


def checkpoint_layers(model: Any) -> None:
    """Recomputes each decoder layer in the backward pass instead of keeping its activations.

    Raises ValueError for a model that cannot.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # The layer checkpoints in training mode only; what is inside it stays in eval mode, without dropout.
            module.training = True


def save_policy(model: Any, folder: Path, source: Path | str) -> None:
    """An ordinary checkpoint folder: weights and config of `model`, adapters added in; the rest comes from `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(source).iterdir()):
        weights = file.name.endswith((".safetensors", ".bin", ".index.json"))
        if file.is_file() and not weights and file.name not in OF_THE_SOURCE:
            shutil.copyfile(file, folder / file.name)
    model.save_pretrained(folder, state_dict=merged_weights(model))


def _hidden_at(decoder: Any, batch: MicroBatch) -> torch.Tensor:
    lengths = batch.row_lengths
    rows = {} if lengths is None else packing_inputs(lengths, batch.token_ids.device)
    hidden = decoder(input_ids=batch.token_ids, use_cache=False, **rows).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, batch.read)


def _loaded(kind: Any, folder: Path | str, dtype: torch.dtype) -> Any:
    # The grouped product that transformers runs experts by knows no float64.
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return kind.from_pretrained(_checked(folder), dtype=dtype, attn_implementation="sdpa", **experts)


def _checked(folder: Path | str) -> Path:
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise CheckpointNotFound(
            f"{path} holds no model checkpoint (no config.json there); give the folder of a transformers checkpoint"
        )
    return path


@torch.no_grad()
def _check_plain_head(model: Any) -> None:
    # Models that scale or cap their logits after the head would get silently wrong logprobs here.
    ids = torch.arange(4, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    direct = model.get_output_embeddings()(hidden)
    whole = model(input_ids=ids, use_cache=False).logits
    if (direct - whole).abs().max() > 1e-3 * direct.abs().max():
        raise ValueError(f"{type(model).__name__} changes its logits after the head; such models are not supported")
