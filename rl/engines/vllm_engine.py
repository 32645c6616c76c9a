"""The vLLM engine: token ids in and out, and weights swapped in place between two of its steps.

vLLM runs inside this process, one step at a time, as the torch engine does: requests that arrive in the same order are
served in the same batches, a swap falls between two tokens, and nothing outlives the process that is killed. With
tensor parallelism the other ranks are processes of vLLM's own, which end with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compaction.protocols import Completion, EngineError, GenerateRequest
from rl.engines.calls import Call
from rl.engines.vllm_requests import Limits, PrefixSalts
from rl.engines.vllm_version import require_vllm
from rl.engines.weight_sync import CheckpointWeights, ReloadSync, TransferSync, WeightUpdates
from rl.settings import VllmSettings

CPU_BLOCK = 32
"""Tokens that are kept or computed again together; vLLM's own 128 on a CPU keeps nothing of a short window"""


class VllmEngine:
    """Samples from any causal LM that vLLM serves (design page "Engines"), `slots` rollouts at once.

    Logprobs are those of the distribution really sampled. Prefixes are kept for the rollout that they belong to and the
    version that computed them: no rollout depends on another's, and none sees keys of older weights.
    Use it from one event loop at a time, `load_weights` included.
    """

    def __init__(
        self, checkpoint: Path, settings: VllmSettings, *, slots: int, max_length: int, version: int = 0
    ) -> None:
        """`slots`: rollouts served at once; `max_length`: most tokens of a sequence, prompt and reply together.

        Raises MissingPackage, and EngineError for a model that vLLM does not take.
        """
        require_vllm()
        self._limits = Limits.of(checkpoint, max_length)
        self._engine = _start(checkpoint, settings, slots, max_length)
        self._updates = WeightUpdates(ReloadSync(self._engine), CheckpointWeights(checkpoint))
        self._transfer = TransferSync(self._engine)
        self._calls: dict[str, Call] = {}
        self._names = count()
        self._salts = PrefixSalts()
        self._driver: asyncio.Task[None] | None = None
        self._paused = asyncio.Event()
        self._paused.set()
        self.version = version
        self.generated_tokens = 0
        """Tokens sampled so far"""
        self.cached_tokens = 0
        """Prompt tokens served from a kept prefix so far"""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples until an end token or `max_tokens`.

        Raises ContextLengthError for a prompt longer than `max_length`; EngineError for a request that cannot be
        served as it stands, and when vLLM fails or gives it up while it is served.
        """
        sampling = self._limits.sampling(request)
        call, name = Call(request, asyncio.get_running_loop().create_future()), str(next(self._names))
        self._submit(name, request, sampling)
        self._calls[name] = call
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await call.future
        except asyncio.CancelledError:
            self.abort(name)
            raise

    async def release(self, rollout_id: str) -> None:
        """The rollout's prefix is not found again, and makes room when room is needed."""
        self._salts.forget(rollout_id)

    def abort(self, name: str) -> None:
        """Gives up one request; what it was at is free again."""
        if self._calls.pop(name, None) is not None:
            self._engine.abort_request([name])

    def pause(self) -> None:
        """No more tokens until `resume`; requests in flight keep what they have."""
        self._paused.clear()

    def resume(self) -> None:
        self._paused.set()

    def load_weights(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        """Takes new weights in place, between two steps; tokens sampled from now on bear `version`.

        Keys and values of running requests are computed again from their ids before the next token. Raises
        EngineError for weights that do not fit, are not finite, or that vLLM fails to take; the old ones keep serving.
        """
        self._updates.load(state_dict, version)
        self._now_serves(version)

    def weight_sync(self, step: str, *arguments: Any) -> None:
        """One of the four steps of a transfer from the trainer's GPU; between start and finish nothing is sampled."""
        getattr(self._transfer, step)(*arguments)
        if step == "start_weight_update":
            self.pause()
        if step == "finish_weight_update":
            self._now_serves(int(arguments[0]))
            self.resume()

    def _now_serves(self, version: int) -> None:
        for call in self._calls.values():
            call.stamp(self.version)
        self.version = version

    def _submit(self, name: str, request: GenerateRequest, sampling: dict[str, Any]) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        salt = self._salts.of(self.version, request.rollout_id)
        prompt = TokensPrompt(prompt_token_ids=request.prompt_ids.tolist(), cache_salt=salt)
        try:
            self._engine.add_request(name, prompt, SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA))
        except ValueError as error:
            raise EngineError(f"vLLM refused the request: {error}") from error

    async def _drive(self) -> None:
        """Steps until there is nothing to do; whoever waits learns of a failure."""
        try:
            while self._calls:
                await self._paused.wait()
                for output in self._engine.step():
                    self._take(output)
                await asyncio.sleep(0)
        except BaseException as error:
            failure = EngineError(f"vLLM stopped: {type(error).__name__}: {error}")
            for name, call in list(self._calls.items()):
                self.abort(name)
                call.fail(failure)
            if not isinstance(error, Exception):
                raise

    def _take(self, output: Any) -> None:
        """What one step gave one request."""
        call = self._calls.get(output.request_id)
        if call is None:
            return
        part = output.outputs[0]
        if not call.token_ids and output.num_cached_tokens:
            call.cached_tokens = output.num_cached_tokens
            self.cached_tokens += output.num_cached_tokens
        try:
            add_sampled(call, list(part.token_ids), part.logprobs)
            self.generated_tokens += len(part.token_ids)
            if not output.finished:
                return
            call.stamp(self.version)
            end_call(call, part.finish_reason)
        except EngineError as error:
            if not output.finished:
                self._engine.abort_request([output.request_id])
            call.fail(error)
        del self._calls[output.request_id]


