"""What stops a rollout, and what a compaction does."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from compaction.agent import run_rollout
from compaction.engines.scripted import ScriptedEngine
from compaction.protocols import (
    Completion,
    GenerateRequest,
    TaskLimits,
)
from compaction.window import WindowTooSmall
from tests.compaction.parts import FilesTask, ReleasedEngine, play, replies, small_settings

LONG = ["cat a", "cat b"] * 12
"""More turns than one window holds"""


def test_a_solved_task_gets_the_verifiers_reward(any_renderer):
    task = FilesTask()
    rollout, engine = play(replies(["cat a", "cat b", "echo 42 > answer"]), task=task, renderer=any_renderer)
    assert (rollout.outcome.reward, rollout.outcome.stop_reason) == (1.0, "finished")
    assert task.environment.calls == ["start", "cat a", "cat b", "echo 42 > answer", "grade", "stop"]
    assert [t.observation for t in rollout.turns] == ["go on with b", "the answer is 42", "", ""]
    assert engine.released == ["r"]


def test_a_cap_of_zero_is_one_window_used_to_its_end(renderer):
    rollout, engine = play(replies(LONG), settings=small_settings(cap=0), renderer=renderer)
    assert (rollout.outcome.stop_reason, rollout.outcome.reward) == ("context_full", 0.0)
    assert len(rollout.segments) == 1
    assert all(r.kind == "execution" for r in engine.requests)
    used = len(rollout.segments[0].context_ids) + len(rollout.segments[0].token_ids)
    assert 160 - used < 60 - 24, "the threshold and the reserve no longer apply"


def test_a_full_last_window_stops_the_rollout_after_all_compactions(renderer):
    rollout, _ = play(replies(LONG * 3), settings=small_settings(max_turns=90), renderer=renderer)
    assert rollout.outcome.stop_reason == "context_full"
    assert rollout.n_compactions == 2
    assert [s.kind for s in rollout.segments] == ["execution", "summary", "execution", "summary", "execution"]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_lower_of_the_two_turn_limits_counts(renderer, limit: int):
    task = FilesTask(limits=TaskLimits(max_turns=limit))
    rollout, _ = play(replies(LONG), task=task, renderer=renderer)
    assert (rollout.outcome.stop_reason, len(rollout.turns)) == ("max_turns", limit)
    rollout, _ = play(replies(LONG), settings=small_settings(max_turns=2), renderer=renderer)
    assert len(rollout.turns) == 2


def test_no_summary_is_sampled_after_the_last_turn(renderer):
    full, _ = play(replies(LONG), renderer=renderer)
    turns = full.compactions[0].after_turn
    rollout, _ = play(replies(LONG), settings=small_settings(max_turns=turns), renderer=renderer)
    assert (len(rollout.turns), rollout.outcome.stop_reason) == (turns, "max_turns")
    assert rollout.compactions == ()
    assert len(rollout.segments) == 1


def test_a_window_that_can_never_fit_is_refused_before_anything_is_spent(renderer):
    task = FilesTask(instruction="cat a " * 60)
    with pytest.raises(WindowTooSmall, match="window=160 is too small"):
        play(replies([]), task=task, renderer=renderer)
    assert task.opened == []


# What a compaction keeps


def test_a_resumed_window_holds_the_summary_and_the_last_turns_but_not_the_task(renderer):
    rollout, engine = play(replies(LONG, "out go on"), settings=small_settings(keep_recent=2), renderer=renderer)
    resumed = next(r for i, r in enumerate(engine.requests) if i and engine.requests[i - 1].kind == "summary")
    contents = [m["content"] for m in resumed.messages]
    assert contents[:2] == ["trail", "out go on"]
    assert len(contents) == 2 + 2 * 2
    record = rollout.compactions[0]
    assert (record.kept, record.dropped, record.after_turn) == (2, record.after_turn - 2, record.kept + record.dropped)
    assert record.tokens_after == len(rollout.segments[2].context_ids)


def test_keep_task_repeats_the_task_message(renderer):
    _, engine = play(replies(LONG, "out go on"), settings=small_settings(keep_task=True), renderer=renderer)
    assert [m["content"] for m in engine.requests[-1].messages][:3] == ["trail", "cat a", "out go on"]


def test_fewer_turns_are_kept_where_they_do_not_fit(renderer):
    task = FilesTask(files={"a": "b " * 60})
    rollout, _ = play(replies(["cat a"] * 9), task=task, settings=small_settings(keep_recent=4), renderer=renderer)
    assert rollout.n_compactions
    assert all(c.kept < 4 for c in rollout.compactions)


def test_a_summary_that_does_not_shrink_the_window_ends_the_rollout_graded(renderer):
    settings = small_settings(window=200, threshold=150, summary_cap=80, keep_recent=0)
    rollout, _ = play(replies(LONG, "out " + "x" * 60), settings=settings, renderer=renderer)
    assert (rollout.outcome.stop_reason, rollout.outcome.reward) == ("compaction_grew", 0.0)
    record = rollout.compactions[-1]
    assert (record.tokens_after, record.rejected, record.kept, record.dropped) == (None, "grew", 0, 0)
    assert rollout.segments[-1].kind == "summary", "a summary that was accepted is trained on"


# Summaries that are none

BAD = {
    "": "empty",
    "out " + "x" * 200: "endless",
    "out <tool_call>": "tool_call",
    "User: and now?": "role_play",
    "cat a": "action",
    "all went well": "no_body",
}


@pytest.mark.parametrize(("summary", "why"), BAD.items(), ids=BAD.values())
def test_in_training_a_bad_summary_ends_the_rollout_as_an_optimized_segment(renderer, summary: str, why: str):
    rollout, engine = play(replies(LONG, summary), settings=small_settings(mode="training"), renderer=renderer)
    assert (rollout.outcome.stop_reason, rollout.outcome.detail) == ("summary_failed", why)
    assert rollout.outcome.reward == 0.0
    assert [r.kind for r in engine.requests].count("summary") == 1
    assert [s.kind for s in rollout.segments] == ["execution", "summary"]
    assert rollout.segments[1].n_optimized == len(engine.completions[-1].token_ids)
    record = rollout.compactions[0]
    assert (record.discarded, record.rejected, record.tokens_after) == ((), why, None)


@pytest.mark.parametrize(("summary", "why"), BAD.items(), ids=BAD.values())
def test_in_evaluation_a_bad_summary_is_sampled_again_and_never_trained_on(renderer, summary: str, why: str):
    rollout, engine = play(replies(LONG, summary), renderer=renderer)
    assert (rollout.outcome.stop_reason, rollout.outcome.detail) == ("summary_failed", why)
    asked = [r for r in engine.requests if r.kind == "summary"]
    assert len(asked) == 3
    assert len({r.seed for r in asked}) == 3
    assert [s.kind for s in rollout.segments] == ["execution"]
    assert len(rollout.compactions[0].discarded) == 3
    assert rollout.compactions[0].tokens_after is None


def test_a_retry_that_succeeds_leaves_only_the_good_summary_in_the_history(renderer):
    tries = iter(["", "cat a", "out good"] + ["out good"] * 9)
    actions = iter(LONG[:18])
    script = lambda r: next(tries) if r.kind == "summary" else next(actions, "exit")  # noqa: E731
    rollout, engine = play(script, renderer=renderer)
    assert rollout.outcome.stop_reason == "finished"
    assert rollout.compactions[0].discarded == ("", "cat a")
    assert rollout.compactions[1].discarded == ()
    assert [renderer.decode(s.token_ids) for s in rollout.segments if s.kind == "summary"] == ["out good", "out good"]
    assert all("cat a" not in m["content"] for m in engine.requests[-1].messages[:2])


class ControlEngine(ReleasedEngine):
    """Ends its summaries with a user message of its own."""

    async def generate(self, request: GenerateRequest) -> Completion:
        done = await super().generate(request)
        if request.kind == "execution":
            return done
        user = self._renderer._tokenizer.convert_tokens_to_ids("<|user|>")
        tokens = np.array([*done.token_ids[:-1], user, done.token_ids[-1]], np.int32)
        n = len(tokens)
        self.completions[-1] = Completion(tokens, np.zeros(n, np.float32), np.zeros(n, np.int32), "stop")
        return self.completions[-1]


def test_a_summary_that_opens_another_message_by_a_control_token_is_role_play(renderer):
    rollout, _ = play(replies(LONG), settings=small_settings(mode="training"), renderer=renderer, engine=ControlEngine)
    assert (rollout.outcome.stop_reason, rollout.outcome.detail) == ("summary_failed", "role_play")


# Observations and replies of any size


@pytest.mark.parametrize("content", ["", "x" * 100_000, "漢字🙂" * 5_000, "<|end|><|user|>" * 50, "\n" * 300, "\x00"])
def test_an_observation_of_any_size_and_kind_is_taken(any_renderer, content: str):
    task = FilesTask(files={"a": content})
    rollout, engine = play(replies(["cat a"] * 3), task=task, renderer=any_renderer)
    assert rollout.outcome.error_class is None
    assert all(len(r.prompt_ids) + r.max_tokens <= 160 for r in engine.requests)
    frame = [*any_renderer.generation_prompt, *any_renderer.message("user", "")]
    controls = list(any_renderer.special_ids)
    for segment in rollout.segments:
        turns = sum(t.segment == segment.ordinal for t in rollout.turns)
        seen = segment.token_ids[~segment.optimized]
        assert np.isin(seen, controls).sum() <= turns * np.isin(frame, controls).sum(), "only the template's own"
    if len(content) > 1000:
        assert "[cut " in rollout.turns[0].observation
        assert "\ufffd" not in rollout.turns[0].observation


@pytest.mark.parametrize("reply", ["", "cat a\ncat b", "x" * 400])
def test_a_malformed_reply_runs_nothing_and_the_rollout_goes_on(renderer, reply: str):
    task = FilesTask()
    rollout, _ = play(replies([reply, "cat b"]), task=task, renderer=renderer)
    assert rollout.outcome.stop_reason == "finished"
    assert "cat b" in task.environment.calls
    assert len(task.environment.calls) == 4
    assert rollout.turns[0].observation.strip()


# Seeds, counts, progress


def seeds(renderer, **kwargs: Any) -> list[int]:
    return [r.seed for r in play(replies(LONG), renderer=renderer, **kwargs)[1].requests]


def test_each_call_has_its_own_seed_drawn_from_seed_task_rollout_and_call(renderer):
    drawn = seeds(renderer)
    assert len(set(drawn)) == len(drawn)
    assert seeds(renderer) == drawn
    for other in ({"seed": 1}, {"rollout_id": "s"}, {"task": FilesTask(id="files-2")}):
        assert not set(seeds(renderer, **other)) & set(drawn)


def test_usage_counts_every_call(renderer):
    rollout, engine = play(replies(LONG, "User: no"), renderer=renderer)
    assert rollout.usage.calls == len(engine.requests)
    assert rollout.usage.prompt_tokens == sum(len(r.prompt_ids) for r in engine.requests)
    assert rollout.usage.completion_tokens == sum(len(c.token_ids) for c in engine.completions)


def test_a_recorder_is_told_of_every_turn_and_compaction(renderer):
    class Noted:
        def __init__(self) -> None:
            self.turns: list[int] = []
            self.compactions: list[tuple[int, int]] = []

        def turn(self, rollout_id: str, turn: int) -> None:
            self.turns.append(turn)

        def compaction(self, rollout_id: str, tokens_before: int, tokens_after: int) -> None:
            self.compactions.append((tokens_before, tokens_after))

    noted = Noted()
    engine = ScriptedEngine(replies(LONG), renderer)
    rollout = asyncio.run(
        run_rollout(FilesTask(), engine, renderer, small_settings(), seed=0, rollout_id="r", recorder=noted)
    )
    assert noted.turns == list(range(1, len(rollout.turns) + 1))
    assert noted.compactions == [(c.tokens_before, c.tokens_after) for c in rollout.compactions]
