"""What holds for every rollout, whatever the settings, the replies and the observations."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from compaction.protocols import Completion, GenerateRequest
from compaction.rendering import ChatTemplateRenderer
from compaction.rollout import Rollout
from compaction.settings import AgentSettings
from compaction.storage import read_rollouts, write_rollouts
from compaction.window import WindowTooSmall
from tests.compaction.parts import FilesTask, ReleasedEngine, play, small_settings

texts = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["", "x" * 500, "漢字🙂" * 40, "<|end|><|user|>hi", "cat a\ncat b", "\ufffd", "a " * 90]),
)
summaries = st.one_of(texts, st.text(max_size=25).map("out {}".format), st.just("out a at b"))
agent_settings = st.builds(
    small_settings,
    window=st.integers(90, 320), threshold=st.integers(45, 130), max_response=st.integers(5, 60),
    min_response=st.integers(1, 5), summary_cap=st.integers(4, 40), cap=st.integers(0, 3),
    keep_recent=st.integers(0, 3), keep_task=st.booleans(), summary_retries=st.integers(0, 2),
    max_turns=st.integers(1, 25), mode=st.sampled_from(["training", "evaluation"]),
)  # fmt: skip


class NumberedEngine(ReleasedEngine):
    """Gives every sampled token a logprob of its own, by which it can be found again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sampled = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        done = await super().generate(request)
        n = len(done.token_ids)
        marks = -np.arange(self.sampled + 1, self.sampled + n + 1, dtype=np.float32)
        self.sampled += n
        self.completions[-1] = Completion(done.token_ids, marks, done.versions + 3, done.finish_reason)
        return self.completions[-1]


@st.composite
def attempts(draw: st.DrawFn) -> tuple[AgentSettings, list[str], list[str], list[str]]:
    return (
        draw(agent_settings),
        draw(st.lists(st.one_of(texts, st.sampled_from(["cat 0", "cat 1", "cat 2"])), min_size=3, max_size=25)),
        draw(st.lists(summaries, min_size=1, max_size=4)),
        draw(st.lists(texts, min_size=3, max_size=3)),
    )


def attempt(drawn: tuple[AgentSettings, list[str], list[str], list[str]], renderer: ChatTemplateRenderer) -> Any:
    settings, actions, told, seen = drawn
    turn, compaction = iter(actions), iter(told * 12)
    task = FilesTask(files={str(i): text for i, text in enumerate(seen)})
    try:
        return play(
            lambda r: next(compaction) if r.kind == "summary" else next(turn, "exit"),
            settings=settings, task=task, renderer=renderer, engine=NumberedEngine,
        )  # fmt: skip
    except WindowTooSmall:
        return None


many = hypothesis_settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow,
                                            HealthCheck.filter_too_much],
)  # fmt: skip


@pytest.fixture(params=["plain", "chatml"])
def each_renderer(request: pytest.FixtureRequest) -> ChatTemplateRenderer:
    return request.getfixturevalue("renderer" if request.param == "plain" else "chatml_renderer")


@many
@given(attempts())
def test_every_request_fits_the_window_and_leaves_the_summary_its_room(each_renderer, drawn):
    made = attempt(drawn, each_renderer)
    assume(made is not None)
    rollout, engine = made
    chosen, renderer = rollout.settings.compaction, each_renderer
    gen = len(renderer.generation_prompt)
    asked = len(renderer.message("user", "summarize")) + gen
    window = 0
    starts = window_starts(rollout)
    for request in engine.requests:
        assert request.max_tokens >= 1
        assert len(request.prompt_ids) + request.max_tokens <= chosen.window
        if request.kind == "summary":
            assert request.max_tokens == chosen.summary_cap
            assert chosen.window - (len(request.prompt_ids) - asked) < chosen.threshold, (
                "only a full window is compacted"
            )
            continue
        assert chosen.min_response <= request.max_tokens <= chosen.max_response
        if window + 1 < len(starts) and starts_with(request.prompt_ids, starts[window + 1]):
            window += 1
        held = len(request.prompt_ids) - gen
        if window < chosen.cap:
            assert held + asked + chosen.summary_cap <= chosen.window
            if request is not engine.requests[0]:
                assert chosen.window - held >= chosen.threshold, "what is full is compacted before the next action"


def starts_with(ids: np.ndarray, start: np.ndarray) -> bool:
    return len(ids) >= len(start) and np.array_equal(ids[: len(start)], start)


def window_starts(rollout: Rollout) -> list[np.ndarray]:
    return [execution.context_ids for execution, _ in rollout.windows()]


