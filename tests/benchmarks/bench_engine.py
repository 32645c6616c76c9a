"""Torch engine against batched `generate` of `transformers` on the same 64 multi-turn rollouts.

    python -m tests.benchmarks.bench_engine [--pairs 5]

The engine plays the rollouts once; that recording fixes every context and every action length. Then both sides replay
it in turns, one thread each: the engine samples the same tokens again (same seeds), `generate` gets each turn's
recorded contexts as one left-padded batch with its cache on, prefills them anew, and samples as many tokens as the
longest action of the turn. It returns no logprobs, which is in its favour.

`ragged`: actions of 4 to 8 tokens, observations of 8 to 10, 10 to 15 turns. `equal context`: 6, 9 and 12 for all, so
that left-padding and waiting for the longest action cost `generate` nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compaction.protocols import GenerateRequest
from rl.engines.torch_engine import TorchEngine
from rl.serving import ServedEngine
from tests.benchmarks.meters import conditions, median, timed

ROLLOUTS = 64
VOCABULARY = 704
MAX_LENGTH = 320
BAR = 3.0
"""Least ratio of the wall times; below it the benchmark exits with 1."""


@dataclass
class Turn:
    """One action to sample behind `context`."""

    context: list[int]
    length: int


@dataclass
class Script:
    """What is fixed about one rollout: its prompt, its action lengths and its observations; `turns` are recorded."""

    name: str
    prompt: list[int]
    lengths: list[int]
    observations: list[list[int]]
    turns: list[Turn] = field(default_factory=list)


def tiny_model() -> LlamaForCausalLM:
    """The embedded model's shape with random weights and no end token, so that lengths alone end an action."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def scripts(*, ragged: bool, rollouts: int = ROLLOUTS, scale: int = 1) -> list[Script]:
    """`scale`: how many times as long prompts, actions and observations are."""
    rng = np.random.default_rng(0)

    def size(low: int, high: int, equal: int) -> int:
        return int(rng.integers(low, high + 1)) if ragged else equal

    def tokens(low: int, high: int, equal: int) -> list[int]:
        return rng.integers(1, VOCABULARY, scale * size(low, high, equal)).tolist()

    result = []
    for i in range(rollouts):
        turns = size(10, 15, 12)
        lengths = [scale * size(4, 8, 6) for _ in range(turns)]
        result.append(Script(f"rollout-{i}", tokens(8, 16, 12), lengths, [tokens(8, 10, 9) for _ in lengths]))
    return result


async def _play(engine: ServedEngine, script: Script) -> list[Turn]:
    ids, turns = list(script.prompt), []
    for number, (length, observation) in enumerate(zip(script.lengths, script.observations, strict=True)):
        turns.append(Turn(list(ids), length))
        request = GenerateRequest(script.name, np.array(ids, dtype=np.int32), length, 1.0, seed=number)
        completion = await engine.generate(request)
        ids += completion.token_ids.tolist() + observation
    await engine.release(script.name)
    return turns


async def _play_all(engine: ServedEngine, workload: list[Script]) -> list[list[Turn]]:
    return await asyncio.gather(*(_play(engine, script) for script in workload))


def play_with_engine(engine: ServedEngine, workload: list[Script]) -> list[list[Turn]]:
    """All rollouts at once, each at its own pace."""
    return asyncio.run(_play_all(engine, workload))


def turn_batches(workload: list[Script]) -> Iterator[list[Turn]]:
    """Turn by turn: those rollouts that have one form the batch."""
    for number in range(max(len(script.turns) for script in workload)):
        yield [script.turns[number] for script in workload if number < len(script.turns)]


@torch.inference_mode()
def play_with_generate(model: LlamaForCausalLM, workload: list[Script]) -> None:
    for batch in turn_batches(workload):
        width = max(len(turn.context) for turn in batch)
        ids = torch.tensor([[0] * (width - len(turn.context)) + turn.context for turn in batch])
        mask = torch.tensor([[0] * (width - len(turn.context)) + [1] * len(turn.context) for turn in batch])
        most = max(turn.length for turn in batch)
        model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=True, top_k=0, use_cache=True)


def compare(model: LlamaForCausalLM, *, ragged: bool, pairs: int) -> float:
    """Prints both sides of each pair, then the medians and their ratios; returns that of the wall times."""
    workload = scripts(ragged=ragged)
    engine = TorchEngine(model, slots=ROLLOUTS, max_length=MAX_LENGTH)
    for script, turns in zip(workload, play_with_engine(engine, workload), strict=True):
        script.turns = turns
    play_with_generate(model, workload)
    sampled = sum(sum(script.lengths) for script in workload)
    context = max(len(turn.context) for script in workload for turn in script.turns)
    print(f"\n{'ragged' if ragged else 'equal context'}: {sampled} tokens to sample, contexts up to {context}")
    ours, theirs = [], []
    for pair in range(1, pairs + 1):
        ours.append(timed(lambda: play_with_engine(engine, workload)))
        theirs.append(timed(lambda: play_with_generate(model, workload)))
        print(f"  pair {pair}: engine {ours[-1]}   generate {theirs[-1]}   load {os.getloadavg()[0]:.1f}")
    for name, side in (("engine", ours), ("generate", theirs)):
        middle = median(side)
        print(f"  median: {name:8} {middle}   {sampled / middle.wall:6.0f} tokens/s")
    wall, cpu = median(theirs).wall / median(ours).wall, median(theirs).cpu / median(ours).cpu
    print(f"  generate takes {wall:.1f} times the engine's wall time, {cpu:.1f} times its CPU time")
    return wall


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Torch engine against batched generate, in alternating pairs.")
    parser.add_argument("--pairs", type=int, default=5, help="pairs per workload")
    pairs = parser.parse_args(argv).pairs
    torch.set_num_threads(1)
    model = tiny_model()
    print(conditions())
    ratios = [compare(model, ragged=ragged, pairs=pairs) for ragged in (True, False)]
    return 0 if min(ratios) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
