"""The scripted expert, run through the real agent loop with the real tokenizer."""

from __future__ import annotations

import asyncio
from statistics import mean

import numpy as np
import pytest
from pydantic import ValidationError

from compaction.agent import run_rollout
from compaction.protocols import Engine, EngineError, GenerateRequest
from compaction.rendering import ChatTemplateRenderer
from compaction.rollout import Rollout
from compaction.settings import AgentSettings, CompactionSettings
from evaluation.tasksets.trail import NOISE_WORDS, OUT_NAMES, TrailSettings, TrailTask, trail_tasks
from evaluation.tasksets.trail_expert import ExpertSettings, TrailExpert, world_text
from rl.tiny import TinySettings, train_tokenizer

W1 = TrailSettings()
COMPLETE = {f"{which}_{kind}": 0.0 for which in ("first", "later") for kind in ("last", "drop", "none")}
PERFECT = ExpertSettings(follow_flip=1, stray_right=0, premature_finish=0, **COMPLETE)


@pytest.fixture(scope="module")
def renderer() -> ChatTemplateRenderer:
    return ChatTemplateRenderer(train_tokenizer(world_text(W1, seed=0, n=200), TinySettings()))


def run(
    renderer: ChatTemplateRenderer, expert: ExpertSettings, n: int = 100, world: TrailSettings = W1, **compaction: int
) -> list[tuple[TrailTask, Rollout]]:
    values = {"window": 128, "threshold": 56, "max_response": 26, "min_response": 4, "summary_cap": 24, "cap": 8}
    settings = AgentSettings(
        scaffold="shell-line",
        compaction=CompactionSettings(**(values | compaction), prompt_pack="tiny", summary_retries=0),
        mode="training",
    )

    async def all_of_them() -> list[tuple[TrailTask, Rollout]]:
        engine = TrailExpert(world, renderer, expert)
        assert isinstance(engine, Engine)
        tasks = trail_tasks(world, "train", n, seed=0)
        return [(t, await run_rollout(t, engine, renderer, settings, seed=0, rollout_id=t.id)) for t in tasks]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("keep_recent", [0, 1, 2])
def test_without_mistakes_every_task_is_solved_whatever_is_kept(
    renderer: ChatTemplateRenderer, keep_recent: int
) -> None:
    rollouts = run(renderer, PERFECT, n=60, keep_recent=keep_recent)
    assert {rollout.outcome.reward for _, rollout in rollouts} == {1.0}
    assert {rollout.outcome.stop_reason for _, rollout in rollouts} == {"finished"}
    assert max(rollout.n_compactions for _, rollout in rollouts) >= 3
    assert sum(c.kept for _, rollout in rollouts for c in rollout.compactions) > 60 * (keep_recent - 0.5)


def test_without_mistakes_a_harder_world_is_solved_in_one_window(renderer: ChatTemplateRenderer) -> None:
    harder = TrailSettings(
        flip_rate=0.3,
        double_flip_rate=0.2,
        flip_words=3,
        lure_rate=0.5,
        flip_only_before_facts=False,
        decoy_fact_rate=1.0,
    )
    rollouts = run(renderer, PERFECT, n=50, world=harder, window=1000, cap=0)
    assert {rollout.outcome.reward for _, rollout in rollouts} == {1.0}


def test_the_same_seed_gives_the_same_rollouts_and_another_one_others(renderer: ChatTemplateRenderer) -> None:
    first, again = run(renderer, ExpertSettings(), n=30), run(renderer, ExpertSettings(), n=30)
    assert first == again
    other = run(renderer, ExpertSettings(seed=1), n=30)
    assert first != other


def test_mistakes_come_at_their_rates(renderer: ChatTemplateRenderer) -> None:
    flipped, straight = [], []
    for _, rollout in run(renderer, ExpertSettings(**COMPLETE, premature_finish=0), n=150, keep_recent=1):
        for turn, following in zip(rollout.turns, rollout.turns[1:], strict=False):
            if following.action.startswith("cat"):
                right = following.action.split()[1] == turn.observation.split()[1]
                (flipped if "flip" in turn.observation else straight).append(right)
    assert mean(flipped) == pytest.approx(0.45, abs=0.12)
    assert mean(straight) == pytest.approx(0.02, abs=0.01)


def test_a_summary_and_the_action_after_it_agree_on_the_way(renderer: ChatTemplateRenderer) -> None:
    n = 0
    for _, rollout in run(renderer, ExpertSettings(premature_finish=0), n=40, keep_recent=2):
        for compaction in rollout.compactions:
            pointer = compaction.summary.split()[3]
            action = rollout.turns[compaction.after_turn].action
            expected = {"end": "echo", "exit": "exit"}.get(pointer, f"cat {pointer}")
            assert action.startswith(expected)
            n += 1
    assert n > 50


def test_what_a_summary_lost_stays_lost(renderer: ChatTemplateRenderer) -> None:
    forgetful = PERFECT.model_copy(update={"first_none": 1.0, "later_none": 1.0})
    for task, rollout in run(renderer, forgetful, n=50, keep_recent=0):
        written = rollout.turns[-2].action.split()[1:-2]
        after = max((c.after_turn for c in rollout.compactions if not c.summary.endswith("exit")), default=0)
        seen = {w for turn in rollout.turns[after:-2] for w in turn.observation.split()} & set(W1.facts)
        assert set(written) == seen
        assert written == [fact for fact in task.answer if fact in seen]
        assert rollout.outcome.reward == float(written == list(task.answer))


