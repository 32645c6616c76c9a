"""A model that vLLM serves, in several versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rl.engines.served import END, build


@pytest.fixture(scope="module")
def models() -> dict[int, Any]:
    """The served model's weights by version; its embeddings are tied."""
    return {seed: build("llama", eos=END, seed=seed) for seed in range(3)}


@pytest.fixture(scope="module")
def checkpoint(models: dict[int, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    models[0].save_pretrained(folder)
    return folder
