"""The in-process engine: continuous batching over slots that keep a rollout's keys and values between its turns."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compaction.protocols import Completion, EngineError, FinishReason, GenerateRequest
from rl.engines.calls import Call, check_request, end_tokens
from rl.engines.direct_forward import DirectForward
from rl.engines.kv_cache import NewTokens, lay_out
from rl.engines.sampling import RequestSampler, sample
from rl.engines.weights import load_in_place

STEP_TOKENS = 8192
"""Most padded prompt tokens of one step: bounds the memory of a forward; a longer prompt takes several steps."""


@dataclass(eq=False)
class _Call(Call):
    """One request from its arrival to its completion, with its random stream."""

    sampler: RequestSampler = field(kw_only=True)


@dataclass(eq=False)
class _Slot:
    """A row of the cache: whose it is, the ids it stands for, and how many of them have keys and values."""

    index: int
    rollout_id: str | None = None
    ids: list[int] = field(default_factory=list)
    filled: int = 0
    last_used: int = 0
    call: _Call | None = None

    def clear(self) -> None:
        self.rollout_id, self.ids, self.filled, self.call = None, [], 0, None


class TorchEngine:
    """Samples from a `transformers` causal LM of Llama, Qwen2 or Qwen3 style (design page "Engines").

    A rollout keeps its slot, with the prefix in it, until `release`; when every slot is taken, the idle one used
    longest ago is given away. All that it does follows from the order of the requests: same order, same bits.
    Use it from one event loop at a time, `load_weights` included.

    Raises ValueError at construction for an architecture that it does not serve.
    """

    def __init__(self, model: Any, *, slots: int, max_length: int, version: int = 0):
        """`slots`: rollouts served at once; `max_length`: most tokens of a sequence, prompt and reply together."""
        if slots < 1 or max_length < 2:
            raise ValueError(f"slots={slots}, max_length={max_length}: at least 1 slot and 2 tokens are needed")
        self._forward = DirectForward(model, max_length=max_length)
        self._cache = self._forward.new_cache(slots, max_length)
        self._model = model
        self._slots = [_Slot(index) for index in range(slots)]
        self._by_rollout: dict[str, _Slot] = {}
        self._waiting: deque[_Call] = deque()
        self._driver: asyncio.Task[None] | None = None
        self._clock = 0
        self._stops = frozenset(end_tokens(getattr(model, "generation_config", None), model.config))
        self.max_length = max_length
        self.version = version
        self.generated_tokens = 0
        """Tokens sampled so far"""
        self.prefill_tokens = 0
        """Prompt tokens computed so far, recomputation after a weight update included"""
        self.cached_tokens = 0
        """Prompt tokens served from a kept prefix so far"""
        self.busy_seconds = 0.0
        """Seconds spent in forward and sampling so far"""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples until an end token or `max_tokens`.

        Raises ContextLengthError for a prompt longer than `max_length`; EngineError for a request that cannot be
        served as it stands, and when the engine fails while it is served.
        """
        check_request(request, self.max_length, self._model.config.vocab_size)
        sampler = RequestSampler(request.seed, request.temperature, request.max_tokens)
        call = _Call(request, asyncio.get_running_loop().create_future(), sampler=sampler)
        self._waiting.append(call)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await call.future
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    async def release(self, rollout_id: str) -> None:
        """Frees the rollout's slot and forgets its prefix, so that later rollouts do not depend on it."""
        slot = self._by_rollout.pop(rollout_id, None)
        if slot is None:
            return
        if slot.call is not None:
            slot.call.fail(EngineError(f"rollout {rollout_id!r} was released during its call"))
        slot.clear()

    def load_weights(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        """Takes new weights in place, between two steps; tokens sampled from now on bear `version`.

        Keys and values of running calls are recomputed from their ids before the next token, kept prefixes of idle
        rollouts with their next call. Raises EngineError for names or shapes that do not fit and for non-finite
        values; the old weights then keep serving.
        """
        load_in_place(self._model, state_dict)
        self._cache.clear()
        for slot in self._slots:
            slot.filled = 0
            if slot.call is not None:
                slot.call.stamp(self.version)
        self.version = version

    async def _drive(self) -> None:
        """Steps until there is nothing to do; whoever waits learns of a failure."""
        try:
            while True:
                self._admit()
                active = [(slot, slot.call) for slot in self._slots if slot.call is not None]
                if not active:
                    return
                self._step(active)
                await asyncio.sleep(0)
        except BaseException as error:
            self._fail(EngineError(f"the engine stopped: {type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise

    def _fail(self, error: EngineError) -> None:
        calls = [slot.call for slot in self._slots if slot.call is not None] + list(self._waiting)
        for call in calls:
            call.fail(error)
        self._waiting.clear()
        self._by_rollout.clear()
        self._cache.clear()
        for slot in self._slots:
            slot.clear()

    def _abandon(self, call: _Call) -> None:
        """A caller that was cancelled frees its place; its slot keeps the prefix."""
        if call in self._waiting:
            self._waiting.remove(call)
        for slot in self._slots:
            if slot.call is call:
                slot.call = None

    def _admit(self) -> None:
        """Gives slots to waiting calls in their order; a call whose rollout is being served waits for it."""
        for _ in range(len(self._waiting)):
            call = self._waiting.popleft()
            slot = self._slot_for(call.request.rollout_id)
            if slot is None:
                self._waiting.append(call)
                continue
            prompt = call.request.prompt_ids.tolist()
            # The last prompt token is always computed: its logits choose the first sampled token.
            kept = min(_common_prefix(slot.ids, prompt), slot.filled, len(prompt) - 1)
            slot.ids, slot.filled, slot.call = prompt, kept, call
            call.cached_tokens = kept
            self.cached_tokens += kept

    def _slot_for(self, rollout_id: str) -> _Slot | None:
        slot = self._by_rollout.get(rollout_id)
        if slot is None:
            idle = [slot for slot in self._slots if slot.call is None]
            if not idle:
                return None
            slot = min(idle, key=lambda s: (s.rollout_id is not None, s.last_used if s.rollout_id else s.index))
            if slot.rollout_id is not None:
                del self._by_rollout[slot.rollout_id]
            slot.clear()
            slot.rollout_id = rollout_id
            self._by_rollout[rollout_id] = slot
        elif slot.call is not None:
            return None
        self._touch(slot)
        return slot

    @torch.inference_mode()
    def _step(self, active: list[tuple[_Slot, _Call]]) -> None:
        """One forward over what the active slots have not computed; rows that are complete sample one token."""
        began = time.perf_counter()
        served, rows = _new_tokens(active)
        layout = lay_out(rows, dtype=self._forward.dtype, device=self._forward.device)
        logits = self._forward(layout, self._cache)
        ready: list[int] = []
        for index, ((slot, call), row) in enumerate(zip(served, rows, strict=True)):
            slot.filled += len(row.token_ids)
            if not call.token_ids or len(row.token_ids) > 1:
                self.prefill_tokens += max(0, min(slot.filled, len(call.request.prompt_ids)) - row.start)
            if slot.filled == len(slot.ids):
                ready.append(index)
        if len(ready) < len(rows):
            served = [served[i] for i in ready]
            logits = logits[torch.tensor(ready, dtype=torch.long, device=logits.device)]
        if served:
            tokens, logprobs = sample(logits, [call.sampler for _, call in served])
            self.generated_tokens += len(served)
            for (slot, call), token, logprob in zip(served, tokens.tolist(), logprobs.tolist(), strict=True):
                slot.ids.append(token)
                call.token_ids.append(token)
                call.logprobs.append(logprob)
                if token in self._stops:
                    self._finish(slot, call, "stop")
                elif len(call.token_ids) == call.request.max_tokens:
                    self._finish(slot, call, "length")
        self.busy_seconds += time.perf_counter() - began

    def _finish(self, slot: _Slot, call: _Call, reason: FinishReason) -> None:
        slot.call = None
        self._touch(slot)
        call.stamp(self.version)
        call.finish(reason)

    def _touch(self, slot: _Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock


def _new_tokens(active: list[tuple[_Slot, _Call]]) -> tuple[list[tuple[_Slot, _Call]], list[NewTokens]]:
    """What this step computes: all single tokens, and longer pieces as far as STEP_TOKENS reach (at least one row)."""
    served, rows = [], []
    longer = width = 0
    for pair in active:
        slot = pair[0]
        piece = slot.ids[slot.filled : slot.filled + STEP_TOKENS]
        if len(piece) > 1:
            if longer and max(width, len(piece)) * (longer + 1) > STEP_TOKENS:
                continue
            longer, width = longer + 1, max(width, len(piece))
        served.append(pair)
        rows.append(NewTokens(slot.index, slot.filled, piece))
    return served, rows


def _common_prefix(left: list[int], right: list[int]) -> int:
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left[i] != right[i])