def test_kept_turns_add_their_facts_once_and_in_order(renderer: ChatTemplateRenderer) -> None:
    expert = TrailExpert(W1, renderer, PERFECT)
    kept = [
        {"role": "assistant", "content": "cat L4"},
        {"role": "user", "content": " L5 R5 c3 ash"},
        {"role": "assistant", "content": "cat L5"},
        {"role": "user", "content": " end d4"},
    ]

    def reply(summary: str) -> str:
        return expert.reply(_request([{"role": "user", "content": summary}, *kept]))

    assert reply("out log at end has a1 b2 c3 d4") == "echo a1 b2 c3 d4 > log"
    assert reply("out log at end has a1 b2 d4") == "echo a1 b2 c3 d4 > log"  # c3 was dropped and is still in sight
    assert reply("out log at end has") == "echo c3 d4 > log"


def test_a_summary_tells_what_the_next_window_needs(renderer: ChatTemplateRenderer) -> None:
    expert = TrailExpert(W1, renderer, PERFECT)
    turns = [
        {"role": "user", "content": "start L3 out log"},
        {"role": "assistant", "content": "cat L3"},
        {"role": "user", "content": " L4 R9 a1 flip"},
    ]
    ask = {"role": "user", "content": "summarize"}
    assert expert.reply(_request([*turns, ask], kind="summary")) == "out log at R9 has a1"
    turns += [{"role": "assistant", "content": "cat R9"}, {"role": "user", "content": " end b2"}]
    assert expert.reply(_request([*turns, ask], kind="summary")) == "out log at end has a1 b2"
    turns += [{"role": "assistant", "content": "echo a1 b2 > log"}, {"role": "user", "content": ""}]
    assert expert.reply(_request([*turns, ask], kind="summary")) == "out log at exit"
    assert expert.reply(_request([{"role": "user", "content": "out log at exit"}])) == "exit"


def test_summary_mixes_come_at_their_shares(renderer: ChatTemplateRenderer) -> None:
    def shares(header: str) -> list[float]:
        """Shares of the kinds complete, last two, none, other, over rollouts that know six facts."""
        messages = [{"role": "user", "content": header}]
        files = ["L4 R4 a1", "L5 R5 b1", "L6 R6 c1", "L7 R7 d1", "L8 R8 e1", "L9 R9 f1"]
        for i, content in enumerate(files, 3):
            messages += [{"role": "assistant", "content": f"cat L{i}"}, {"role": "user", "content": f" {content}"}]
        messages.append({"role": "user", "content": "summarize"})
        expert = TrailExpert(W1, renderer, ExpertSettings())
        facts = [expert.reply(_request(messages, kind="summary", rollout_id=str(i))).split()[5:] for i in range(1000)]
        kinds = [["a1", "b1", "c1", "d1", "e1", "f1"], ["e1", "f1"], []]
        counts = [sum(kept == kind for kept in facts) / 1000 for kind in kinds]
        return [*counts, 1 - sum(counts)]

    assert shares("start L3 out log") == pytest.approx([0.76, 0.12, 0.03, 0.09], abs=0.04)
    assert shares("out log at L3 has") == pytest.approx([0.34, 0.55, 0.03, 0.08], abs=0.04)


def test_a_reply_is_cut_at_the_limit_and_ends_with_the_end_token_otherwise(renderer: ChatTemplateRenderer) -> None:
    expert = TrailExpert(W1, renderer, PERFECT)
    request = _request([{"role": "user", "content": "start L3 out log"}])
    whole = asyncio.run(expert.generate(request))
    assert whole.finish_reason == "stop"
    assert renderer.decode(whole.token_ids) == "cat L3"
    assert renderer.close(list(whole.token_ids), "stop") == []
    assert len(whole.token_ids) == len(whole.logprobs) == len(whole.versions) == 3
    cut = asyncio.run(expert.generate(_request(list(request.messages), max_tokens=1)))
    assert cut.finish_reason == "length"
    assert renderer.decode(cut.token_ids) == "cat"


def test_a_request_without_messages_is_refused(renderer: ChatTemplateRenderer) -> None:
    with pytest.raises(EngineError, match="reads messages"):
        asyncio.run(TrailExpert(W1, renderer, PERFECT).generate(_request([])))


def test_every_word_of_the_world_is_one_token(renderer: ChatTemplateRenderer) -> None:
    words = [*W1.left_names, *W1.right_names, *W1.facts, *NOISE_WORDS, *OUT_NAMES, "flip", "end", "out", "exit", ">"]
    assert [word for word in words if len(renderer.encode(f" {word}")) != 1] == []
    assert [
        word
        for word in ("start", "out", "cat", "echo", "exit", "trail", "summarize")
        if len(renderer.encode(word)) != 1
    ] == []
    (task,) = trail_tasks(W1, "test", 1, seed=0)
    assert len(renderer.encode(task.instruction)) == 4
    for _, content in task.files:
        assert len(renderer.encode(content)) == len(content.split())


def test_shares_beyond_one_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"later_last, later_drop and later_none sum to 1\.2"):
        ExpertSettings(later_last=0.9, later_drop=0.3, later_none=0)


def _request(
    messages: list[dict[str, str]], kind: str = "execution", rollout_id: str = "r", max_tokens: int = 64
) -> GenerateRequest:
    return GenerateRequest(
        rollout_id=rollout_id,
        prompt_ids=np.zeros(4, dtype=np.int32),
        max_tokens=max_tokens,
        temperature=1.0,
        seed=0,
        kind=kind,  # type: ignore[arg-type]
        messages=tuple(messages),
    )
