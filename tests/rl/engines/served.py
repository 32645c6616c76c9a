"""Small models of each served kind, and what their tokens must agree with."""

import asyncio

import numpy as np
import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from compaction.protocols import Completion, GenerateRequest

VOCABULARY = 120
TOLERANCE = 1e-5
END = 11
"""The end token of the models that vLLM serves"""

MIXTURES = ("qwen3-experts", "glm4-experts")
"""Mixtures of experts, which transformers fuses in memory"""


def sizes(**more):
    return dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        max_position_embeddings=256,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=None,
        **more,
    )


def build(kind="llama", *, eos=None, seed=0):
    """A model with random weights large enough for peaked, prompt-dependent distributions."""
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(**sizes(num_attention_heads=2, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True))
        )
    elif kind == "llama3-rope":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        model = LlamaForCausalLM(
            LlamaConfig(
                **sizes(num_attention_heads=2, num_key_value_heads=1, attention_bias=True, rope_parameters=rope)
            )
        )
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes(num_attention_heads=4, num_key_value_heads=2)))
    elif kind == "qwen3-experts":
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **sizes(num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4, norm_topk_prob=True),
                num_experts_per_tok=2,
                moe_intermediate_size=64,
            )
        )
    elif kind == "glm4-experts":
        model = Glm4MoeForCausalLM(
            Glm4MoeConfig(
                **sizes(num_attention_heads=4, num_key_value_heads=2, head_dim=32, use_qk_norm=True),
                n_routed_experts=4,
                n_shared_experts=1,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                first_k_dense_replace=1,
                n_group=1,
                topk_group=1,
                routed_scaling_factor=1.5,
            )
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes(num_attention_heads=4, num_key_value_heads=2, head_dim=32)))
    with torch.no_grad():
        buffers = [tensor for name, tensor in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for tensor in [*model.parameters(), *buffers]:
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.generation_config.eos_token_id = eos
    return model.eval()


def weights_of(seed, kind="llama"):
    return build(kind, seed=seed).state_dict()


def request(rollout_id, prompt, *, n=6, temperature=1.0, seed=0):
    return GenerateRequest(rollout_id, np.asarray(prompt, dtype=np.int32), n, temperature, seed)


def run(coroutine):
    return asyncio.run(coroutine)


def full_logprobs(model, prompt, completion: Completion, temperature=1.0):
    """[n] logprobs of the sampled tokens by one plain forward over the whole sequence."""
    ids = torch.tensor([*prompt, *completion.token_ids.tolist()])[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def assert_exact(model, prompt, completion, temperature=1.0):
    np.testing.assert_allclose(
        completion.logprobs, full_logprobs(model, prompt, completion, temperature), atol=TOLERANCE, rtol=0
    )


def prompts(n, rng, low=3, high=40):
    return [rng.integers(0, VOCABULARY, rng.integers(low, high)).tolist() for _ in range(n)]


async def play(engine, model, rollout_id, rng, turns=4, temperature=1.0):
    """A rollout of several turns: what was sampled and an observation go behind the prompt. Each turn is checked."""
    ids = rng.integers(0, VOCABULARY, 8).tolist()
    for turn in range(turns):
        completion = await engine.generate(
            request(rollout_id, ids, n=int(rng.integers(1, 9)), temperature=temperature, seed=turn)
        )
        assert_exact(model, ids, completion, temperature)
        ids += completion.token_ids.tolist() + rng.integers(0, VOCABULARY, int(rng.integers(1, 12))).tolist()
    await engine.release(rollout_id)
