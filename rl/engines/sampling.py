"""Sampling with one random stream per request."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class RequestSampler:
    """The uniforms of one request: a Philox stream keyed by its seed, one draw per token."""

    def __init__(self, seed: int, temperature: float):
        self.temperature = temperature
        self._stream = np.random.Generator(np.random.Philox(key=seed)) if temperature > 0 else None

    def draw(self) -> float:
        """Uniform in [0, 1); 0 where decoding is greedy."""
        return self._stream.random() if self._stream is not None else 0.0


def sample(logits: Tensor, samplers: list[RequestSampler]) -> tuple[np.ndarray, np.ndarray]:
    """One token per row of [rows, vocabulary] logits, and its logprob: ([rows] int64, [rows] float32).

    Inverse CDF on softmax(logits / temperature) in fp32, summed in fp64. At temperature 0 the token is the argmax and
    its logprob that of the untempered softmax. Raises FloatingPointError on non-finite logits.
    """
    temperatures = np.array([s.temperature for s in samplers], dtype=np.float32)
    draws = np.array([s.draw() for s in samplers])
    scale = torch.from_numpy(np.where(temperatures > 0, temperatures, 1.0).astype(np.float32)).to(logits.device)
    probabilities = torch.softmax(logits.float() / scale[:, None], dim=-1)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    targets = torch.from_numpy(draws).to(logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    if not temperatures.all():
        greedy = torch.from_numpy(temperatures == 0).to(logits.device)[:, None]
        tokens = torch.where(greedy, probabilities.argmax(dim=-1, keepdim=True), tokens)
    logprobs = probabilities.gather(1, tokens).log_()[:, 0].cpu().numpy()
    if not np.isfinite(logprobs).all():
        raise FloatingPointError("the model's logits are not finite")
    return tokens[:, 0].cpu().numpy(), logprobs
