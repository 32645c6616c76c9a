"""The same multi-turn rollouts through batched `generate`, the torch engine, and vLLM where it is installed.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_rollouts [--checkpoint FOLDER] [--rollouts 12] [--scale 2]

The load is that of bench_engine, `ragged`, with all lengths times `scale`: prompts that grow turn by turn, replies of
fixed length, no end token. The torch engine records it once; `generate` replays the recorded contexts. The engines
continue what they sample themselves: the lengths, and so the work, are those recorded. Sides take turns, one thread
each; medians. Run it with the interpreter of the environment with vLLM (make install-vllm) to have all three.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rl.engines.torch_engine import TorchEngine
from rl.errors import MissingPackage
from rl.models import load_policy
from rl.settings import VllmSettings
from tests.benchmarks.bench_engine import Script, play_with_engine, play_with_generate, scripts, turn_batches
from tests.benchmarks.meters import Seconds, alternating, conditions, median, timed
from tests.benchmarks.models import small_checkpoint

ROUNDS = 3


@dataclass(frozen=True)
class Replay:
    """What one replay took."""

    seconds: Seconds
    computed: int
    """Prompt tokens that went through the model, padding included"""
    cached: int = 0
    """Prompt tokens served from a kept prefix"""


def with_engine(engine: Any, workload: list[Script]) -> Callable[[], Replay]:
    turns = [turn for script in workload for turn in script.turns]
    prompts, sampled = sum(len(turn.context) for turn in turns), sum(turn.length for turn in turns)

    def replay() -> Replay:
        generated, before = engine.generated_tokens, engine.cached_tokens
        seconds = timed(lambda: play_with_engine(engine, workload))
        assert engine.generated_tokens - generated == sampled, "a reply has another length than the recorded one"
        cached = engine.cached_tokens - before
        return Replay(seconds, prompts - cached, cached)

    return replay


def with_generate(model: Any, workload: list[Script]) -> Callable[[], Replay]:
    padded = sum(len(batch) * max(len(turn.context) for turn in batch) for batch in turn_batches(workload))
    return lambda: Replay(timed(lambda: play_with_generate(model, workload)), padded)


def without_end(checkpoint: Path, folder: Path) -> Any:
    """The model in its own dtype, and in `folder`, with no end token: lengths alone end a reply."""
    model = load_policy(checkpoint, AutoConfig.from_pretrained(checkpoint).dtype)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rollouts through generate, the torch engine and vLLM.")
    parser.add_argument("--checkpoint", type=Path, help="model, in its own dtype; default: a small one")
    parser.add_argument("--rollouts", type=int, default=12, help="rollouts, all at once")
    parser.add_argument("--scale", type=int, default=2, help="how many times as long as bench_engine's all lengths are")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="replays of each side")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(conditions())
    workload = scripts(ragged=True, rollouts=arguments.rollouts, scale=arguments.scale)
    longest = max(len(s.prompt) + sum(s.lengths) + sum(map(len, s.observations)) for s in workload)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = without_end(arguments.checkpoint or small_checkpoint(folder / "small"), folder / "model")
        engine = TorchEngine(model, slots=arguments.rollouts, max_length=longest)
        for script, turns in zip(workload, play_with_engine(engine, workload), strict=True):
            script.turns = turns
        play_with_generate(model, workload[:1])
        sides = {"generate": with_generate(model, workload), "torch engine": with_engine(engine, workload)}
        try:
            # Imported here: what vLLM sets in a process should not touch one that lacks it.
            from rl.engines.vllm_engine import VllmEngine

            vllm = VllmEngine(folder / "model", VllmSettings(), slots=arguments.rollouts, max_length=longest)
            play_with_engine(vllm, workload[:1])
            sides["vLLM"] = with_engine(vllm, workload)
        except MissingPackage as missing:
            print(f"without vLLM: {missing}")
        replays = alternating(sides, arguments.rounds)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, {str(model.dtype)[6:]}")
    report(replays, workload)
    return 0


def report(replays: dict[str, list[Replay]], workload: list[Script]) -> None:
    turns = [turn for script in workload for turn in script.turns]
    sampled, prompts = sum(turn.length for turn in turns), sum(len(turn.context) for turn in turns)
    longest = max(len(turn.context) for turn in turns)
    print(
        f"{len(workload)} rollouts at once, {len(turns)} turns: {sampled} tokens to sample behind {prompts} prompt "
        f"tokens, contexts up to {longest}"
    )
    heads = f"{'computed':>10}{'cached':>9}{'wall s':>9}{'CPU s':>9}{'sampled tokens/s':>18}{'of CPU':>9}"
    print(f"{'prompt tokens:':14}{heads}")
    for name, taken in replays.items():
        middle = median([replay.seconds for replay in taken])
        print(
            f"{name:14}{taken[-1].computed:>10}{taken[-1].cached:>9}{middle.wall:>9.2f}{middle.cpu:>9.2f}"
            f"{sampled / middle.wall:>18.0f}{sampled / middle.cpu:>9.0f}"
        )


if __name__ == "__main__":
    sys.exit(main())
