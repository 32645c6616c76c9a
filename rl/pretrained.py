"""A pretrained model as the start of training: found, and checked before hours go into it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl.engines.model_types import check_length, check_model_type
from rl.errors import CheckpointNotFound, MissingPackage, UnsupportedModel
from rl.settings import SampledBy

CONFIG = "config.json"
_HUB_SECONDS = 10.0
"""The longest silence of the hub while nothing has started"""


def local_model(name: str) -> Path | None:
    """The checkpoint folder of that path; None for what can only be a name on the hub.

    Raises CheckpointNotFound for a path that leads nowhere or to no model. Imports nothing heavy.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise CheckpointNotFound(f"{folder} holds no model (no {CONFIG}); give a transformers checkpoint")
        return folder.resolve()
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointNotFound(f"there is no folder {folder}; give the folder of a transformers checkpoint")
    return None


def check_adapters_installed() -> None:
    """Raises MissingPackage where peft is not installed. Imports nothing heavy."""
    if find_spec("peft") is None:
        raise MissingPackage("LoRA needs the package peft: pip install 'compactionrl[lora]', or leave lora unset")


def find_model(name: str) -> Path:
    """The checkpoint folder of that path, or of that name on the Hugging Face hub (fetched where it is not yet here).

    Raises CheckpointNotFound with the next step.
    """
    if (folder := local_model(name)) is not None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.gguf", "*.bin", "*.pth", "onnx/*"]))
    except Exception as error:  # of the hub's client, and of whichever HTTP library it uses
        raise _not_given(name, error) from error


def find_config(name: str) -> Path | None:
    """The folder with that model's config.json, which alone is fetched where it is on the hub; None where the hub
    cannot be asked now. Raises CheckpointNotFound for a name that it does not have, or not for this user."""
    if (folder := local_model(name)) is not None:
        return folder
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # of one small file, in front of everything else that is said
    try:
        siblings = HfApi().model_info(name, timeout=_HUB_SECONDS).siblings or ()  # the others know no time limit
        if any(file.rfilename == CONFIG for file in siblings):
            return Path(snapshot_download(name, allow_patterns=[CONFIG]))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise _not_given(name, error) from error
    except Exception:  # finished stages need no model: one that does says what is wrong
        return None
    raise CheckpointNotFound(f"{name} on the Hugging Face hub holds no model (no {CONFIG})")


def check_described(folder: Path, longest: int, engine: SampledBy) -> None:
    """What config.json alone says against this model, before anything starts. Imports nothing heavy.

    Raises UnsupportedModel with the reason, and CheckpointNotFound where the file cannot be read.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise CheckpointNotFound(f"{path} cannot be read ({error}); give a whole transformers checkpoint") from error
    with _named(folder):
        if engine == "torch":
            check_model_type(config.get("model_type"))
        positions = (config.get("text_config") or config).get("max_position_embeddings")
        check_length(longest, positions if isinstance(positions, int) else None)


def check_trainable(folder: Path, longest: int, engine: SampledBy = "torch") -> None:
    """Whether the trainer and the engine can take this model, with windows of up to `longest` tokens.

    Raises UnsupportedModel with the reason.
    """
    from transformers import AutoConfig, AutoTokenizer

    from rl.engines.direct_forward import check_supported
    from rl.engines.weight_sync import CheckpointWeights

    config: Any = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    entries = len(AutoTokenizer.from_pretrained(folder))
    with _named(folder):
        if engine == "torch":
            check_supported(config)
        check_length(longest, getattr(text, "max_position_embeddings", None))
        if entries > text.vocab_size:
            raise UnsupportedModel(
                f"the tokenizer has {entries} entries, the model's vocabulary {text.vocab_size}: they do not belong "
                "together"
            )
    if engine == "vllm":
        CheckpointWeights(folder)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """A refusal says which model it is about."""
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder}: {error}") from None


def _not_given(name: str, error: Exception) -> CheckpointNotFound:
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    # The client's message begins with the status line, where there was an answer, and says in the next what it means.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if " Client Error" not in line), type(error).__name__)
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        advice = "Check the name; a gated or private model needs your token in HF_TOKEN"
    else:
        advice = "Without network, download it elsewhere and give its folder"
    return CheckpointNotFound(
        f"model {name!r} is no folder here, and the Hugging Face hub did not give it ({said.rstrip('.')}). {advice}"
    )
