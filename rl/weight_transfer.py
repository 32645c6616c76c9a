"""The trainer's end of a weight transfer from GPU to GPU, through vLLM's own transfer engines (NCCL, CUDA IPC).

vLLM drives it over four methods of a client (see rl.engines.weight_sync); here the client is the rollout actors.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from torch import Tensor

from rl.engines.vllm_version import require_vllm

Weights = Callable[[], Iterable[tuple[str, Tensor]]]


class RolloutActors:
    """All replicas as one client. `version` is what the next update is called."""

    def __init__(self, actors: Sequence[Any], ranks: int) -> None:
        """`ranks`: GPUs of each replica."""
        self.actors, self._ranks = list(actors), ranks
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each replica joins behind the one before it."""
        first = init_info.get("rank_offset")
        infos = [
            init_info if first is None else init_info | {"rank_offset": first + number * self._ranks}
            for number in range(len(self.actors))
        ]
        self._all("init_weight_transfer_engine", infos)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", [update_info] * len(self.actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", [weight_version or str(self.version)] * len(self.actors))

    def _all(self, step: str, arguments: Sequence[Any] | None = None) -> None:
        given = [() for _ in self.actors] if arguments is None else [(argument,) for argument in arguments]
        ray.get([actor.weight_sync.remote(step, *a) for actor, a in zip(self.actors, given, strict=True)])


class WeightSender:
    """Sends the policy to the replicas; a replica that was replaced is found and joined anew."""

    def __init__(self, backend: str, weights: Weights, ranks: int) -> None:
        """`weights`: the policy's tensors by the names of its checkpoint's files; `ranks`: GPUs per replica.

        Raises MissingPackage.
        """
        require_vllm()
        self._backend, self._weights, self._ranks = backend, weights, ranks
        self._client: RolloutActors | None = None
        self._transfer: Any = None

    def send(self, actors: Sequence[Any], version: int) -> None:
        """All of it, to all of them; on return they sample with it."""
        if self._client is None or self._client.actors != list(actors):
            self._client = RolloutActors(actors, self._ranks)
            self._transfer = self._open(self._client)
        self._client.version = version
        self._transfer.send_weights()

    def _open(self, client: RolloutActors) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        weights = self._weights
        announced = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights()]

        class Policy(WeightSource):
            def metadata(self) -> list[Any]:
                return announced

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                yield from weights()

        kind = WeightTransferTrainerFactory._registry[self._backend]().init_info_cls
        meeting: dict[str, Any] = {}
        if self._backend == "nccl":
            ranks = 1 + len(client.actors) * self._ranks
            meeting = {
                "master_address": str(ray.util.get_node_ip_address()),
                "master_port": free_port(),
                "world_size": ranks,
            }
        return WeightTransferTrainerFactory.trainer_init(kind(rank=0, **meeting), client=client, source=Policy())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
