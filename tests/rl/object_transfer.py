"""A transfer backend that any machine has, on both of vLLM's transfer engines: tensors travel with the messages.

NCCL and IPC need CUDA; the handshake, the four steps and vLLM's own reloading are the same with this one.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from compaction.protocols import Renderer
from rl.serving import ServedEngine, VllmServing


@dataclass
class Greeting(WeightTransferInitInfo):
    rank_offset: int


@dataclass
class Parcel(WeightTransferUpdateInfo):
    tensors: dict[str, Any]


@dataclass
class Sender(TrainerInitInfo):
    backend: ClassVar[str] = "messages"


class Receiving(WeightTransferEngine[Greeting, Parcel]):
    """vLLM's end."""

    init_info_cls, update_info_cls = Greeting, Parcel

    def init_transfer_engine(self, init_info: Greeting) -> None:
        self.greeted = init_info.rank_offset

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Parcel) -> None:
        self.model.load_weights(iter(update_info.tensors.items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


class Sending(TrainerWeightTransferEngine[Sender]):
    """The trainer's end."""

    init_info_cls = Sender

    @classmethod
    def trainer_init(cls, init_info: Sender, *, client: Any, source: Any = None) -> Sending:
        client.init_weight_transfer_engine({"rank_offset": 1})
        return cls(client=client, source=source)

    def send_weights(self) -> None:
        assert self.source is not None
        names = {meta.name for meta in self.source.metadata()}
        tensors = {name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in self.source}
        assert names == set(tensors)
        self.client.start_weight_update()
        self.client.update_weights({"tensors": tensors})
        self.client.finish_weight_update()

    def shutdown(self) -> None: ...


def register() -> None:
    with suppress(ValueError):  # already there
        WeightTransferEngineFactory.register_engine("messages", Receiving)
    with suppress(ValueError):
        WeightTransferTrainerFactory.register_engine("messages", Sending)


class MessageServing(VllmServing):
    """vLLM that knows this backend."""

    def load(self) -> tuple[ServedEngine, Renderer]:
        register()
        return super().load()
