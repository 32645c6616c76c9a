"""The trainer: policy and critic with their optimisers (design "Learning: one order, no leaks").

A caller asks for `values` first (frozen for the batch), computes advantages on the driver, then calls `update_critic`
and `update_policy` in either order: neither changes the advantages it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from rl.batching import MicroBatch, micro_batches
from rl.engines.weights import as_stored
from rl.lora import add_adapters, learned_weights, load_learned_weights, merged_weights
from rl.losses import critic_loss, policy_loss, predicted_values, token_weights
from rl.master_weights import guarded_optimizer
from rl.models import (
    checkpoint_layers,
    chosen_device,
    load_critic,
    load_policy,
    save_policy,
    token_logprobs,
    token_values,
)
from rl.optimization import GuardedOptimizer
from rl.packing import enable_packing
from rl.rows import Row
from rl.settings import LossSettings, TrainerSettings


class Trainer:
    """Policy, critic, two AdamW optimisers, and `version`: the number of policy updates made."""

    def __init__(self, checkpoint: Path | str, settings: TrainerSettings, *, device: str = "auto") -> None:
        """Policy and critic both start from `checkpoint`; `device`: auto takes CUDA where there is one.

        Raises CheckpointNotFound, ValueError for a model that does not fit the settings, and with LoRA MissingPackage.
        """
        self.settings = settings
        self.version = 0
        self._source = Path(checkpoint)
        self._device = chosen_device(device)
        dtype = getattr(torch, settings.dtype)
        self.policy = load_policy(checkpoint, dtype).to(self._device)
        self.critic = load_critic(checkpoint, dtype).to(self._device)
        backbone = self.critic.backbone
        if settings.lora is not None:
            add_adapters(self.policy, self.policy.get_decoder(), settings.lora)
            add_adapters(backbone, backbone, settings.lora)
        self._packed = (
            settings.packed
            and enable_packing(self.policy, self.policy.get_decoder())
            and enable_packing(backbone, backbone)
        )
        if settings.gradient_checkpointing:
            checkpoint_layers(self.policy)
            checkpoint_layers(backbone)
        self._policy_optimizer = _optimizer(self.policy, settings.policy_lr, settings)
        self._critic_optimizer = _optimizer(self.critic, settings.critic_lr, settings)

    @torch.no_grad()
    def values(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Per row the [n_optimized] float32 V, read at the position before each optimized token."""
        return self._read(rows, lambda mb: predicted_values(token_values(self.critic, mb), self.settings.critic_loss))

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Per row the [n_optimized] float32 log-probabilities under the policy as it is."""
        return self._read(rows, self._token_logprobs)

    def update_critic(
        self, rows: Sequence[Row], targets: Sequence[np.ndarray], *, updates: int | None = None
    ) -> dict[str, float]:
        """`updates` steps (default: the settings' critic_updates) of the critic towards `targets`.

        `targets[i]`: [n_optimized], R for every optimized token (λ_critic = 1). `critic/explained_variance` and
        `critic/loss` are those before the first of the steps. Raises TrainingDiverged.
        """
        batches = self._micro_batches(rows)
        target = self._flat(targets)
        weight = self._flat(token_weights(rows, LossSettings(mean="token")))
        metrics: dict[str, float] = {}
        for update in range(self.settings.critic_updates if updates is None else updates):
            predictions = torch.zeros_like(target)

            def loss_of(mb: MicroBatch) -> torch.Tensor:
                output = token_values(self.critic, mb)
                predictions[mb.places] = output.detach()  # noqa: B023
                return critic_loss(output, target[mb.places], weight[mb.places], self.settings.critic_loss)

            loss, norm = self._critic_optimizer.step(batches, loss_of)
            if update == 0:
                values = predicted_values(predictions, self.settings.critic_loss)
                metrics = {"critic/loss": loss, "critic/grad_norm": norm, "critic/value_mean": float(values.mean())}
                metrics |= _explained_variance(values.cpu().numpy(), target.cpu().numpy())
        return _finite(metrics) | {"critic/skipped_steps": float(self._critic_optimizer.skipped)}

    def update_policy(
        self,
        rows: Sequence[Row],
        advantages: Sequence[np.ndarray],
        included: Sequence[np.ndarray] | None = None,
    ) -> dict[str, float]:
        """One policy step; `version` goes up by one, also where the step was skipped.

        `advantages[i]`: [n_optimized]. `included[i]`: [n_optimized] bool, tokens that count in |M| (default all).
        Metrics have the design's names; `train/logprob_mismatch` is the mean |engine − trainer| over tokens that the
        current version sampled. Raises TrainingDiverged.
        """
        batches = self._micro_batches(rows)
        weights = token_weights(rows, self.settings.loss, included)
        advantage, weight = self._flat(advantages), self._flat(weights)
        sampled = self._flat([row.logprobs[row.optimized] for row in rows])
        new = torch.zeros_like(sampled)
        clipped, kl = [], []

        def loss_of(mb: MicroBatch) -> torch.Tensor:
            logprobs = self._token_logprobs(mb)
            at = mb.places
            new[at] = logprobs.detach()
            result = policy_loss(logprobs, sampled[at], advantage[at], weight[at], self.settings.loss)
            clipped.append(result.clip_fraction)
            kl.append(result.kl_to_sampler)
            return result.loss

        loss, norm = self._policy_optimizer.step(batches, loss_of)
        metrics = {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/clip_fraction": float(sum(clipped)),
            "train/kl_to_sampler": float(sum(kl)),
            "train/trainable_parameters": float(self._policy_optimizer.trainable),
        }
        metrics |= _sampling_metrics(rows, new.cpu().numpy(), sampled.cpu().numpy(), self.version)
        self.version += 1
        return _finite(metrics) | {"train/skipped_steps": float(self._policy_optimizer.skipped)}

    def live_weights(self) -> dict[str, torch.Tensor]:
        """The policy's weights where they are, under the model's own names, adapters added in; valid until the next
        update."""
        return {name: tensor.detach() for name, tensor in merged_weights(self.policy).items()}

    def stored_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`live_weights` under the names of the checkpoint's files, which are those that vLLM knows."""
        return as_stored(self.policy, self.live_weights())

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of `live_weights` on the CPU, the tied head included under its own name."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.live_weights().items()}

    def save_policy(self, folder: Path) -> None:
        """The policy as an ordinary checkpoint folder, with the tokenizer it started with."""
        save_policy(self.policy, folder, self._source)

    def save(self, folder: Path) -> None:
        """All that is needed to go on: `policy/` (a checkpoint folder), critic, both optimisers, RNG, the version.

        With LoRA the adapters stand in for policy and backbone: what is frozen is where the trainer started from.
        Raises OSError where a file cannot be written.
        """
        state = {
            "version": self.version,
            "critic": learned_weights(self.critic),
            "policy_optimizer": self._policy_optimizer.state(),
            "critic_optimizer": self._critic_optimizer.state(),
            "rng": torch.get_rng_state(),
        }
        try:
            if self.settings.lora is None:
                self.save_policy(folder / "policy")
            else:
                state["policy"] = learned_weights(self.policy)
            torch.save(state, folder / "trainer.pt")
        except (RuntimeError, SafetensorError) as error:
            # What torch and safetensors raise where a write fails.
            raise OSError(f"could not save the trainer to {folder}: {error}") from error

    def load(self, folder: Path) -> None:
        """Continue from a folder that `save` wrote, bit for bit."""
        state = torch.load(folder / "trainer.pt", map_location=self._device, weights_only=True)
        if self.settings.lora is None:
            dtype = getattr(torch, self.settings.dtype)
            self.policy.load_state_dict(load_policy(folder / "policy", dtype).state_dict())
        else:
            load_learned_weights(self.policy, state["policy"])
        load_learned_weights(self.critic, state["critic"])
        self._policy_optimizer.restore(state["policy_optimizer"])
        self._critic_optimizer.restore(state["critic_optimizer"])
        self.version = state["version"]
        torch.set_rng_state(state["rng"].cpu())

    def _token_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        return token_logprobs(self.policy, batch, self.settings.temperature, self.settings.logits_at_once)

    def _micro_batches(self, rows: Sequence[Row]) -> list[MicroBatch]:
        wanted = [row.optimized for row in rows]
        return micro_batches(rows, wanted, self.settings.micro_batch_tokens, self._device, packed=self._packed)

    def _flat(self, per_row: Sequence[np.ndarray]) -> torch.Tensor:
        dtype = torch.float64 if self.settings.dtype == "float64" else torch.float32
        joined = np.concatenate(per_row) if len(per_row) else np.zeros(0)
        return torch.from_numpy(joined.astype(np.float64)).to(self._device, dtype)

    def _read(self, rows: Sequence[Row], read: Callable[[MicroBatch], torch.Tensor]) -> list[np.ndarray]:
        counts = [row.n_optimized for row in rows]
        out = self._flat([np.zeros(sum(counts))])
        for mb in self._micro_batches(rows):
            out[mb.places] = read(mb)
        return np.split(out.cpu().numpy().astype(np.float32), np.cumsum(counts)[:-1]) if counts else []


def _optimizer(model: torch.nn.Module, lr: float, settings: TrainerSettings) -> GuardedOptimizer:
    return guarded_optimizer(
        model,
        lr=lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        max_skipped=settings.max_skipped,
    )


def _explained_variance(values: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """1 − Var(target − V) / Var(target); left out where all targets are equal."""
    if len(targets) == 0 or not np.isfinite(targets).all() or np.ptp(targets) == 0:
        return {}
    return {"critic/explained_variance": float(1.0 - np.var(targets - values) / np.var(targets))}


def _sampling_metrics(rows: Sequence[Row], new: np.ndarray, sampled: np.ndarray, version: int) -> dict[str, float]:
    if len(new) == 0:
        return {}
    ordinals = np.concatenate([row.ordinals for row in rows])
    current = np.concatenate([row.versions[row.optimized] for row in rows]) == version
    out = {
        # −log π of the sampled tokens: an estimate of the entropy, free of cost.
        "train/entropy": float(-new.mean()),
        "train/optimized_tokens": float(len(new)),
        "train/summary_token_share": float(np.mean(ordinals % 2 == 1)),
    }
    if current.any():
        out["train/logprob_mismatch"] = float(np.abs(new[current] - sampled[current]).mean())
    return out


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """What is not finite is left out: trackers keep no NaN, and the skipped step is counted beside it."""
    return {name: value for name, value in metrics.items() if np.isfinite(value)}
