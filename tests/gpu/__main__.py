"""What needs a GPU: training in bfloat16 on packed rows, the torch engine against the trainer, memory and speed.

    python -m tests.gpu            on one GPU, under 8 minutes, offline; without a GPU it says so and exits with 0
    python -m tests.gpu --cpu      the same checks, small, on the CPU

Needs no pytest and no vLLM. Exits with 1 where a check fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from rl.models import chosen_device
from tests.gpu.cases import LARGE, SMALL, make_checkpoint
from tests.gpu.checks import CHECKS, Failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="The checks that need a GPU.")
    parser.add_argument("--cpu", action="store_true", help="a small version on the CPU")
    on_cpu = parser.parse_args().cpu
    if not on_cpu and not torch.cuda.is_available():
        print("no CUDA device here: nothing was run (python -m tests.gpu --cpu runs a small version)")
        return 0
    case, device = (SMALL, chosen_device("cpu")) if on_cpu else (LARGE, chosen_device())
    torch.use_deterministic_algorithms(True)  # as in the product's own processes
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, parameters = make_checkpoint(case, Path(folder))
        print(f"{name}, torch {torch.__version__}, a model of {parameters / 1e6:.1f} M parameters", flush=True)
        for check in CHECKS:
            print(f"\n== {check.__name__.replace('_', ' ')} ==", flush=True)
            try:
                check(case, checkpoint, device)
            except (Failed, RuntimeError) as failure:  # what CUDA raises, out of memory included
                print(f"FAILED: {failure}")
                failed.append(check.__name__)
    print("\n" + (f"failed: {', '.join(failed)}" if failed else "all checks passed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
