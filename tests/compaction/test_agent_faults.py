"""What is left of a rollout when time runs out or something breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from compaction.agent import run_rollout
from compaction.protocols import (
    Completion,
    ContextLengthError,
    EngineError,
    EnvironmentFailure,
    Execution,
    GenerateRequest,
    TaskLimits,
    Usage,
    VerifierError,
)
from compaction.rollout import Outcome
from tests.compaction.parts import Files, FilesTask, ReleasedEngine, play, replies, small_settings

LONG = ["cat a", "cat b"] * 12
"""More turns than one window holds"""


# Time limits


class Slow(ReleasedEngine):
    """Never answers the requests of one kind."""

    stuck = "execution"

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.kind == self.stuck and len(self.requests) >= 2:
            await asyncio.sleep(3600)
        return await super().generate(request)


class SlowSummary(Slow):
    stuck = "summary"


class SlowFiles(Files):
    async def execute(self, command: str) -> Execution:
        if command == "cat b":
            await asyncio.sleep(3600)
        return await super().execute(command)


SOON = TaskLimits(deadline_seconds=2)


@pytest.mark.parametrize(
    ("engine", "world", "kinds"),
    [
        (Slow, Files, ["execution"]),
        (SlowSummary, Files, ["execution"]),
        (ReleasedEngine, SlowFiles, ["execution"]),
    ],
    ids=["in an action", "in a summary", "in a command"],
)
def test_a_rollout_at_its_deadline_is_graded_as_it_stands(renderer, engine: Any, world: Any, kinds: list[str]):
    task = FilesTask(limits=SOON, world=world)
    rollout, served = play(replies(["echo 42 > answer", *LONG]), task=task, renderer=renderer, engine=engine)
    assert (rollout.outcome.stop_reason, rollout.outcome.reward) == ("deadline", 1.0)
    assert [s.kind for s in rollout.segments] == kinds
    assert sum(s.n_optimized for s in rollout.segments) == sum(len(c.token_ids) for c in served.completions)
    assert len(rollout.turns) == sum(r.kind == "execution" for r in served.requests)
    assert task.environment.calls[-1] == "stop"
    assert served.released == ["r"]


def test_a_deadline_in_a_fresh_window_leaves_an_empty_segment(renderer):
    class SlowAfterSummary(ReleasedEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            if self.requests and self.requests[-1].kind == "summary":
                await asyncio.sleep(3600)
            return await super().generate(request)

    rollout, _ = play(replies(LONG), task=FilesTask(limits=SOON), renderer=renderer, engine=SlowAfterSummary)
    assert [s.kind for s in rollout.segments] == ["execution", "summary", "execution"]
    assert rollout.segments[-1].n_optimized == 0


def test_a_deadline_of_zero_stops_before_the_first_turn(renderer):
    task = FilesTask(limits=TaskLimits(deadline_seconds=0))
    rollout, _ = play(replies(LONG), task=task, renderer=renderer)
    assert (rollout.outcome.stop_reason, len(rollout.turns)) == ("deadline", 0)


def test_a_timeout_of_someone_else_is_not_taken_for_the_deadline(renderer):
    class Hanging(Files):
        async def execute(self, command: str) -> Execution:
            raise TimeoutError("the disk")

    task = FilesTask(world=Hanging)
    with pytest.raises(TimeoutError, match="the disk"):
        play(replies(["cat a"]), task=task, renderer=renderer)
    assert task.environment.calls == ["start", "stop"]


# What breaks outside the agent


def failing(name: str, error: Exception) -> type[Files]:
    async def fail(self: Files, *_: Any) -> Any:
        self.calls.append(name)
        raise error

    return type("Failing", (Files,), {name: fail})


@pytest.mark.parametrize("method", ["start", "execute", "grade"])
def test_an_environment_that_fails_gives_no_reward_and_is_stopped(renderer, method: str):
    task = FilesTask(world=failing(method, EnvironmentFailure("gone")))
    rollout, engine = play(replies(["cat a"]), task=task, renderer=renderer)
    assert (rollout.outcome.reward, rollout.outcome.stop_reason) == (None, "error")
    detail = "gone · the agent had stopped as finished" if method == "grade" else "gone"
    assert (rollout.outcome.error_class, rollout.outcome.detail) == ("environment", detail)
    assert task.environment.calls[-1] == "stop"
    assert engine.released == ["r"]


def test_an_environment_that_cannot_be_opened_gives_no_reward(renderer):
    def refuse(files: dict[str, str]) -> Files:
        raise EnvironmentFailure("no such image")

    rollout, engine = play(replies([]), task=FilesTask(world=refuse), renderer=renderer)
    assert (rollout.outcome.error_class, engine.released) == ("environment", ["r"])


def test_the_action_that_broke_the_environment_stays_on_record(renderer):
    task = FilesTask(world=failing("execute", EnvironmentFailure("gone")))
    rollout, engine = play(replies(["cat a"]), task=task, renderer=renderer)
    assert [t.action for t in rollout.turns] == ["cat a"]
    assert rollout.segments[0].n_optimized == len(engine.completions[0].token_ids)


def test_an_environment_that_fails_to_stop_does_not_cost_the_rollout(renderer, caplog):
    task = FilesTask(world=failing("stop", EnvironmentFailure("still busy")))
    rollout, engine = play(replies(["echo 42 > answer"]), task=task, renderer=renderer)
    assert (rollout.outcome.reward, engine.released) == (1.0, ["r"])
    assert "environment.stop failed: still busy" in caplog.text


def test_a_bug_in_stop_is_raised_but_the_engine_is_released(renderer):
    engine = ReleasedEngine(replies([]), renderer)
    task = FilesTask(world=failing("stop", ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_rollout(task, engine, renderer, small_settings(), seed=0, rollout_id="r"))
    assert engine.released == ["r"]


def test_an_engine_that_fails_to_release_does_not_cost_the_rollout(renderer):
    class Stuck(ReleasedEngine):
        async def release(self, rollout_id: str) -> None:
            raise EngineError("actor died")

    rollout, _ = play(replies(["echo 42 > answer"]), renderer=renderer, engine=Stuck)
    assert rollout.outcome.reward == 1.0


def test_a_cancelled_rollout_stops_its_environment_and_frees_the_engine(renderer):
    task = FilesTask()
    engine = Slow(replies(LONG), renderer)

    async def cancelled() -> None:
        attempt = asyncio.create_task(run_rollout(task, engine, renderer, small_settings(), seed=0, rollout_id="r"))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        attempt.cancel()
        await attempt

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert task.environment.calls[-1] == "stop"
    assert "grade" not in task.environment.calls
    assert engine.released == ["r"]


@pytest.mark.parametrize("reward", [2.0, -1.0, float("nan")])
def test_a_reward_out_of_range_is_the_verifiers_error(renderer, reward: float):
    class Odd(Files):
        async def grade(self) -> float:
            return reward

    rollout, _ = play(replies([]), task=FilesTask(world=Odd), renderer=renderer)
    assert (rollout.outcome.reward, rollout.outcome.error_class) == (None, VerifierError.error_class)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "versions", "said"),
    [
        (500, 500, 500, "500 tokens where at most 30"),
        (3, 2, 3, "2 logprobs"),
        (3, 3, 0, "0 versions"),
    ],
)
def test_a_completion_that_cannot_be_trained_on_is_the_engines_error(
    renderer, tokens: int, logprobs: int, versions: int, said: str
):
    class Odd(ReleasedEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            return Completion(
                np.ones(tokens, np.int32), np.zeros(logprobs, np.float32), np.zeros(versions, np.int32), "stop"
            )

    rollout, _ = play(replies([]), renderer=renderer, engine=Odd)
    assert rollout.outcome.error_class == "engine"
    assert said in rollout.outcome.detail


@pytest.mark.parametrize(("logprob", "version"), [(np.nan, 0), (-np.inf, 0), (0.0, -1)])
def test_a_token_without_logprob_or_version_is_the_engines_error(renderer, logprob: float, version: int):
    class Odd(ReleasedEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            return Completion(ids := np.ones(1, np.int32), ids * np.float32(logprob), ids * version, "stop")

    rollout, _ = play(replies([]), renderer=renderer, engine=Odd)
    assert (rollout.outcome.reward, rollout.outcome.error_class) == (None, "engine")


# An engine with a shorter context than the window


class Short(ReleasedEngine):
    """Refuses prompts above a limit, as a server with a shorter context does."""

    limit = 70
    refuses = ("execution",)

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.kind in self.refuses and len(request.prompt_ids) > self.limit:
            raise ContextLengthError(f"prompt of {len(request.prompt_ids)} tokens")
        return await super().generate(request)


class ShortForSummaries(Short):
    refuses = ("execution", "summary")


def test_a_context_length_error_triggers_one_compaction_and_the_rollout_goes_on(renderer):
    rollout, _ = play(replies(["cat a", "cat b"] * 3), renderer=renderer, engine=Short)
    assert rollout.outcome.stop_reason == "finished"
    assert rollout.n_compactions == 1
    assert rollout.compactions[0].tokens_before < 100, "earlier than the threshold asks"


def test_without_a_compaction_left_a_context_length_error_stops_the_rollout_as_full(renderer):
    rollout, _ = play(replies(LONG), settings=small_settings(cap=0), renderer=renderer, engine=Short)
    assert (rollout.outcome.stop_reason, rollout.outcome.reward) == ("context_full", 0.0)


def test_a_first_prompt_that_does_not_fit_the_engine_stops_at_once(renderer):
    class Tiny(Short):
        limit = 5

    rollout, engine = play(replies(LONG), renderer=renderer, engine=Tiny)
    assert (rollout.outcome.stop_reason, len(rollout.turns), engine.requests) == ("context_full", 0, [])


def test_a_summary_request_that_does_not_fit_the_engine_is_recorded(renderer):
    rollout, _ = play(replies(LONG), renderer=renderer, engine=ShortForSummaries)
    assert rollout.outcome.stop_reason == "summary_failed"
    assert rollout.compactions[0].rejected == "context_length"
    assert [s.kind for s in rollout.segments] == ["execution"]


class Refused(ReleasedEngine):
    async def generate(self, request: GenerateRequest) -> Completion:
        if len(self.requests) == 2:
            raise EngineError("429", "rate_limit", Usage(prompt_tokens=7, calls=3, cost=None))
        return await super().generate(request)


def test_what_an_engine_left_behind_is_graded_as_evidence_only_where_that_is_asked_for(renderer):
    def attempt(**how: Any) -> Outcome:
        task = FilesTask()
        engine = Refused(replies(["echo 42 > answer", *LONG]), renderer)
        rollout = asyncio.run(run_rollout(task, engine, renderer, small_settings(), seed=0, rollout_id="r", **how))
        assert (rollout.outcome.reward, rollout.outcome.error_class) == (None, "rate_limit")
        assert (rollout.usage.calls, rollout.usage.cost) == (5, None)  # what failed was paid for too
        return rollout.outcome

    assert "verifier" not in str(attempt().detail)
    assert "the verifier gave 1; this does not count" in str(attempt(grade_after=lambda kind: True).detail)


class Filtered(ReleasedEngine):
    async def generate(self, request: GenerateRequest) -> Completion:
        if len(self.requests) == 1:
            raise EngineError("a content filter stopped the reply", "refusal")
        return await super().generate(request)


def test_a_refusal_is_the_agents_own_and_is_graded(renderer):
    rollout, _ = play(replies(["echo 42 > answer", *LONG]), renderer=renderer, engine=Filtered)
    assert (rollout.outcome.stop_reason, rollout.outcome.reward) == ("refusal", 1.0)
    assert "content filter" in str(rollout.outcome.detail)
