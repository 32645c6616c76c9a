"""A vLLM server that runs elsewhere, by token ids over HTTP; its weights are updated through a folder that both see.

Start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --logprobs-mode processed_logprobs (README).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx
import numpy as np
from filelock import FileLock
from torch import Tensor

from compaction.protocols import Completion, EngineError, GenerateRequest
from rl.engines.vllm_requests import Limits, PrefixSalts
from rl.engines.weight_sync import START, CheckpointWeights, HttpSync, WeightUpdates
from rl.settings import VllmSettings


class VllmServer:
    """One replica behind HTTP. Its weights' version is the server's own, stamped on every token that it samples."""

    def __init__(self, address: str, checkpoint: Path, settings: VllmSettings, *, max_length: int) -> None:
        """Raises EngineError where the server does not answer or was not started as it must be."""
        self._limits = Limits.of(checkpoint, max_length)
        self._address = address.rstrip("/")
        self._client = httpx.AsyncClient(timeout=None)
        self._salts = PrefixSalts(f"{uuid4().hex}-")
        # One policy at a time: stages of this machine wait for each other, the others find out by the version's owner.
        self._lease = FileLock(Path(tempfile.gettempdir()) / f"compactionrl-vllm-{quote(self._address, safe='')}.lock")
        self._lease.acquire()
        try:
            weights = CheckpointWeights(checkpoint)
            self._sync = HttpSync(self._address, checkpoint, settings.shared_folder)
            self._sync.init_weight_transfer_engine({"max_length": max_length, "mixture": weights.mixture})
            self._updates = WeightUpdates(self._sync, weights)
            self._updates.load_checkpoint(0)  # whatever it was started with, or trained with before
        except BaseException:
            self._lease.release()
            raise
        self.version = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples until an end token or `max_tokens`.

        Raises ContextLengthError for a prompt longer than `max_length`; EngineError where the server fails or gives
        the request up.
        """
        body = {
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": self._limits.sampling(request),
            "cache_salt": self._salts.of(self.version, request.rollout_id),
        }
        try:
            response = await self._client.post(f"{self._address}/inference/v1/generate", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"the vLLM server {self._address} failed: {type(error).__name__} {error}") from error
        if response.status_code != httpx.codes.OK:
            raise EngineError(f"the vLLM server refused a request: {response.status_code} {response.text[:300]}")
        return completion_of(response.json()["choices"][0], len(request.prompt_ids), self._sync.version)

    async def release(self, rollout_id: str) -> None:
        """The rollout's prefix is not found again, and makes room when room is needed."""
        self._salts.forget(rollout_id)

    def load_weights(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        """Takes new weights; requests in flight wait meanwhile, and go on with the new ones.

        Raises EngineError for weights that do not fit or that the server does not take; the old ones keep serving.
        """
        self._updates.load(state_dict, version)
        self.version = version

    async def aclose(self) -> None:
        await self._client.aclose()
        self._sync.close()
        self._lease.release()


def completion_of(choice: dict[str, Any], prompt_tokens: int, version: Callable[[str], int]) -> Completion:
    """What a server's choice says; `version` reads its names of versions.

    Raises EngineError for one without logprobs, or that was given up.
    """
    token_ids = choice.get("token_ids") or []
    logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise EngineError(f"the vLLM server ended the request as {reason!r} after {len(token_ids)} tokens")
    if len(logprobs) != len(token_ids):
        raise EngineError(f"the vLLM server gave {len(logprobs)} logprobs for {len(token_ids)} tokens; {START}")
    versions = np.full(len(token_ids), -1, np.int32)
    for span in choice.get("weight_versions") or ():
        versions[span["start"] : span["end"]] = version(span["version"])
    return Completion(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=versions,
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
    )
