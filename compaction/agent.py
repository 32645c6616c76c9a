"""The agent loop: act, observe, compact when the window is nearly full, go on; then grade.

One call of `run_rollout` makes one Rollout. The same loop runs in training and in evaluation, against any engine and
any environment.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field

import numpy as np

from compaction import window
from compaction.history import History, Message, Turn, ids
from compaction.protocols import (
    Completion,
    ContextLengthError,
    Engine,
    Environment,
    GenerateRequest,
    InfrastructureError,
    Recorder,
    Renderer,
    Task,
    Usage,
)
from compaction.rollout import (
    CompactionRecord,
    Outcome,
    Rollout,
    Segment,
    SegmentKind,
    StopReason,
    TurnRecord,
)
from compaction.scaffolds import Scaffold, load_scaffold
from compaction.settings import AgentSettings
from compaction.summaries import PromptPack, judge_summary, load_prompt_pack

_WIDEST_CUT = "[cut 9999999]"


async def run_rollout(
    task: Task,
    engine: Engine,
    renderer: Renderer,
    settings: AgentSettings,
    *,
    seed: int,
    rollout_id: str,
    recorder: Recorder | None = None,
) -> Rollout:
    """Attempts `task` once.

    `seed` alone, with the task's id, decides the sampling: call i of the rollout is seeded by (seed, task id, i).
    Infrastructure failures end in a Rollout without reward; raises WindowTooSmall before anything is spent, and
    ValueError for an unknown scaffold or prompt pack.
    """
    loop = _Loop.start(task, engine, renderer, settings, seed, rollout_id, recorder)
    environment = task.open()
    try:
        await environment.start()
        outcome = await loop.run(environment)
    except InfrastructureError as error:
        outcome = Outcome(None, "error", error.error_class, str(error))
    finally:
        await environment.stop()
        await engine.release(rollout_id)
    return loop.rollout(outcome)


@dataclass
class _SegmentBuilder:
    """Collects one segment: context in front, then sampled and observed tokens."""

    kind: SegmentKind
    context: np.ndarray
    tokens: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)

    def sampled(self, completion: Completion) -> None:
        self.tokens.append(completion.token_ids)
        self.logprobs.append(completion.logprobs)
        self.versions.append(completion.versions)

    def observed(self, token_ids: np.ndarray) -> None:
        self.tokens.append(token_ids)
        self.logprobs.append(np.zeros(len(token_ids), np.float32))
        self.versions.append(np.full(len(token_ids), -1, np.int32))

    def build(self, ordinal: int) -> Segment:
        versions = np.concatenate(self.versions or [ids([])]).astype(np.int32)
        return Segment(
            kind=self.kind,
            ordinal=ordinal,
            context_ids=ids(self.context),
            token_ids=ids(np.concatenate(self.tokens or [ids([])])),
            optimized=versions >= 0,
            logprobs=np.concatenate(self.logprobs or [np.zeros(0)]).astype(np.float32),
            versions=versions,
        )


class _Stop(Exception):
    """Ends the rollout; it is graded as it stands."""

    def __init__(self, reason: StopReason, detail: str | None = None) -> None:
        super().__init__(reason)
        self.reason: StopReason = reason
        self.detail = detail


@dataclass
class _Loop:
    """State of one rollout in flight."""

    task: Task
    engine: Engine
    renderer: Renderer
    settings: AgentSettings
    pack: PromptPack
    scaffold: Scaffold
    overheads: window.Overheads
    seed: int
    rollout_id: str
    recorder: Recorder | None
    history: History
    segment: _SegmentBuilder
    calls: int = 0
    segments: list[Segment] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    compactions: list[CompactionRecord] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    seconds: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "environment": 0.0})

    @classmethod
    def start(cls, task: Task, engine: Engine, renderer: Renderer, settings: AgentSettings, seed: int,
              rollout_id: str, recorder: Recorder | None) -> _Loop:
        pack = load_prompt_pack(settings.compaction.prompt_pack)
        system = Message("system", pack.system, ids(renderer.message("system", pack.system)))
        opening = Message("user", task.instruction, ids(renderer.message("user", task.instruction)))
        overheads = window.Overheads(
            instruction=len(renderer.message("user", pack.summary_instruction)) + len(renderer.generation_prompt),
            turn=len(renderer.generation_prompt)
            + len(renderer.close([], "length"))
            + len(renderer.message("user", _WIDEST_CUT)),
            resume=len(renderer.message("user", pack.resume_message(""))),
        )
        window.check_window(settings.compaction, len(system.token_ids), len(opening.token_ids), overheads)
        history = History(system, (opening,))
        return cls(
            task=task, engine=engine, renderer=renderer, settings=settings, pack=pack,
            scaffold=load_scaffold(settings.scaffold), overheads=overheads, seed=seed, rollout_id=rollout_id,
            recorder=recorder, history=history, segment=_SegmentBuilder("execution", history.token_ids),
        )  # fmt: skip

    @property
    def compactions_left(self) -> int:
        return self.settings.compaction.cap - sum(c.tokens_after is not None for c in self.compactions)

    async def run(self, environment: Environment) -> Outcome:
        """Acts until something stops the rollout, then asks the verifier."""
        try:
            async with asyncio.timeout(self.task.limits.deadline_seconds):
                await self._act(environment)
        except _Stop as stop:
            reason, detail = stop.reason, stop.detail
        except TimeoutError:
            reason, detail = "deadline", f"stopped after {self.task.limits.deadline_seconds} s"
        return Outcome(await environment.grade(), reason, detail=detail)

    def rollout(self, outcome: Outcome) -> Rollout:
        segments = list(self.segments)
        if self.segment.kind == "execution" and len(segments) % 2 == 0:
            segments.append(self.segment.build(len(segments)))
        return Rollout(
            id=self.rollout_id,
            task_id=self.task.id,
            seed=self.seed,
            settings=self.settings,
            segments=tuple(segments),
            outcome=outcome,
            turns=tuple(self.turns),
            compactions=tuple(self.compactions),
            usage=self.usage,
            seconds=self.seconds,
        )

    async def _act(self, environment: Environment) -> None:
        limit = min(self.settings.max_turns, self.task.limits.max_turns or self.settings.max_turns)
        while True:
            if len(self.turns) >= limit:
                raise _Stop("max_turns", f"turn limit {limit}")
            try:
                await self._turn(environment)
            except ContextLengthError as error:  # the engine's own limit is below the window
                if self.compactions_left == 0 or not self.history.turns:
                    raise _Stop("context_full", str(error)) from error
                await self._compact()
                continue
            if window.should_compact(self.settings.compaction, self.history.tokens, self.compactions_left):
                await self._compact()

    async def _turn(self, environment: Environment) -> None:
        """One action and its observation."""
        room = window.response_room(self.settings.compaction, self.history.tokens, self.compactions_left, self.overheads)
        if room < self.settings.compaction.min_response:
            raise _Stop("context_full", f"|h| {self.history.tokens} of window {self.settings.compaction.window}")
        before = ids(self.renderer.generation_prompt)
        completion = await self._generate(self.history.token_ids, before, room, "execution", self.history.messages())
        self.segment.observed(before)
        self.segment.sampled(completion)
        reply = self.renderer.decode(completion.token_ids)
        action = self.scaffold.parse(reply, completion.finish_reason)
        if action.kind == "finish":
            self._record_turn(reply, "")
            raise _Stop("finished")
        if action.kind == "malformed":
            observation = action.text
        else:
            started = time.perf_counter()
            observation = self.scaffold.observation(await environment.execute(action.text))
            self.seconds["environment"] += time.perf_counter() - started
        self._observe(reply, before, completion, observation)

    def _observe(self, reply: str, before: np.ndarray, completion: Completion, observation: str) -> None:
        """Adds the whole turn to the history, the observation clipped so that the summary request still fits."""
        close = self.renderer.close(completion.token_ids, completion.finish_reason)
        used = self.history.tokens + len(before) + len(completion.token_ids) + len(close)
        room = window.observation_room(self.settings.compaction, used, self.compactions_left, self.overheads)
        clipped = window.clip(
            observation,
            lambda text: len(self.renderer.message("user", text)) <= room,
            self.renderer.encode,
            self.renderer.decode,
        )
        if clipped is None:
            self._record_turn(reply, observation)
            raise _Stop("context_full", "no room for the observation")
        after = ids([*close, *self.renderer.message("user", clipped)])
        self.segment.observed(after)
        self.history = self.history.add(Turn(reply, clipped, before, completion.token_ids, after))
        self._record_turn(reply, clipped)

    def _record_turn(self, action: str, observation: str) -> None:
        self.turns.append(TurnRecord(len(self.segments), action, observation, self.history.tokens))
        if self.recorder:
            self.recorder.turn(self.rollout_id, len(self.turns))

    async def _compact(self) -> None:
        """Samples a summary and resumes from it. Raises _Stop where there is none or the window would not shrink."""
        self.segments.append(self.segment.build(len(self.segments)))
        body = await self._summarize()
        opening = (Message("user", text := self.pack.resume_message(body), ids(self.renderer.message("user", text))),)
        if self.settings.compaction.keep_task:
            opening = (self._task_message(), *opening)
        base = len(self.history.system.token_ids) + sum(len(m.token_ids) for m in opening)
        before = self.history.tokens
        sizes = [len(t.token_ids) for t in self.history.turns]
        keep = window.kept_turns(self.settings.compaction, before, base, sizes)
        if keep is None:
            self._record_compaction(body, before, None, 0, "grew")
            raise _Stop("compaction_grew", f"|h| {before}, resumed without turns {base}")
        resumed = self.history.resumed(opening, keep)
        self._record_compaction(body, before, resumed.tokens, keep, None)
        self.history = resumed
        self.segment = _SegmentBuilder("execution", self.history.token_ids)

    async def _summarize(self) -> str:
        """The body of an accepted summary, as a segment of its own. Raises _Stop("summary_failed")."""
        instruction = ids(self.renderer.message("user", self.pack.summary_instruction))
        asked = ids([*instruction, *self.renderer.generation_prompt])
        messages = (*self.history.messages(), {"role": "user", "content": self.pack.summary_instruction})
        training = self.settings.mode == "training"
        attempts = 1 if training else 1 + self.settings.compaction.summary_retries
        self.discarded = []
        rejected = None
        for _ in range(attempts):
            try:
                completion = await self._generate(
                    self.history.token_ids, asked, self.settings.compaction.summary_cap, "summary", messages
                )
            except ContextLengthError as error:
                raise _Stop("summary_failed", str(error)) from error
            text = self.renderer.decode(completion.token_ids)
            verdict = judge_summary(text, completion.finish_reason, self.pack, self.scaffold)
            controls = self.renderer.special_ids.intersection(completion.token_ids[:-1].tolist())
            rejected = "role_play" if controls else verdict.rejected
            if rejected is None or training:
                self.segment = _SegmentBuilder("summary", asked)
                self.segment.sampled(completion)
                self.segments.append(self.segment.build(len(self.segments)))
            if rejected is None and verdict.body is not None:
                return verdict.body
            self.discarded.append(text)
        self._record_compaction("", self.history.tokens, None, 0, rejected)
        raise _Stop("summary_failed", rejected)

    def _record_compaction(self, body: str, before: int, after: int | None, keep: int, rejected: str | None) -> None:
        """`self.history` is still the one before the compaction."""
        self.compactions.append(
            CompactionRecord(
                segment=len(self.segments) - 1,
                after_turn=len(self.turns),
                tokens_before=before,
                tokens_after=after,
                dropped=len(self.history.turns) - keep,
                kept=keep,
                summary=body,
                discarded=tuple(self.discarded),
                rejected=rejected,
            )
        )
        if self.recorder and after is not None:
            self.recorder.compaction(self.rollout_id, before, after)

    def _task_message(self) -> Message:
        return Message("user", self.task.instruction, ids(self.renderer.message("user", self.task.instruction)))

    async def _generate(self, context: np.ndarray, asked: np.ndarray, max_tokens: int, kind: SegmentKind,
                        messages: tuple[dict[str, str], ...]) -> Completion:
        """One call of the engine, seeded by (seed, task id, call number)."""
        key = f"{self.seed}|{self.task.id}|{self.calls}".encode()
        self.calls += 1
        request = GenerateRequest(
            rollout_id=self.rollout_id,
            prompt_ids=np.concatenate([context, asked]),
            max_tokens=max_tokens,
            temperature=self.settings.temperature,
            seed=int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little"),
            kind=kind,
            messages=messages,
        )
        started = time.perf_counter()
        completion = await self.engine.generate(request)
        self.seconds["generate"] += time.perf_counter() - started
        self.usage.calls += 1
        self.usage.prompt_tokens += completion.prompt_tokens or len(request.prompt_ids)
        self.usage.completion_tokens += len(completion.token_ids)
        self.usage.cached_tokens += completion.cached_tokens
        return completion
