"""Logprobs in chunks: the same numbers and gradients, and never the logits of all tokens."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl.logprobs import gathered_logprobs


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made while it is on, and the most that lived at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def sample(n: int, vocabulary: int, *, bias: bool = False, dtype: torch.dtype = torch.float64, width: int = 8) -> Any:
    torch.manual_seed(0)
    head = torch.nn.Linear(width, vocabulary, bias=bias, dtype=dtype)
    return head, torch.randn(n, width, dtype=dtype, requires_grad=True), torch.randint(vocabulary, (n,))


def with_gradients(head: Any, hidden: Any, targets: Any, temperature: float, limit: int) -> list[torch.Tensor]:
    hidden.grad = None
    head.zero_grad()
    logprobs = gathered_logprobs(head, hidden, targets, temperature, limit)
    (logprobs * torch.sin(torch.arange(len(targets)))).sum().backward()
    return [logprobs.detach(), hidden.grad, *(p.grad for p in head.parameters())]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("limit", [1, 37 * 4, 37 * 22])
def test_chunks_give_the_numbers_and_gradients_of_the_whole(bias, temperature, dtype, tolerance, limit):
    inputs = sample(23, 37, bias=bias, dtype=dtype)
    whole = with_gradients(*inputs, temperature, 2**40)
    chunked = with_gradients(*inputs, temperature, limit)
    for a, b in zip(whole, chunked, strict=True):
        assert a.dtype == b.dtype
        assert torch.norm(a - b) <= tolerance * torch.norm(a)


def test_logprobs_of_low_precision_weights_are_computed_in_float32():
    head, hidden, targets = sample(5, 11, dtype=torch.bfloat16)
    for limit in (1, 2**40):
        assert gathered_logprobs(head, hidden, targets, 1.0, limit).dtype == torch.float32


def test_gradients_that_nobody_wants_are_left_out():
    head, hidden, targets = sample(5, 11)
    head.requires_grad_(False)
    gathered_logprobs(head, hidden, targets, 1.0, 11).sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is None


def peak_bytes(n: int, vocabulary: int, limit: int) -> int:
    """Of forward and backward, beyond the gradient of the weight."""
    head, hidden, targets = sample(n, vocabulary, dtype=torch.float32)
    with LiveBytes() as live:
        gathered_logprobs(head, hidden, targets, 1.0, limit).sum().backward()
    return live.peak - head.weight.nbytes


@pytest.mark.parametrize("n", [512, 2_048])
def test_memory_does_not_grow_with_the_vocabulary(n):
    limit = 200_000
    small, large = peak_bytes(n, 1_000, limit), peak_bytes(n, 4_700, limit)
    assert large <= 1.1 * small
    assert large < 0.5 * n * 4_700 * 4, "the logits of all tokens are never there"


def test_the_measure_sees_logits_that_are_whole():
    assert peak_bytes(512, 4_700, 2**40) > 2 * 512 * 4_700 * 4
