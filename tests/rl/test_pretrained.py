"""A pretrained model is found and checked before hours go into it; every refusal says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rl.errors import CheckpointNotFound, UnsupportedModel
from rl.pretrained import check_trainable, find_model


def changed(checkpoint: Path, folder: Path, **config: object) -> Path:
    """A copy of the checkpoint with another config."""
    shutil.copytree(checkpoint, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_a_folder_is_taken_as_it_is(small_checkpoint: Path) -> None:
    assert find_model(str(small_checkpoint)) == small_checkpoint.resolve()
    check_trainable(small_checkpoint, 64)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(CheckpointNotFound, match="there is no folder"):
        find_model(name)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"no config.json"):
        find_model(str(tmp_path))


def test_a_name_on_the_hub_without_network_advises_a_folder() -> None:
    with pytest.raises(CheckpointNotFound, match=r"'org/some-model' is no folder here, .* give its folder"):
        find_model("org/some-model")


def test_another_architecture_is_refused_with_those_that_work(small_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'gpt2' .* knows llama, qwen2, qwen3; .* vllm"):
        check_trainable(
            changed(small_checkpoint, tmp_path / "m", model_type="gpt2", architectures=["GPT2LMHeadModel"]), 64
        )
    check_trainable(small_checkpoint, 64, "vllm")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(small_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="do not belong together"):
        check_trainable(changed(small_checkpoint, tmp_path / "m", vocab_size=100), 64)


def test_a_window_longer_than_the_model_takes_is_refused(small_checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModel, match="longest window is 1000000; lower the windows"):
        check_trainable(small_checkpoint, 1_000_000)
