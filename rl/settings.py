"""Settings of everything in `rl`, apart from the code that reads them: composing an experiment imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from compaction.settings import Settings
from rl.advantages import AdvantageSettings

CriticLoss = Literal["bce", "mse"]
SampledBy = Literal["torch", "vllm"]
"""Engines that serve a checkpoint"""


class TinySettings(Settings):
    """Sizes of the embedded model and its tokenizer."""

    layers: int = Field(2, ge=1, description="decoder layers")
    width: int = Field(64, ge=1, description="hidden size")
    heads: int = Field(2, ge=1, description="attention heads")
    head_size: int = Field(32, ge=2, multiple_of=2, description="size of one head; vLLM on CPU needs at least 32")
    feed_forward: int = Field(160, ge=1, description="inner size of the feed-forward block")
    rope_theta: float = Field(
        100_000.0, gt=0, description="base of the rotary position embedding; a large one lets facts be found far back"
    )
    vocabulary: int = Field(768, ge=261, description="most tokenizer entries: 256 bytes, 5 special tokens, merges")
    init_std: float = Field(
        0.1,
        gt=0,
        description="standard deviation of the initial weights; 0.02, right for wide models, starts slowly here",
    )
    max_positions: int = Field(512, ge=1, description="longest sequence in tokens")
    seed: int = Field(0, ge=0, description="seed of the random initial weights")


class SFTStage(Settings):
    """A number of steps at one step size."""

    steps: int = Field(ge=1, description="optimiser steps of this stage")
    tokens_per_step: int = Field(ge=1, description="tokens of whole rows that one step reads, about")


class ForwardSettings(Settings):
    """How rows go through a model; none of it changes what is learned."""

    micro_batch_tokens: int = Field(2_048, ge=1, description="most tokens in one forward pass, padding included")
    packed: bool = Field(
        False,
        description="rows of different lengths form one sequence without padding, and attend to themselves alone; "
        "faster where lengths differ much, slower for tiny models; a model that cannot keep rows apart pads them",
    )
    logits_at_once: int = Field(
        2**25,
        ge=1,
        description="most logits (tokens times vocabulary) in memory; where there are more, logprobs are computed in "
        "chunks of tokens, and the backward pass computes the logits again",
    )
    gradient_checkpointing: bool = Field(
        False, description="the backward pass computes activations again, layer by layer: less memory, a third slower"
    )


def _target_names(value: Any) -> Any:
    """`q_proj,v_proj` as people write it on a command line."""
    return value.split(",") if isinstance(value, str) and value != "all-linear" else value


class LoraSettings(Settings):
    """Adapters that learn in place of the decoder's own weights. No dropout: the first ratio would not be 1."""

    rank: int = Field(16, ge=1, description="rank of each adapter: A is [rank, in], B is [out, rank]")
    alpha: float = Field(32.0, gt=0, description="an adapter's sum is scaled by alpha / rank")
    targets: Annotated[Literal["all-linear"] | tuple[str, ...], BeforeValidator(_target_names)] = Field(
        "all-linear",
        description="the decoder's linear layers that get one: all-linear (not a mixture's experts), or names "
        "such as q_proj,v_proj",
    )


class SFTSettings(ForwardSettings):
    """Supervised fine-tuning. Defaults are the tiny preset's."""

    stages: tuple[SFTStage, ...] = Field(
        (SFTStage(steps=300, tokens_per_step=1_500), SFTStage(steps=1_600, tokens_per_step=3_000)),
        min_length=1,
        description="stages in order; each reads its own rows",
    )
    lr: float = Field(4e-3, gt=0, description="peak learning rate; falls to 0 along a cosine over all stages")
    warmup: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="share of all steps in which the learning rate rises; without it some seeds get stuck",
    )
    betas: tuple[float, float] = Field((0.9, 0.98), description="AdamW's moment decays")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    clip_grad: float = Field(1.0, gt=0, description="largest gradient norm; longer gradients are scaled down to it")
    context_weight: float = Field(0.1, ge=0, le=1, description="weight of an observation's token beside an action's 1")
    max_skipped: int = Field(3, ge=1, description="stop after this many skipped (non-finite) steps in a row")
    lora: LoraSettings | None = Field(None, description="adapters learn, not the model's own weights; null = these")


