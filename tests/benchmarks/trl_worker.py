"""TRL's SFTTrainer, one optimiser step for each line on stdin. Run by the interpreter of TRL's environment, as a file:

    PYTHON tests/benchmarks/trl_worker.py JOB.json MODE

JOB.json: checkpoint, dtype, rows (input_ids, labels), tokens (most in one forward), and the optimiser's settings. MODE:
padded, padding-free or packed, with `, head as on a GPU` behind it to run the head at the labelled tokens alone.
Answers each line with one line of JSON: seconds, CPU seconds, gradient norm, tokens that went through the model.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.trainer import utils

ENDLESS = 10_000


def batching(mode: str, rows: list[dict[str, list[int]]], tokens: int) -> dict[str, Any]:
    """Settings with which one step reads all rows, about `tokens` in one forward."""
    if mode.startswith("packed"):
        return {"packing": True, "packing_strategy": "bfd", "max_length": tokens, "per_device_train_batch_size": 1}
    lengths = [len(row["input_ids"]) for row in rows]
    length = max(lengths) if mode.startswith("padded") else sum(lengths) / len(lengths)
    return {
        "padding_free": mode == "padding-free",
        "max_length": None,
        "train_sampling_strategy": "group_by_length",
        "per_device_train_batch_size": max(1, int(tokens / length)),
    }


class OnCommand(TrainerCallback):
    """Waits for a line before each step and answers behind it."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.tokens = 0
        self.began = self.spent = (0.0, 0.0)

    def count(self, model: Any, arguments: Any, named: dict[str, Any]) -> None:
        self.tokens += named["input_ids"].numel()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not sys.stdin.readline():
            raise SystemExit
        self.tokens = 0
        self.began = (time.perf_counter(), time.process_time())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.spent = (time.perf_counter() - self.began[0], time.process_time() - self.began[1])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "grad_norm" in logs:
            answer = {"wall": self.spent[0], "cpu": self.spent[1], "norm": logs["grad_norm"], "tokens": self.tokens}
            print(json.dumps(answer), file=self.answers, flush=True)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed is no answer
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    if sys.argv[2].endswith("head as on a GPU"):
        utils._use_triton = lambda device: True  # asked there only for the choice of tokens; the kernels ask elsewhere
    model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=job["dtype"], attn_implementation="sdpa")
    words = {"<pad>": 0}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<pad>")), pad_token="<pad>")
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            max_steps=ENDLESS,
            gradient_accumulation_steps=len(job["rows"]),  # more than there are forwards: a step ends with its epoch
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **job["optimizer"],
            **batching(sys.argv[2], job["rows"], job["tokens"]),
        )
        trainer = SFTTrainer(model, settings, train_dataset=Dataset.from_list(job["rows"]), processing_class=tokenizer)
        callback = OnCommand(answers)
        model.register_forward_pre_hook(callback.count, with_kwargs=True)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(callback)
        trainer.train()


if __name__ == "__main__":
    main()
