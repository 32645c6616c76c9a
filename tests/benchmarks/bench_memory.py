"""Memory of the logprob step: how the peak grows with tokens and with the vocabulary.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_memory

One row of 4k or 16k tokens, every token read, through a small model with 32k or 150k tokens in its vocabulary: the
policy's logprobs, then their gradient. Each case runs in a process of its own; the figures are the operating system's,
beyond what stood in memory before the step and beyond the gradients, which are as large as the weights. Exits with 1
where a vocabulary of 150k takes over 10% more than one of 32k. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl.batching import micro_batches
from rl.logprobs import LOGITS_AT_ONCE
from rl.models import load_policy, token_logprobs
from rl.packing import enable_packing
from rl.rows import Row

TOKENS = (4_096, 16_384)
VOCABULARIES = (32_000, 150_000)
MOST_GROWTH = 1.10
WHOLE = 2**40
"""Logits at once, so many that nothing is cut"""
MIB = 2**20


def measured(tokens: int, vocabulary: int, logits_at_once: int) -> dict[str, float]:
    """Peak MiB of the logprobs alone and with their gradient, in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=tokens,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        policy = load_policy(folder)
    enable_packing(policy, policy.get_decoder())
    (batch,) = micro_batches([row(tokens, vocabulary)], [np.arange(tokens) > 0], tokens, packed=True)
    token_logprobs(policy, micro_batches([row(64, vocabulary)], [np.arange(64) > 0], 64)[0], 1.0)  # what is made once
    began = time.perf_counter()
    before = start_peak()
    with torch.no_grad():
        token_logprobs(policy, batch, 1.0, logits_at_once)
    forward = peak() - before
    before = start_peak()
    token_logprobs(policy, batch, 1.0, logits_at_once).sum().backward()
    gradients = sum(p.grad.nbytes for p in policy.parameters() if p.grad is not None)
    return {
        "forward": forward / MIB,
        "both": (peak() - before - gradients) / MIB,
        "seconds": time.perf_counter() - began,
    }


def row(tokens: int, vocabulary: int) -> Row:
    rng = np.random.default_rng(0)
    segment = np.where(np.arange(tokens) > 0, 0, -1)
    ids = rng.integers(0, vocabulary, tokens)
    return Row("r", ids, segment, np.zeros(tokens), np.where(segment == 0, 0, -1), np.zeros(tokens, dtype=bool))


def start_peak() -> int:
    """Bytes in memory now; `peak` counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Most bytes in memory since `start_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def in_own_process(tokens: int, vocabulary: int, logits_at_once: int) -> dict[str, float]:
    case = ["--case", str(tokens), str(vocabulary), str(logits_at_once)]
    command = [sys.executable, "-m", "tests.benchmarks.bench_memory", *case]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Memory of the logprob step.")
    parser.add_argument("--case", nargs=3, type=int, help="tokens, vocabulary, logits at once: one case, as JSON")
    case = parser.parse_args(argv).case
    if case:
        print(json.dumps(measured(*case)))
        return 0
    print("peak MiB of the logprob step beyond weights and their gradients")
    print(f"{'tokens':>8}{'vocabulary':>12}{'logits at once':>16}{'forward':>10}{'with backward':>15}{'seconds':>9}")
    worst = 0.0
    for tokens in TOKENS:
        peaks = [in_own_process(tokens, vocabulary, LOGITS_AT_ONCE) for vocabulary in VOCABULARIES]
        for vocabulary, found in zip(VOCABULARIES, peaks, strict=True):
            print(line(tokens, vocabulary, f"{LOGITS_AT_ONCE / 2**20:.0f} Mi", found))
        worst = max(worst, *(peaks[1][name] / peaks[0][name] for name in ("forward", "both")))
    print(line(TOKENS[0], VOCABULARIES[0], "all", in_own_process(TOKENS[0], VOCABULARIES[0], WHOLE)))
    met = worst <= MOST_GROWTH
    times = VOCABULARIES[1] / VOCABULARIES[0]
    print(f"a vocabulary {times:.1f} times as large takes at most {worst:.2f} times the memory")
    return 0 if met else 1


def line(tokens: int, vocabulary: int, cut: str, found: dict[str, float]) -> str:
    forward, both, seconds = (found[name] for name in ("forward", "both", "seconds"))
    return f"{tokens:>8}{vocabulary:>12}{cut:>16}{forward:>10.0f}{both:>15.0f}{seconds:>9.1f}"


if __name__ == "__main__":
    sys.exit(main())
