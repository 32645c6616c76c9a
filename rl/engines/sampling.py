"""Sampling with one random stream per request."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import torch
from torch import Tensor

_PHILOX = np.random.Philox(key=0)
_UNIFORMS = np.random.Generator(_PHILOX)


def _draws(seed: int, n: int) -> list[float]:
    """The first `n` uniforms of the Philox stream keyed by `seed`. To set a state is faster than to make a stream."""
    key, zeros = np.array([seed, 0], np.uint64), np.zeros(4, np.uint64)
    _PHILOX.state = {
        "bit_generator": "Philox",
        "state": {"counter": zeros, "key": key},
        "buffer": zeros,
        "buffer_pos": 4,  # empty
        "has_uint32": 0,
        "uinteger": 0,
    }
    draws: list[float] = _UNIFORMS.random(n).tolist()
    return draws


class RequestSampler:
    """The uniforms of one request: a Philox stream keyed by its seed, one draw per token, `max_tokens` at most."""

    def __init__(self, seed: int, temperature: float, max_tokens: int):
        self.temperature = temperature
        self._draws = iter(_draws(seed, max_tokens)) if temperature > 0 else repeat(0.0)

    def draw(self) -> float:
        """Uniform in [0, 1); 0 where decoding is greedy."""
        return next(self._draws)


def sample(logits: Tensor, samplers: list[RequestSampler]) -> tuple[np.ndarray, np.ndarray]:
    """One token per row of [rows, vocabulary] logits, and its logprob: ([rows] int64, [rows] float32).

    Inverse CDF on softmax(logits / temperature) in fp32, summed in fp64. At temperature 0 the token is the argmax and
    its logprob that of the untempered softmax. Raises FloatingPointError on non-finite logits.
    """
    logits = logits.cpu()  # one order of summation everywhere: CUDA has no deterministic cumulative sum
    temperatures = np.array([s.temperature for s in samplers], dtype=np.float32)
    draws = np.array([s.draw() for s in samplers])
    scale = torch.from_numpy(np.where(temperatures > 0, temperatures, 1.0).astype(np.float32))
    probabilities = torch.softmax(logits.float() / scale[:, None], dim=-1)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    targets = torch.from_numpy(draws)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    if not temperatures.all():
        greedy = torch.from_numpy(temperatures == 0)[:, None]
        tokens = torch.where(greedy, probabilities.argmax(dim=-1, keepdim=True), tokens)
    logprobs = probabilities.gather(1, tokens).log_()[:, 0].numpy()
    if not np.isfinite(logprobs).all():
        raise FloatingPointError("the model's logits are not finite")
    return tokens[:, 0].numpy(), logprobs
