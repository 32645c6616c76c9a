"""The agent loop: act, observe, compact when the window is nearly full, go on; then grade.

One call of `run_rollout` makes one Rollout. The same loop runs in training and in evaluation, against any engine and
any environment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from compaction import window
from compaction.calls import EngineCalls
from compaction.exchange import Exchange
from compaction.history import History, Message, Turn, ids
from compaction.protocols import (
    Completion,
    ContextLengthError,
    Engine,
    EngineError,
    Environment,
    InfrastructureError,
    Recorder,
    Renderer,
    Task,
    VerifierError,
)
from compaction.rollout import (
    CompactionRecord,
    Outcome,
    Rollout,
    Segment,
    SegmentBuilder,
    StopReason,
    TurnRecord,
)
from compaction.room import check_room, system_message, template_tools
from compaction.scaffolds import Call, Scaffold, load_scaffold
from compaction.settings import AgentSettings
from compaction.summaries import PromptPack, judge_summary, load_prompt_pack
from compaction.thinking import split_thinking

_log = logging.getLogger(__name__)


async def run_rollout(
    task: Task,
    engine: Engine,
    renderer: Renderer,
    settings: AgentSettings,
    *,
    seed: int,
    rollout_id: str,
    recorder: Recorder | None = None,
    grade_after: Callable[[str], bool] = lambda error_class: False,
) -> Rollout:
    """Attempts `task` once.

    Sampling is decided by `seed`, the task's id and `rollout_id`: call i is seeded by (seed, task id, rollout id, i).
    Infrastructure failures end in a Rollout without reward; where `grade_after` holds for an engine's error class, the
    verifier still runs, and what it says stands in the outcome's detail, as evidence. The environment is stopped and
    the engine released in any case. Raises WindowTooSmall before anything is spent, and ValueError for an unknown
    scaffold or prompt pack.
    """
    loop = _Loop.start(task, engine, renderer, settings, seed, rollout_id, recorder)
    try:
        outcome = await _attempt(loop, grade_after)
    except InfrastructureError as error:
        outcome = Outcome(None, "error", error.error_class, str(error))
    finally:
        await _clean_up(engine.release(rollout_id), f"rollout {rollout_id}: engine.release")
    return loop.rollout(outcome)


async def _attempt(loop: _Loop, grade_after: Callable[[str], bool]) -> Outcome:
    environment = loop.task.open()
    try:
        await environment.start()
        try:
            return await loop.run(environment)
        except EngineError as error:
            if not grade_after(error.error_class):
                raise
            detail = f"{error} · {await _evidence(environment)}"
            return Outcome(None, "error", error.error_class, detail)
    finally:
        await _clean_up(environment.stop(), f"rollout {loop.rollout_id}: environment.stop")


async def _evidence(environment: Environment) -> str:
    """What the verifier says of a rollout that its engine left."""
    try:
        return f"as it stood, the verifier gave {await environment.grade():g}; this does not count"
    except InfrastructureError as error:
        return f"as it stood, it could not be graded: {error}"


async def _clean_up(step: Awaitable[None], name: str) -> None:
    """Awaits a last step. Its failure is logged: it comes after the grade and must not cost the rollout."""
    try:
        await step
    except InfrastructureError as error:
        _log.warning("%s failed: %s", name, error)


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
    calls: EngineCalls
    renderer: Renderer
    settings: AgentSettings
    pack: PromptPack
    scaffold: Scaffold
    overheads: window.Overheads
    seed: int
    rollout_id: str
    recorder: Recorder | None
    history: History
    segment: SegmentBuilder
    segments: list[Segment] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    compactions: list[CompactionRecord] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    environment_seconds: float = 0.0

    @classmethod
    def start(
        cls,
        task: Task,
        engine: Engine,
        renderer: Renderer,
        settings: AgentSettings,
        seed: int,
        rollout_id: str,
        recorder: Recorder | None,
    ) -> _Loop:
        renderer = renderer.with_thinking(settings.thinking)
        pack = load_prompt_pack(settings.compaction.prompt_pack)
        overheads, scaffold = check_room(task.instruction, renderer, settings), load_scaffold(settings.scaffold)
        system = system_message(pack, scaffold, renderer)
        tools = template_tools(scaffold, renderer)
        opening = Message("user", task.instruction, ids(renderer.message("user", task.instruction)))
        history = History(system, (opening,))
        return cls(
            task=task, calls=EngineCalls(engine, settings.temperature, (seed, task.id, rollout_id), tools),
            renderer=renderer, settings=settings, pack=pack,
            scaffold=scaffold, overheads=overheads, seed=seed, rollout_id=rollout_id,
            recorder=recorder, history=history, segment=SegmentBuilder("execution", history.token_ids),
        )  # fmt: skip

    @property
    def compactions_left(self) -> int:
        return self.settings.compaction.cap - sum(c.tokens_after is not None for c in self.compactions)

    async def run(self, environment: Environment) -> Outcome:
        """Acts until something stops the rollout, then asks the verifier."""
        deadline = asyncio.timeout(self.task.limits.deadline_seconds)
        try:
            async with deadline:
                await self._act(environment)
        except _Stop as stop:
            reason, detail = stop.reason, stop.detail
        except TimeoutError:
            if not deadline.expired():  # someone else's timeout is not the agent's
                raise
            reason, detail = "deadline", f"stopped after {self.task.limits.deadline_seconds} s"
        except EngineError as error:
            if error.error_class != "refusal":  # what a content filter stops is the agent's own doing
                raise
            reason, detail = "refusal", str(error)
        try:
            reward = await environment.grade()
        except InfrastructureError as error:  # how far the agent came is worth knowing all the same
            return Outcome(None, "error", error.error_class, f"{error} · the agent had stopped as {reason}")
        if not 0.0 <= reward <= 1.0:
            raise VerifierError(f"the verifier gave reward {reward}; allowed is a number in [0, 1]")
        return Outcome(reward, reason, detail=detail)

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
            usage=self.calls.usage,
            count_source=self.renderer.count_source,
            instruction=self.task.instruction,
            seconds={"generate": self.calls.seconds, "environment": self.environment_seconds},
        )

    async def _act(self, environment: Environment) -> None:
        limit = self.settings.max_turns
        if self.task.limits.max_turns is not None:
            limit = min(limit, self.task.limits.max_turns)
        while len(self.turns) < limit:  # no summary after the last turn: nothing would follow it
            if self.history.turns and window.should_compact(
                self.settings.compaction, self.history.tokens, self.compactions_left
            ):
                await self._compact()
            await asyncio.sleep(0)  # a deadline takes effect even where engine and environment never wait
            try:
                await self._turn(environment)
            except ContextLengthError as error:  # the engine's own limit is below the window
                if self.compactions_left == 0 or not self.history.turns:
                    raise _Stop("context_full", str(error)) from error
                await self._compact()
        raise _Stop("max_turns", f"turn limit {limit}")

    async def _turn(self, environment: Environment) -> None:
        """One action and its observation."""
        room = window.response_room(
            self.settings.compaction, self.history.tokens, self.compactions_left, self.overheads
        )
        if room < self.settings.compaction.min_response:
            raise _Stop("context_full", f"|h| {self.history.tokens} of window {self.settings.compaction.window}")
        before = ids(self.renderer.generation_prompt)
        completion = await self.calls.generate(
            self.history.token_ids, before, room, "execution", self.history.messages()
        )
        self.segment.observed(before)
        self.segment.sampled(completion)
        if completion.text is not None and completion.prompt_tokens:  # the engine's own count of this very context
            self.history = self.history.measured(completion.prompt_tokens - len(before))
        reply = self._text(completion)
        _, said = split_thinking(reply, self._opens_thinking(completion))
        action = self.scaffold.parse(said, completion.finish_reason, completion.tool_calls)
        exchange = Exchange(reply, completion, action, self.renderer)
        if action.kind == "finish":
            self._record_turn(exchange)
            raise _Stop("finished")
        answers = await self._answers(environment, exchange)
        clipped = self._observe(exchange, before, answers)
        try:
            await self._measure()
        finally:  # with the count that holds; a deadline in the middle leaves the turn on record all the same
            self._record_turn(exchange, clipped)

    async def _answers(self, environment: Environment, exchange: Exchange) -> list[str]:
        """The observation, or the answers to the reply's calls, whose commands are run in order."""
        action = exchange.action
        if action.kind == "malformed":
            return [action.text]
        started = time.perf_counter()
        try:
            if action.kind == "command":
                return [self.scaffold.observation(await environment.execute(action.text))]
            return [await self._answer(environment, call) for call in action.calls]
        except BaseException:  # a deadline or a crash in mid-command: the action stays on record
            self._record_turn(exchange)
            raise
        finally:
            self.environment_seconds += time.perf_counter() - started

    async def _answer(self, environment: Environment, call: Call) -> str:
        if call.answer is not None:
            return call.answer
        seen = [(command, self.scaffold.observation(await environment.execute(command))) for command in call.commands]
        return seen[0][1] if len(seen) == 1 else "\n\n".join(f"$ {command}\n{output}" for command, output in seen)

    def _observe(self, exchange: Exchange, before: np.ndarray, answers: list[str]) -> list[str]:
        """Adds the whole turn to the history, the answers clipped so that the summary request still fits."""
        sampled = exchange.completion.token_ids
        used = self.history.tokens + len(before) + len(sampled)
        room = window.observation_room(self.settings.compaction, used, self.compactions_left, self.overheads)
        clipped = window.clip(
            answers, lambda texts: len(exchange.follow(texts)) <= room, self.renderer.encode, self.renderer.decode
        )
        if clipped is None:
            self._record_turn(exchange, answers)
            raise _Stop("context_full", "no room for the observation")
        after = ids(exchange.follow(clipped))
        self.segment.observed(after)
        self.history = self.history.add(Turn(exchange.messages(clipped), before, sampled, after))
        return clipped

    async def _measure(self) -> None:
        """Lets an engine that can count a context say how long this one is."""
        tokens = await self.calls.measure(self.history.messages())
        if tokens is not None:
            self.history = self.history.measured(tokens)

    def _text(self, completion: Completion) -> str:
        return self.renderer.decode(completion.token_ids) if completion.text is None else completion.text

    def _opens_thinking(self, completion: Completion) -> bool | None:
        """Whether the prompt opened the thinking; of a text from elsewhere, that is not known."""
        return self.renderer.opens_thinking if completion.text is None else None

    def _record_turn(self, exchange: Exchange, answers: Sequence[str] = ()) -> None:
        observation, calls = "\n\n".join(answers), exchange.records(answers)
        self.turns.append(TurnRecord(len(self.segments), exchange.reply, observation, self.history.tokens, calls))
        if self.recorder:
            self.recorder.turn(self.rollout_id, len(self.turns))

    async def _compact(self) -> None:
        """Samples a summary and resumes from it. Raises _Stop where there is none or the window would not shrink."""
        self.segments.append(self.segment.build(len(self.segments)))
        body, reply = await self._summarize()
        opening: tuple[Message, ...] = (self._user_message(self.pack.resume_message(body)),)
        if self.settings.compaction.keep_task:
            opening = (self._user_message(self.task.instruction), *opening)
        base = len(self.history.system.token_ids) + sum(len(m.token_ids) for m in opening)
        before = self.history.tokens
        sizes = [len(t.token_ids) for t in self.history.turns]
        keep = window.kept_turns(self.settings.compaction, before, base, sizes)
        if keep is None:
            self._record_compaction(body, before, None, 0, "grew")
            raise _Stop("compaction_grew", f"|h| {before}, resumed without turns {base}")
        resumed = self.history.resumed(opening, keep)
        self._record_compaction(body, before, resumed.tokens, keep, None, reply)
        self.history = resumed
        self.segment = SegmentBuilder("execution", self.history.token_ids)
        await self._measure()

    async def _summarize(self) -> tuple[str, str]:
        """(body, whole reply) of an accepted summary, as a segment of its own. Raises _Stop("summary_failed")."""
        instruction = ids(self.renderer.message("user", self.pack.summary_instruction))
        asked = ids([*instruction, *self.renderer.generation_prompt])
        messages = (*self.history.messages(), {"role": "user", "content": self.pack.summary_instruction})
        training = self.settings.mode == "training"
        attempts = 1 if training else 1 + self.settings.compaction.summary_retries
        self.discarded = []
        rejected = None
        for _ in range(attempts):
            try:
                completion = await self.calls.generate(
                    self.history.token_ids, asked, self.settings.compaction.summary_cap, "summary", messages
                )
            except ContextLengthError as error:
                self._record_compaction("", self.history.tokens, None, 0, "context_length")
                raise _Stop("summary_failed", str(error)) from error
            text = self._text(completion)
            _, said = split_thinking(text, self._opens_thinking(completion))
            verdict = judge_summary(said, completion.finish_reason, self.pack, self.scaffold)
            controls = self.renderer.special_ids.intersection(completion.token_ids[:-1].tolist())
            rejected = "tool_call" if completion.tool_calls else "role_play" if controls else verdict.rejected
            if rejected is None or training:
                self.segment = SegmentBuilder("summary", asked)
                self.segment.sampled(completion)
                self.segments.append(self.segment.build(len(self.segments)))
            if rejected is None and verdict.body is not None:
                return verdict.body, text
            if training:  # not discarded: it is an optimized segment
                self._record_compaction(text, self.history.tokens, None, 0, rejected)
                raise _Stop("summary_failed", rejected)
            self.discarded.append(text)
        self._record_compaction("", self.history.tokens, None, 0, rejected)
        raise _Stop("summary_failed", rejected)

    def _record_compaction(
        self, body: str, before: int, after: int | None, keep: int, rejected: str | None, reply: str = ""
    ) -> None:
        """`self.history` is still the one before the compaction."""
        self.compactions.append(
            CompactionRecord(
                segment=len(self.segments) - 1,
                after_turn=len(self.turns),
                tokens_before=before,
                tokens_after=after,
                dropped=0 if after is None else len(self.history.turns) - keep,
                kept=keep,
                summary=body,
                discarded=tuple(self.discarded),
                rejected=rejected,
                reply=reply,
            )
        )
        if self.recorder and after is not None:
            self.recorder.compaction(self.rollout_id, before, after)

    def _user_message(self, text: str) -> Message:
        return Message("user", text, ids(self.renderer.message("user", text)))