class VllmSettings(Settings):
    """How vLLM serves a checkpoint; each replica is one rollout process (`loop.workers` of them)."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of weights and activations while sampling; auto = the checkpoint's"
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs of one replica")
    gpu_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="part of a GPU that a replica claims from Ray and of its memory that vLLM takes; below 1 the "
        "trainer can use the same GPU",
    )
    cpu_cache_gib: int = Field(1, ge=1, description="memory for keys and values on a CPU, in GiB")
    eager: bool = Field(False, description="no CUDA graphs: starts faster, samples slower; on a CPU always so")
    transfer: Literal["objects", "nccl", "ipc"] = Field(
        "objects",
        description="how new weights come: objects: through Ray's object store, works everywhere; nccl: from GPU to "
        "GPU; ipc: on one GPU that trainer and engine share",
    )
    servers: tuple[str, ...] = Field(
        (),
        description="addresses of running vLLM servers, one per replica, instead of vLLM in this program's processes",
    )
    shared_folder: str | None = Field(
        None, description="folder that the servers see too, for new weights; null = a temporary one of this machine"
    )

    @model_validator(mode="after")
    def _shares_one_gpu_at_most(self) -> VllmSettings:
        if self.gpu_share < 1 and self.tensor_parallel > 1:
            raise ValueError(
                f"gpu_share={self.gpu_share} is a part of one GPU, tensor_parallel={self.tensor_parallel} takes whole "
                "ones: set one of them to 1"
            )
        return self


class LossSettings(Settings):
    """The policy loss (paper section on the token-level loss)."""

    mean: Literal["token", "segment"] = Field(
        "token", description="token: mean over all optimized tokens of the batch; segment: mean of per-segment means"
    )
    clip: Literal["ppo", "double_sided"] = Field(
        "ppo", description="ppo: clipped ratio; double_sided: tokens outside the trust region drop out (SAO)"
    )
    eps_low: float = Field(0.2, ge=0, description="the ratio's lower bound is 1 − eps_low")
    eps_high: float = Field(0.28, ge=0, description="the ratio's upper bound is 1 + eps_high")


class TrainerSettings(ForwardSettings):
    """How policy and critic are updated. Defaults are the paper's where it gives them."""

    policy_lr: float = Field(2e-6, ge=0, description="learning rate of the policy")
    critic_lr: float = Field(3e-6, ge=0, description="learning rate of the critic")
    betas: tuple[float, float] = Field((0.9, 0.98), description="Adam's moment decays, for both optimisers")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay, for both optimisers")
    clip_grad: float = Field(1.0, gt=0, description="largest gradient norm; longer gradients are scaled down to it")
    critic_updates: int = Field(2, ge=1, description="critic updates per policy update")
    critic_loss: CriticLoss = Field("bce", description="bce on R in [0, 1], or mse")
    loss: LossSettings = LossSettings()
    temperature: float = Field(1.0, ge=0, description="the rollouts' sampling temperature; logprobs are taken at it")
    max_skipped: int = Field(3, ge=1, description="stop after this many skipped (non-finite) steps in a row")
    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        "float32",
        description="of weights and activations; logprobs, losses and what the optimiser keeps are float32 at least",
    )
    lora: LoraSettings | None = Field(
        None,
        description="adapters of policy and critic learn, and the whole value head; null = the models' own weights",
    )


class PPOSettings(Settings):
    """One run of PPO. Defaults are the paper's where it gives them."""

    steps: int = Field(100, ge=0, description="policy updates")
    batch_size: int = Field(128, ge=1, description="rollouts per policy update")
    group_size: int = Field(1, ge=1, description="rollouts per prompt; above 1 only the group estimator needs it")
    advantage: AdvantageSettings = AdvantageSettings()
    train_summaries: bool = Field(True, description="summaries are optimized (the paper's summary loss)")
    share_prefix: bool = Field(True, description="an execution segment and its summary share one forward pass")
    overlong_mask: bool = Field(False, description="no gradient from rollouts that hit a limit (SUPO)")
    max_staleness: int = Field(
        0,
        ge=0,
        description="most policy updates between sampling a token and learning from it; 0 = synchronous and "
        "bit-reproducible, above 0 rollouts and updates run at the same time",
    )
    max_attempts: int = Field(
        3, ge=1, description="attempts of a rollout that infrastructure fails before its task is quarantined (async)"
    )
    max_empty_batches: int = Field(
        3, ge=1, description="stop after this many batches in a row without a usable rollout"
    )

    @model_validator(mode="after")
    def _groups_are_whole(self) -> PPOSettings:
        if self.batch_size % self.group_size:
            raise ValueError(
                f"batch_size={self.batch_size} does not hold whole groups of {self.group_size}; make it a multiple"
            )
        return self