def add_sampled(call: Call, token_ids: list[int], logprobs: Any) -> None:
    """Appends sampled tokens. Raises EngineError where a token comes without its logprob."""
    if len(logprobs or ()) != len(token_ids):
        raise EngineError(f"vLLM gave {len(logprobs or ())} logprobs for {len(token_ids)} tokens")
    call.token_ids += token_ids
    call.logprobs += [float(at[token].logprob) for token, at in zip(token_ids, logprobs or (), strict=True)]


def end_call(call: Call, reason: str | None) -> None:
    """Completes a call that vLLM finished. Raises EngineError where it was given up (aborted, failed)."""
    if reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended the request as {reason!r} after {len(call.token_ids)} tokens")
    call.finish("stop" if reason == "stop" else "length")


def _dtype(checkpoint: Path, settings: VllmSettings) -> str:
    """The checkpoint's own where it is not set: vLLM's auto would serve float32 weights in half precision."""
    from transformers import AutoConfig

    if settings.dtype != "auto":
        return settings.dtype
    own = AutoConfig.from_pretrained(checkpoint).get_text_config().dtype
    return str(own or torch.float32).removeprefix("torch.")


def _start(checkpoint: Path, settings: VllmSettings, slots: int, max_length: int) -> Any:
    on_gpu, threads = torch.cuda.is_available(), torch.get_num_threads()
    if on_gpu:
        # Rules that the torch engine and the trainer keep to; kernels of vLLM break them.
        torch.use_deterministic_algorithms(False)
    os.environ.update(_environment(settings))
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return LLMEngine.from_engine_args(
            EngineArgs(
                model=str(checkpoint),
                skip_tokenizer_init=True,
                generation_config="vllm",  # the checkpoint's own sampling defaults are not ours
                dtype=_dtype(checkpoint, settings),
                seed=0,
                max_model_len=max_length,
                max_num_seqs=slots,
                enforce_eager=settings.eager or not on_gpu,
                gpu_memory_utilization=0.9 * settings.gpu_share,
                tensor_parallel_size=settings.tensor_parallel,
                distributed_executor_backend="uni" if settings.tensor_parallel == 1 else "mp",
                logprobs_mode="processed_logprobs",
                enable_prefix_caching=True,
                block_size=None if on_gpu else CPU_BLOCK,
                async_scheduling=False,  # a token is stamped with the weights of the step that gave it
                disable_log_stats=True,
                worker_extension_cls="rl.engines.vllm_worker.WeightReceiver",
                weight_transfer_config=_transfer_config(settings),
            )
        )
    except (ValueError, RuntimeError) as error:  # also what pydantic raises for settings that do not fit the model
        raise EngineError(f"vLLM does not serve {checkpoint}: {error}") from error
    finally:
        torch.set_num_threads(threads)


def _transfer_config(settings: VllmSettings) -> Any:
    from vllm.config import WeightTransferConfig

    return None if settings.transfer == "objects" else WeightTransferConfig(backend=settings.transfer)


def _environment(settings: VllmSettings) -> dict[str, str]:
    """What vLLM reads from the environment when it is imported and started."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
