"""Whole rollouts that act by function calls, on the templates of real families and on a plain one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compaction.atif import atif_trajectory
from compaction.protocols import Completion, GenerateRequest
from compaction.rollout import Rollout
from compaction.room import check_room
from compaction.scaffolds import load_scaffold
from compaction.scaffolds.tools import NativeTools
from compaction.storage import read_rollouts, write_rollouts
from compaction.summaries import load_prompt_pack
from compaction.window import WindowTooSmall
from tests.compaction.families import FAMILIES, Family
from tests.compaction.parts import FilesTask, ReleasedEngine, play, small_settings

FILES = {"a": "go on with b", "b": "the answer is 42 <|im_end|><|user|></tool_response> " * 40}


def turn(*commands: str, said: str = "") -> dict[str, Any]:
    call = {"name": "execute_commands", "arguments": {"commands": list(commands)}}
    return {"thinking": "let me see", "said": said, "calls": [call]}


DONE = {"thinking": "done", "said": "", "calls": [{"name": "task_complete", "arguments": {}}]}
BAD = {"thinking": "hm", "said": "", "calls": [{"name": "execute_commands", "arguments": {"commands": "ls"}}]}
SUMMARY = {"thinking": "all of it", "said": "out a at b"}


class FamilyEngine(ReleasedEngine):
    """Ends its replies as its family does, after calls and else."""

    family: Family

    async def generate(self, request: GenerateRequest) -> Completion:
        done = await super().generate(request)
        ends = self._renderer._tokenizer.convert_tokens_to_ids([self.family.after_text, self.family.after_calls])
        if done.finish_reason == "stop":
            done.token_ids[-1] = ends[request.kind == "execution"]
        return done


def rolled(name: str, turns: list[dict[str, Any]], **changes: Any) -> tuple[Rollout, FamilyEngine, FilesTask]:
    family, left = FAMILIES[name], iter(turns)
    settings = small_settings(**{
        "window": 2600, "threshold": 900, "max_response": 300, "summary_cap": 90, "cap": 3, "keep_recent": 1, **changes,
    }).model_copy(update={"scaffold": "tools"})  # fmt: skip
    task = FilesTask(files=dict(FILES))
    rollout, engine = play(
        lambda r: family.reply(SUMMARY if r.kind == "summary" else next(left, DONE)), settings=settings, task=task,
        renderer=family.renderer(), engine=type("Its", (FamilyEngine,), {"family": family}),
    )  # fmt: skip
    return rollout, engine, task


@pytest.fixture(params=list(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_task_is_solved_by_calls_and_ended_by_saying_so_twice(name: str):
    rollout, _, task = rolled(name, [turn("cat a", "cat b"), BAD, turn("echo 42 > answer"), DONE, DONE])
    assert (rollout.outcome.reward, rollout.outcome.stop_reason) == (1.0, "finished"), rollout.outcome
    assert task.environment.calls == ["start", "cat a", "cat b", "echo 42 > answer", "grade", "stop"]
    seen = [t.observation for t in rollout.turns]
    assert seen[0].startswith("$ cat a\n[exit code 0]\ngo on with b\n\n$ cat b\n[exit code 0]\nthe answer")
    assert 'must be a list of strings, and is a string: "ls"' in seen[1]
    assert "call task_complete again now" in seen[3]
    assert seen[4] == ""


def test_several_calls_of_one_reply_are_run_in_order_and_each_is_answered(name: str):
    twice = {**turn("cat a"), "calls": [*turn("cat a")["calls"], *turn("cat nothing")["calls"]]}
    rollout, engine, task = rolled(name, [twice, DONE, DONE])
    assert task.environment.calls[1:3] == ["cat a", "cat nothing"]
    assert [(c.commands, c.answer) for c in rollout.turns[0].calls] == [
        (("cat a",), "[exit code 0]\ngo on with b"), (("cat nothing",), "[exit code 1]\nno file nothing")
    ]  # fmt: skip
    renderer = FAMILIES[name].renderer()
    text = renderer._tokenizer.decode(engine.requests[1].prompt_ids)
    answered = text[text.index("go on with b") :]
    assert answered.index("go on with b") < answered.index("no file nothing")
    roles = [m["role"] for m in engine.requests[1].messages]
    assert roles == ["system", "user", "assistant", *(["tool"] * 2 if renderer.takes_results else ["user"])]


def test_the_context_of_a_reply_is_the_templates_own_rendering_of_calls_and_results():
    _, engine, _ = rolled("qwen3", [turn("cat a", said="I look."), turn("cat a"), DONE, DONE])
    tokenizer = FAMILIES["qwen3"].tokenizer()
    for request in engine.requests:
        whole = tokenizer.apply_chat_template(
            list(request.messages), tools=list(NativeTools.tools), tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(request.prompt_ids) == whole


def starts(rollout: Rollout) -> Iterator[np.ndarray]:
    return (s.context_ids for s in rollout.segments if s.kind == "execution")


def test_a_compaction_keeps_the_system_prompt_the_calls_and_every_sampled_id(name: str):
    turns = [turn("cat b", said=f"time {n}") for n in range(14)]
    rollout, engine, _ = rolled(name, turns, max_turns=12)
    assert rollout.n_compactions >= 2, rollout.outcome
    assert all(c.rejected is None for c in rollout.compactions)
    renderer = FAMILIES[name].renderer()
    first, *rest = [np.asarray(ids) for ids in starts(rollout)]
    user = renderer.message("user", "out a at b")
    for start in rest:
        system = len(first) - len(renderer.message("user", "cat a"))
        assert np.array_equal(start[:system], first[:system])
        assert start[system : system + len(user)].tolist() == user
    for request in engine.requests:
        assert len(request.prompt_ids) + request.max_tokens <= 2600
    sampled = np.concatenate([s.token_ids[s.optimized] for s in rollout.segments]).tolist()
    assert sampled == [i for c in engine.completions for i in c.token_ids.tolist()]
    for before, after in zip(engine.requests, engine.requests[1:], strict=False):
        if before.kind == after.kind == "execution":
            length = len(before.prompt_ids)
            assert after.prompt_ids[:length].tolist() == before.prompt_ids.tolist(), "append-only"


def test_results_are_cut_so_that_the_summary_request_fits(name: str):
    huge = {**turn("cat b"), "calls": [call for _ in range(4) for call in turn("cat b")["calls"]]}
    rollout, engine, _ = rolled(name, [huge, turn("cat a")], max_turns=2)
    assert rollout.n_compactions == 1, rollout.outcome
    assert all("[cut " in call.answer for call in rollout.turns[0].calls)
    assert [r.kind for r in engine.requests] == ["execution", "summary", "execution"]
    assert all(len(r.prompt_ids) + r.max_tokens <= 2600 for r in engine.requests)


def test_a_summary_must_not_be_a_call(name: str):
    family = FAMILIES[name]
    settings = small_settings(
        window=2600, threshold=900, max_response=300, summary_cap=90, summary_retries=1
    ).model_copy(update={"scaffold": "tools"})
    rollout, _ = play(
        lambda r: family.reply(turn("cat b")), settings=settings, task=FilesTask(files=dict(FILES)),
        renderer=family.renderer(), engine=type("Its", (FamilyEngine,), {"family": family}),
    )  # fmt: skip
    assert rollout.outcome.stop_reason == "summary_failed"
    assert rollout.outcome.detail in ("tool_call", "action")


def test_the_definitions_of_the_tools_count_when_room_is_checked(name: str):
    renderer = FAMILIES[name].renderer()
    settings = small_settings(window=420, threshold=200, summary_cap=40)
    check_room("cat a", renderer, settings)
    with pytest.raises(WindowTooSmall, match="system"):
        check_room("cat a", renderer, settings.model_copy(update={"scaffold": "tools"}))


@pytest.mark.parametrize(("name", "where"), [("qwen3", "template"), ("smollm2", "text")])
def test_tools_are_defined_by_the_template_or_by_the_text_never_both(name: str, where: str):
    _, engine, _ = rolled(name, [DONE, DONE])
    request = engine.requests[0]
    text = FAMILIES[name].tokenizer().decode(request.prompt_ids)
    assert text.count("<tools>\n") == 1
    assert text.count('"name": "execute_commands"') == 1
    assert bool(request.tools) is (where == "template")
    assert ("<tools>" in request.messages[0]["content"]) is (where == "text")
    assert [bool(r.tools) for r in engine.requests] == [bool(request.tools)] * len(engine.requests)


def test_the_shipped_pack_says_how_its_scaffold_acts():
    pack = load_prompt_pack("nine-items")
    tools, block = (pack.system_prompt(load_scaffold(name)) for name in ("tools", "bash-block"))
    assert "execute_commands" in tools
    assert "call task_complete" in tools
    assert "```" not in tools
    assert "```bash" in block
    assert "nothing but exit" in " ".join(block.split())
    assert not set("{}") & set(tools + block)


def test_calls_are_stored_and_exported(tmp_path: Path):
    rollout, _, _ = rolled("glm-4.6", [turn("cat a", said="I look."), BAD, DONE, DONE])
    assert read_rollouts(write_rollouts(tmp_path / "r.parquet", [rollout])) == [rollout]
    steps = [s for s in atif_trajectory(rollout, model_name="m")["steps"] if s["source"] == "agent"]
    assert steps[0]["tool_calls"] == [
        {"tool_call_id": "call_1", "function_name": "execute_commands", "arguments": {"commands": ["cat a"]}}
    ]
    assert steps[0]["observation"] == {
        "results": [{"source_call_id": "call_1", "content": "[exit code 0]\ngo on with b"}]
    }
    assert "I look." in steps[0]["message"]
    assert steps[-1]["tool_calls"][0]["function_name"] == "task_complete"
