"""What a rollout process serves: an engine on a checkpoint folder, and the renderer of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from compaction.protocols import Engine, Renderer
from compaction.rendering import load_renderer
from rl.settings import VllmSettings


class ServedEngine(Engine, Protocol):
    """An engine whose weights can be swapped."""

    def load_weights(self, state_dict: Mapping[str, Any], version: int) -> None: ...


class Serving(Protocol):
    """What a rollout process serves. Picklable: it travels there, and loads there."""

    @property
    def gpus(self) -> float:
        """GPUs that one such process claims, where there are any"""
        ...

    def load(self) -> tuple[ServedEngine, Renderer]: ...


@dataclass(frozen=True)
class TorchServing:
    """The in-process engine on a checkpoint folder."""

    checkpoint: Path
    slots: int
    """Rollouts at once"""
    max_length: int
    """Most tokens of one of them, the window at least"""
    gpus: float = 0.5

    def load(self) -> tuple[ServedEngine, Renderer]:
        """Raises CheckpointNotFound."""
        from rl.engines.torch_engine import TorchEngine
        from rl.models import chosen_device, load_policy

        policy = load_policy(self.checkpoint).to(chosen_device())
        return TorchEngine(policy, slots=self.slots, max_length=self.max_length), load_renderer(self.checkpoint)


@dataclass(frozen=True)
class VllmServing:
    """vLLM on a checkpoint folder: in the rollout process, or a server that runs elsewhere."""

    checkpoint: Path
    slots: int
    """Rollouts at once"""
    max_length: int
    """Most tokens of one of them, the window at least"""
    settings: VllmSettings
    server: str | None = None
    """Address of a running vLLM server that serves the same model"""

    @property
    def gpus(self) -> float:
        if self.server is not None:
            return 0.0
        return self.settings.tensor_parallel * self.settings.gpu_share

    def load(self) -> tuple[ServedEngine, Renderer]:
        """Raises MissingPackage, and EngineError where vLLM does not serve the model."""
        renderer = load_renderer(self.checkpoint)
        if self.server is not None:
            from rl.engines.vllm_server import VllmServer

            return VllmServer(self.server, self.checkpoint, self.settings, max_length=self.max_length), renderer
        from rl.engines.vllm_engine import VllmEngine

        engine = VllmEngine(self.checkpoint, self.settings, slots=self.slots, max_length=self.max_length)
        return engine, renderer
