"""The policy's update step beside TRL's SFTTrainer: same checkpoint, same rows, same optimized tokens.

With ratio 1 and every advantage 1, PPO's gradient is that of the mean negative log-likelihood over the optimized
tokens, which SFTTrainer takes with all other tokens masked: both sides must have the same gradient norm, at every step.
So our rows get fresh logprobs before each step, outside the clock. Of TRL the clock runs from the first forward to the
end of the optimiser's step, without collation and logging; of ours it is the whole call. All processes wait while one
takes its step, in alternating order.

What favours us on a CPU: without Triton, TRL runs the language head at all tokens, on a GPU at the labelled ones, as we
do everywhere; `head as on a GPU` takes that away. And TRL means its packing for flash attention, which only GPUs have:
here it masks one long sequence.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl.rows import Row
from rl.settings import TrainerSettings
from rl.trainer import Trainer
from tests.benchmarks.meters import Seconds, alternating, median, timed
from tests.benchmarks.models import small_checkpoint

ROUNDS = 3
GPU_HEAD = ", head as on a GPU"
TRL_MODES = ("padded", f"padded{GPU_HEAD}", "padding-free", "packed", f"packed{GPU_HEAD}")
WORKER = Path(__file__).with_name("trl_worker.py")
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest relative difference of a step's gradient norms; one token less makes one of 4e-3 in 200"""
INSTALL = (
    "TRL's rows: uv venv --python 3.11 trl-venv && uv pip install --python trl-venv/bin/python torch=={torch} "
    "transformers=={transformers} trl, then --trl trl-venv/bin/python"
)


@dataclass(frozen=True)
class Step:
    """What one step of one side took."""

    seconds: Seconds
    norm: float
    tokens: int
    """Through the model, padding included"""


def trimmed(row: Row) -> Row:
    """Ends with its last optimized token, as the rows of real rollouts do."""
    end = int(np.flatnonzero(row.optimized)[-1]) + 1
    names = ("token_ids", "segment", "logprobs", "versions", "observation")
    return replace(row, **{name: getattr(row, name)[:end] for name in names})


def sampled_by(trainer: Trainer, rows: Sequence[Row]) -> list[Row]:
    """The rows with the policy's own logprobs: every ratio is 1."""
    result = []
    for row, logprobs in zip(rows, trainer.logprobs(rows), strict=True):
        whole = np.zeros(len(row.token_ids), np.float32)
        whole[row.optimized] = logprobs
        result.append(replace(row, logprobs=whole))
    return result


def our_steps(checkpoint: Path, rows: Sequence[Row], settings: TrainerSettings) -> Callable[[], Step]:
    trainer = Trainer(checkpoint, settings, device="cpu")
    advantages = [np.ones(row.n_optimized) for row in rows]
    tokens = sum(batch.token_ids.numel() for batch in trainer._micro_batches(rows))

    def step() -> Step:
        fresh, metrics = sampled_by(trainer, rows), {}
        seconds = timed(lambda: metrics.update(trainer.update_policy(fresh, advantages)))
        return Step(seconds, metrics["train/grad_norm"], tokens)

    return step


@contextmanager
def trl_steps(python: str, job: Path, mode: str) -> Iterator[Callable[[], Step]]:
    command = [python, str(WORKER), str(job), mode]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        steps, answers = process.stdin, process.stdout

        def step() -> Step:
            steps.write("\n")
            steps.flush()
            answer = answers.readline()
            if not answer:
                log.seek(0)
                raise RuntimeError(f"{' '.join(command)} failed: {log.read()[-2000:]}")
            found = json.loads(answer)
            return Step(Seconds(found["wall"], found["cpu"]), found["norm"], found["tokens"])

        try:
            yield step
        finally:
            process.kill()


def trl_job(checkpoint: Path, rows: Sequence[Row], settings: TrainerSettings) -> dict[str, Any]:
    """What `trl_worker` reads."""
    labels = [np.where(row.optimized, row.token_ids, -100).tolist() for row in rows]
    return {
        "checkpoint": str(checkpoint),
        "dtype": settings.dtype,
        "rows": [{"input_ids": r.token_ids.tolist(), "labels": kept} for r, kept in zip(rows, labels, strict=True)],
        "tokens": settings.micro_batch_tokens,
        "optimizer": {
            "learning_rate": settings.policy_lr,
            "adam_beta1": settings.betas[0],
            "adam_beta2": settings.betas[1],
            "weight_decay": settings.weight_decay,
            "max_grad_norm": settings.clip_grad,
        },
    }


def compare_trainers(rows: Sequence[Row], checkpoint: Path | None, python: str | None, modes: Sequence[str]) -> bool:
    """Prints the table; whether all gradient norms agree. Without `python`, only our side."""
    rows = [trimmed(row) for row in rows]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = checkpoint or small_checkpoint(folder / "small")
        dtype = str(AutoConfig.from_pretrained(source).dtype).removeprefix("torch.")
        settings = {name: TrainerSettings(dtype=dtype, packed=name == "packed") for name in ("padded", "packed")}
        describe(rows, source, settings["packed"])
        sides = {f"ours, {name}": our_steps(source, rows, own) for name, own in settings.items()}
        if python:
            job = folder / "job.json"
            job.write_text(json.dumps(trl_job(source, rows, settings["packed"])))
            for mode in modes:
                sides[f"TRL, {mode}"] = stack.enter_context(trl_steps(python, job, mode))
        else:
            print(INSTALL.format(torch=version("torch").partition("+")[0], transformers=version("transformers")))
        steps = alternating(sides, 1 + ROUNDS)
    report(steps, sum(row.n_optimized for row in rows))
    norms = np.array([[step.norm for step in taken] for taken in steps.values()])
    difference = float((norms.max(axis=0) / norms.min(axis=0) - 1).max())
    agree = difference <= TOLERANCE[dtype]
    print(f"gradient norms of a step differ by at most {difference:.1e}; {'agree' if agree else 'DISAGREE'}")
    return agree


def describe(rows: Sequence[Row], source: Path, settings: TrainerSettings) -> None:
    lengths = [len(row.token_ids) for row in rows]
    print(
        f"\none policy step on {len(rows)} rows of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, "
        f"{sum(row.n_optimized for row in rows)} optimized; {parameters(source) / 1e6:.0f} M parameters, "
        f"{settings.dtype}, up to {settings.micro_batch_tokens} tokens a forward"
    )
    if settings.dtype != "float32":
        print("ours: AdamW on float32 copies of the weights; TRL: AdamW on the weights as they are, which is less work")


def parameters(source: Path) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    return sum(parameter.numel() for parameter in model.parameters())


def report(steps: dict[str, list[Step]], optimized: int) -> None:
    """Medians without the first step, which warms up. `forward tokens` are those of one step, padding included."""
    width = max(len(name) for name in steps) + 1
    heads = f"{'wall s':>9}{'CPU s':>9}{'optimized tokens/s of CPU':>28}{'CPU / ours':>12}"
    print(f"{'trainer':{width}}{'forward tokens':>15}{heads}")
    middles = {name: median([step.seconds for step in taken[1:]]) for name, taken in steps.items()}
    best = min(middle.cpu for name, middle in middles.items() if name.startswith("ours"))
    for name, middle in middles.items():
        print(
            f"{name:{width}}{steps[name][0].tokens:>15}{middle.wall:>9.2f}{middle.cpu:>9.2f}"
            f"{optimized / middle.cpu:>28.0f}{middle.cpu / best:>12.2f}"
        )
