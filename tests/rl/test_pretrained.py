"""A pretrained model is found and checked before hours go into it; every refusal says what to do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rl.errors import CheckpointNotFound, UnsupportedModel
from rl.pretrained import check_trainable, find_model
from tests.rl.hub import hub

ROOT = Path(__file__).parents[2]


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


def of_the_hub(address: str, folder: Path, code: str) -> str:
    """What is printed where `address` is the hub, and `folder` its cache."""
    online = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder)}
    code = f"from rl.pretrained import find_config, find_model\nfrom rl.errors import CheckpointNotFound\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | online, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_name_on_the_hub_is_fetched_whole_or_its_config_alone(small_checkpoint: Path, tmp_path: Path) -> None:
    with hub({"org/small": small_checkpoint}) as address:
        config = Path(of_the_hub(address, tmp_path, "print(find_config('org/small'))").strip())
        assert [file.name for file in config.iterdir()] == ["config.json"]
        whole = Path(of_the_hub(address, tmp_path, "print(find_model('org/small'))").strip())
        assert whole == config
        check_trainable(whole, 64)
        assert (whole / "model.safetensors").read_bytes() == (small_checkpoint / "model.safetensors").read_bytes()


def test_a_name_that_the_hub_does_not_have_is_refused_by_its_config(small_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    code = "try:\n    print(find_config('{}'))\nexcept CheckpointNotFound as error:\n    print(error)"
    with hub({"org/small": small_checkpoint, "org/adapter": tmp_path / "adapter"}) as address:
        unknown = of_the_hub(address, tmp_path, code.format("org/smoll"))
        assert (
            "'org/smoll' is no folder here, and the Hugging Face hub did not give it (Repository Not Found" in unknown
        )
        assert "Check the name" in unknown
        assert "holds no model" in of_the_hub(address, tmp_path, code.format("org/adapter"))
    assert of_the_hub(address, tmp_path, code.format("org/smoll")) == "None\n"


def test_a_hub_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code = "import rl.pretrained\nrl.pretrained._HUB_SECONDS = 0.2\nprint(find_config('org/small'))"
        assert of_the_hub(address, tmp_path, code) == "None\n"


def test_another_architecture_is_refused_with_those_that_work(small_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'gpt2' .* knows llama, qwen2, qwen3; .* vllm"):
        check_trainable(
            changed(small_checkpoint, tmp_path / "m", model_type="gpt2", architectures=["GPT2LMHeadModel"]), 64
        )
    check_trainable(small_checkpoint, 64, "vllm")


def test_a_window_longer_than_the_model_takes_is_refused_whatever_its_config_calls_that(
    small_checkpoint: Path, tmp_path: Path
) -> None:
    folder = changed(small_checkpoint, tmp_path / "m")
    sizes = {"n_positions": 100, "n_embd": 16, "n_layer": 1, "n_head": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    with pytest.raises(UnsupportedModel, match="the model takes 100 tokens, the longest window is 101"):
        check_trainable(folder, 101, "vllm")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(small_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="do not belong together"):
        check_trainable(changed(small_checkpoint, tmp_path / "m", vocab_size=100), 64)


def test_a_window_longer_than_the_model_takes_is_refused(small_checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModel, match="longest window is 1000000; lower the windows"):
        check_trainable(small_checkpoint, 1_000_000)