@many
@given(attempts())
def test_each_sampled_token_is_optimized_once_in_order_and_the_discarded_never(each_renderer, drawn):
    made = attempt(drawn, each_renderer)
    assume(made is not None)
    rollout, engine = made
    tokens, marks = [], []
    for segment in rollout.segments:
        tokens.append(segment.token_ids[segment.optimized])
        marks.append(segment.logprobs[segment.optimized])
        assert set(segment.versions[segment.optimized].tolist()) <= {3}
    found = np.concatenate(marks).tolist()
    assert found == sorted(found, reverse=True), "in the order they were sampled"
    everything = np.concatenate([c.token_ids for c in engine.completions])
    assert np.concatenate(tokens).tolist() == everything[[-int(m) - 1 for m in found]].tolist(), "ids as sampled"
    by_mark = {-int(c.logprobs[0]): len(c.token_ids) for c in engine.completions if len(c.token_ids)}
    left_out = sum(by_mark.values()) - len(found)
    discarded = sum(len(c.discarded) for c in rollout.compactions)
    assert (left_out > 0) == (discarded > 0)
    if rollout.settings.mode == "training":
        assert left_out == 0


@many
@given(attempts())
def test_each_window_is_exactly_what_the_requests_saw(each_renderer, drawn):
    made = attempt(drawn, each_renderer)
    assume(made is not None)
    rollout, engine = made
    gen = np.array(each_renderer.generation_prompt)
    system = each_renderer.message("system", "trail")
    windows = list(rollout.windows())
    now = 0
    for i, request in enumerate(engine.requests):
        execution, summary = windows[now]
        whole = np.concatenate([execution.context_ids, execution.token_ids])
        assert request.prompt_ids[: len(system)].tolist() == system, "the system prompt is the same in every window"
        if request.kind == "execution":
            assert starts_with(np.concatenate([whole, gen]), request.prompt_ids)
        else:
            asked = request.prompt_ids[len(whole) :]
            assert starts_with(request.prompt_ids, whole), "a summary's prefix is its whole window"
            assert len(asked) > 0
            if summary is not None:
                assert np.array_equal(asked, summary.context_ids)
            following = engine.requests[i + 1 : i + 2]
            if following and following[0].kind == "execution":
                now += 1


@many
@given(attempts())
def test_a_resumed_window_is_system_resume_message_and_the_tail_of_the_one_before(each_renderer, drawn):
    made = attempt(drawn, each_renderer)
    assume(made is not None)
    rollout, _ = made
    windows = list(rollout.windows())
    for record, (before, _), (after, _) in zip(
        [c for c in rollout.compactions if c.tokens_after is not None], windows, windows[1:], strict=False
    ):
        opening = each_renderer.message("system", "trail")
        if rollout.settings.compaction.keep_task:
            opening = [*opening, *each_renderer.message("user", "cat a")]
        opening = [*opening, *each_renderer.message("user", record.summary)]
        assert after.context_ids[: len(opening)].tolist() == opening
        tail = after.context_ids[len(opening) :]
        whole = np.concatenate([before.context_ids, before.token_ids])
        assert np.array_equal(tail, whole[len(whole) - len(tail) :]), "kept turns are the same ids"
        assert (len(tail) == 0) == (record.kept == 0)
        assert len(after.context_ids) == record.tokens_after < record.tokens_before == len(whole)


@many
@given(attempts())
def test_no_prompt_holds_half_a_turn(each_renderer, drawn):
    made = attempt(drawn, each_renderer)
    assume(made is not None)
    _, engine = made
    for request in engine.requests:
        roles = [m["role"] for m in request.messages]
        if request.kind == "summary":
            assert roles.pop() == "user"
        opening = roles.index("assistant") if "assistant" in roles else len(roles)
        assert roles[:opening] in (["system", "user"], ["system", "user", "user"])
        assert roles[opening:] == ["assistant", "user"] * ((len(roles) - opening) // 2)


@many
@given(attempts())
def test_every_rollout_is_graded_and_survives_parquet(tmp_path, each_renderer, drawn):
    made = attempt(drawn, each_renderer)
    assume(made is not None)
    rollout, _ = made
    assert rollout.outcome.reward is not None
    assert rollout.n_compactions <= rollout.settings.compaction.cap
    assert read_rollouts(write_rollouts(tmp_path / "r.parquet", [rollout])) == [rollout]


@many
@given(attempts())
def test_one_seed_gives_the_same_rollout_twice(each_renderer, drawn):
    first = attempt(drawn, each_renderer)
    assume(first is not None)
    assert attempt(drawn, each_renderer)[0] == first[0]


def test_the_drawn_settings_really_compact(renderer):
    """Guards the properties above against settings under which nothing ever happens."""
    rng = random.Random(1)
    compacted = 0
    for _ in range(40):
        chosen = small_settings(window=rng.randint(120, 200), threshold=rng.randint(60, 80), cap=3)
        made = attempt((chosen, ["cat 0", "cat 1"] * 8, ["out a"], ["go on " * 4, "b", "c"]), renderer)
        compacted += made is not None and made[0].n_compactions > 0
    assert compacted >= 20
