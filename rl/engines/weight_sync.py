"""How new weights reach vLLM: behind four methods, the ones that vLLM's own weight-transfer clients have.

`init_weight_transfer_engine` once, then for every update `start_weight_update`, `update_weights`,
`finish_weight_update`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import httpx
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from compaction.protocols import EngineError
from rl.engines.weights import Shapes, Tied, as_stored, check_weights
from rl.errors import UnsupportedModel

UPDATE_SECONDS = 300.0
"""How long a server may take for one step of an update"""
START = "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --logprobs-mode processed_logprobs"


class WeightSync(Protocol):
    """One way into a serving vLLM."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Opens the way; before the first update."""
        ...

    def start_weight_update(self) -> None:
        """Nothing is sampled from here on, and what was computed with the old weights is forgotten."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Hands over weights."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The weights serve from here on, under that version."""
        ...


class CheckpointWeights:
    """What a checkpoint's weights are called and how large they are, and the weights themselves to fall back on.

    vLLM knows weights by their names in the checkpoint's files. Training knows them by their names in memory, where
    `transformers` may hold several as one. Raises UnsupportedModel where an update would not reach all that vLLM reads.
    """

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self._files = sorted(checkpoint.glob("*.safetensors"))
        self._model, loading = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype="auto", device_map="meta", output_loading_info=True
        )
        in_memory = self._model.state_dict()
        self.shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in in_memory.items()}
        self.tied: Tied = self._model.all_tied_weights_keys
        self.mixture = any(len(shape) == 3 and min(shape) > 1 for shape in self.shapes.values())
        """Whether there are experts: stacks of matrices"""
        self._names = [name for name, _ in as_stored(self._model, in_memory)]
        self._tied_in_files = {
            self._name_in_files(name): self._name_in_files(source) for name, source in self.tied.items()
        }
        stored: set[str] = set()
        for file in self._files:
            with safe_open(file, framework="pt") as opened:
                stored |= set(opened.keys())
        if other := {*loading["unexpected_keys"], *(set(self._names) - stored - set(self._tied_in_files))}:
            raise UnsupportedModel(
                f"{checkpoint}: its files and transformers' model of it hold different weights (such as "
                f"{sorted(other)[0]}), so that vLLM would serve some that are never trained. Take a checkpoint that "
                "transformers' save_pretrained wrote"
            )

    def checked(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights as vLLM must get them, from those in memory.

        Tied ones go with the others under their own name: on a CPU vLLM keeps a packed copy of the head, which no other
        name renews. Raises EngineError for what does not fit or is not finite.
        """
        check_weights(state_dict, self.shapes, self.tied)
        whole = dict(state_dict) | {name: state_dict[source] for name, source in self.tied.items()}
        return dict(as_stored(self._model, whole))

    def read(self) -> dict[str, Tensor]:
        """The checkpoint's own, as vLLM must get them."""
        stored = {name: tensor for file in self._files for name, tensor in load_file(file).items()}
        stored |= {name: stored[source] for name, source in self._tied_in_files.items()}
        return {name: stored[name] for name in self._names}

    def _name_in_files(self, name: str) -> str:
        ((stored, _),) = as_stored(self._model, {name: self._model.state_dict()[name]})
        return stored


class WeightUpdates:
    """Whole updates over one way in: all of the weights, or the old ones again."""

    def __init__(self, sync: WeightSync, checkpoint: CheckpointWeights) -> None:
        self._sync, self._checkpoint = sync, checkpoint
        self._serving: dict[str, Tensor] | None = None
        """The weights last taken: those of the checkpoint as long as there are none"""

    def load(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        """Raises EngineError for weights that do not fit or are not taken; the old ones keep serving. A vLLM that does
        not take even those back samples no more."""
        self._update(self._checkpoint.checked(state_dict), version)

    def load_checkpoint(self, version: int) -> None:
        """The checkpoint's own weights, whatever serves. Raises as `load` does."""
        self._update(self._checkpoint.read(), version)

    def _update(self, weights: dict[str, Tensor], version: int) -> None:
        self._sync.start_weight_update()
        try:
            self._sync.update_weights({"state_dict": weights})
        except Exception as error:
            # What had arrived so far is of no use: the old weights again, whole.
            old = self._checkpoint.read() if self._serving is None else self._serving
            self._sync.update_weights({"state_dict": old})
            self._sync.finish_weight_update()
            raise EngineError(
                f"vLLM did not take the weights of version {version} ({type(error).__name__}: {error}); the old ones "
                "keep serving"
            ) from error
        self._serving = weights
        self._sync.finish_weight_update(str(version))


class ReloadSync:
    """Into a vLLM of this process, through its executor: on CPU and GPU, on every rank of a tensor-parallel one."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Nothing to open."""

    def start_weight_update(self) -> None:
        """Between two steps nothing is sampled anyway; running requests compute their keys and values again."""
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._engine.collective_rpc("take_weights", args=(update_info["state_dict"],))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if weight_version is not None:
            self._engine.set_weight_version(weight_version)


class TransferSync:
    """Into a vLLM of this process, from the trainer's GPU, through vLLM's own transfer engine in its workers."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        """Between two steps nothing is sampled anyway; running requests compute their keys and values again."""
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._engine.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.collective_rpc("finish_weight_update")
        if weight_version is not None:
            self._engine.set_weight_version(weight_version)


class HttpSync:
    """Into a vLLM server, which reads the weights from a folder that it sees too."""

    def __init__(self, address: str, checkpoint: Path, shared: str | None) -> None:
        """`shared`: the folder that both see; None: this machine's temporary ones."""
        self._address, self._config, self._shared = address, checkpoint / "config.json", shared
        self._client = httpx.Client(timeout=UPDATE_SECONDS)
        self._owner = uuid4().hex

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Finds out whether the server is one that can be trained with. Raises EngineError."""
        config = self._call("GET", "/server_info?config_format=json").json()["vllm_config"]
        mode, longest = config["model_config"]["logprobs_mode"], config["model_config"]["max_model_len"]
        if mode != "processed_logprobs":
            raise EngineError(f"the server's --logprobs-mode is {mode}; the one to train with is processed_logprobs")
        if longest < init_info["max_length"]:
            raise EngineError(
                f"the server takes {longest} tokens, the window needs {init_info['max_length']}: --max-model-len"
            )
        if init_info["mixture"] and config["device_config"]["device"] == "cpu":
            raise EngineError(
                f"the vLLM server {self._address} runs on a CPU, and such a server samples wrongly from a mixture of "
                "experts once its weights were updated. Serve it on a GPU, or leave loop.vllm.servers empty: vLLM in "
                "the rollout processes updates it rightly"
            )

    def version(self, name: str) -> int:
        """The version behind the server's name for it. Raises EngineError where the weights are somebody else's."""
        owner, _, version = name.rpartition("-")
        if owner != self._owner:
            raise EngineError(f"another run has put its weights on the vLLM server {self._address}; give each its own")
        return int(version)

    def start_weight_update(self) -> None:
        self._call("POST", "/pause?mode=keep")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="compactionrl-weights-", dir=self._shared))
        folder.chmod(0o755)  # the server may run as somebody else
        shutil.copyfile(self._config, folder / "config.json")
        save_file(
            {n: t.contiguous().clone() for n, t in update_info["state_dict"].items()}, folder / "model.safetensors"
        )
        try:
            self._call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._call("POST", "/reset_prefix_cache?reset_running_requests=true")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if weight_version is not None:
            self._call("POST", "/update_weight_version", {"new_version": f"{self._owner}-{weight_version}"})
        self._call("POST", "/resume")

    def close(self) -> None:
        self._client.close()

    def _call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            response = self._client.request(method, f"{self._address}{path}", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"the vLLM server {self._address} does not answer: {error}; {START}") from error
        if response.status_code != httpx.codes.OK:
            raise EngineError(
                f"the vLLM server {self._address} refused {path}: {response.status_code} {response.text[:300]}; {START}"
            )
        return response
