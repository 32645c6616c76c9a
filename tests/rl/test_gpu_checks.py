"""`python -m tests.gpu` itself: it runs small on the CPU, and says so where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def gpu_checks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    without_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=without_gpu, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.slow
def test_all_checks_pass_small_on_the_cpu():
    done = gpu_checks("--cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all checks passed\n")
    assert done.stdout.count("==\n") == 5
    assert "tokens/s" in done.stdout


def test_without_a_gpu_nothing_is_run():
    done = gpu_checks()
    assert done.returncode == 0
    assert "nothing was run" in done.stdout
