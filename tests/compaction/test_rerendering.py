"""Texts rendered again: the same tokens for the same model, a clear reason where another could not have acted so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compaction.atif_reading import trajectory_from_atif
from compaction.rendering import ChatTemplateRenderer
from compaction.rerendering import rerendered
from compaction.rollout import CallRecord, Outcome, Rollout
from compaction.scaffolds import load_scaffold
from compaction.settings import AgentSettings, CompactionSettings
from compaction.trajectory import NotUsable, Said, Summarized, Trajectory, trajectory_of
from tests.compaction.families import FAMILIES
from tests.compaction.parts import CHATML, make_tokenizer, play, replies, small_settings

WELL = ["cat a", *["cat a", "echo 42 > answer", "cat b"] * 5]
LONG = ["cat a", "", "cat b\ncat a", "cat b", *["cat a", "echo 42 > answer", "cat b"] * 4]


def made(renderer: ChatTemplateRenderer, actions: list[str] = LONG, **changes: Any) -> Rollout:
    return play(replies(actions), settings=small_settings(**changes), renderer=renderer)[0]


def runs(token_ids: np.ndarray, optimized: np.ndarray) -> list[np.ndarray]:
    """The sampled replies of a segment."""
    edges = np.flatnonzero(np.diff(optimized.astype(int), prepend=0, append=0))
    return [token_ids[a:b] for a, b in edges.reshape(-1, 2)]


def again(rollout: Rollout, renderer: ChatTemplateRenderer) -> Rollout:
    return rerendered(trajectory_of(rollout), renderer, rollout.settings)


@pytest.mark.parametrize(
    "changes", [{"cap": 9}, {"keep_recent": 0}, {"keep_recent": 3}, {"keep_task": True}, {"cap": 0}, {"max_turns": 6}]
)
def test_a_rollout_of_ours_comes_back_token_for_token(any_renderer: ChatTemplateRenderer, changes: dict[str, Any]):
    rollout = made(any_renderer, WELL, **changes)
    assert again(rollout, any_renderer).segments == rollout.segments


def tokens(rollout: Rollout) -> list[list[int]]:
    return [[*segment.context_ids.tolist(), -1, *segment.token_ids.tolist()] for segment in rollout.segments]


def test_replies_that_were_no_action_stand_there_and_are_not_taught(any_renderer: ChatTemplateRenderer):
    rollout = made(any_renderer, cap=9)
    told = again(rollout, any_renderer)
    assert tokens(told) == tokens(rollout)
    bad = [
        turn.action
        for turn in rollout.turns
        if load_scaffold("shell-line").parse(turn.action, "stop").kind == "malformed"
    ]
    assert len(bad) == 2
    untaught = [
        any_renderer.decode(run)
        for new, old in zip(told.segments, rollout.segments, strict=True)
        for run in runs(new.token_ids, old.optimized & ~new.optimized)
    ]
    assert untaught == bad
    assert not any(
        (new.optimized & ~old.optimized).any() for new, old in zip(told.segments, rollout.segments, strict=True)
    )


def test_compactions_are_among_what_comes_back(renderer: ChatTemplateRenderer):
    assert made(renderer).n_compactions == 2


def test_a_reply_that_was_cut_is_not_taught_to_end_there(renderer: ChatTemplateRenderer):
    rollout = made(renderer, ["cat a", "echo " + "a " * 60, "cat b"], max_response=12)
    assert rollout.turns[1].observation == " reply cut: too long"
    told = again(rollout, renderer)
    assert tokens(told) == tokens(rollout)
    assert not any("echo" in renderer.decode(s.token_ids[s.optimized]) for s in told.segments)


def test_each_text_is_trained_on_once_and_the_copied_tail_never(renderer: ChatTemplateRenderer):
    other = ChatTemplateRenderer(make_tokenizer(CHATML))
    rollout = made(renderer, WELL, keep_recent=2)
    student = rollout.settings.model_copy(
        update={"compaction": rollout.settings.compaction.model_copy(update={"window": 400})}
    )
    told = rerendered(trajectory_of(rollout), other, student)
    end = other.close([], "length")[0]
    said = [s.token_ids[s.optimized] for s in told.segments]
    trained = [
        other.decode(run) for each in said for run in np.split(each, np.flatnonzero(each == end) + 1) if len(run)
    ]
    expected = [turn.action for turn in rollout.turns]
    for record in reversed(rollout.compactions):
        expected.insert(record.after_turn, record.reply)
    assert trained == expected
    kept = told.segments[2].context_ids
    assert other.decode(kept).count("assistant") == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scaffold": "bash-block"}, "the student's scaffold is shell-line"),
        ({"turns": ()}, "it holds no turn"),
        ({"turns": (Said("", ("x",)),)}, "none of its replies is a command of scaffold shell-line"),
        ({"turns": (Said("cat a", None), Said("cat b", ("x",)))}, "a turn in the middle was shown nothing"),
        (
            {"turns": (Said("cat a", ("b " * 200,)), Said("cat b", ("x",)))},
            "it does not fit the student's window of 160",
        ),
        ({"compactions": (Summarized(1, "I cannot", 0),)}, "a summary would not be accepted under prompt pack tiny"),
        ({"compactions": (Summarized(1, "out a", 2),)}, "a compaction keeps more turns than there were"),
    ],
)
def test_what_the_student_could_not_have_done_is_refused_with_the_reason(
    renderer: ChatTemplateRenderer, changes: dict[str, Any], reason: str
):
    good = Trajectory("r", "t", ("cat a",), (Said("cat a", ("b",)), Said("exit", None)), scaffold="shell-line")
    assert rerendered(good, renderer, small_settings()).outcome.error_class == "unscored"
    with pytest.raises(NotUsable) as caught:
        rerendered(replace(good, **changes), renderer, small_settings())
    assert caught.value.reason.startswith(reason)


def test_what_is_shown_last_is_left_off_where_it_does_not_fit(renderer: ChatTemplateRenderer):
    trajectory = Trajectory("r", "t", ("cat a",), (Said("cat a", ("b " * 200,)),))
    (segment,) = rerendered(trajectory, renderer, small_settings()).segments
    assert renderer.decode(segment.token_ids[segment.optimized]) == "cat a"


def test_a_rollout_without_its_texts_or_its_reward_is_none_to_learn_from(renderer: ChatTemplateRenderer):
    rollout = made(renderer)
    compactions = tuple(replace(c, reply="") for c in rollout.compactions)
    failed = Outcome(None, "error", "engine")
    for changes, reason in (
        ({"instruction": ""}, "task's text is missing"),
        ({"compactions": compactions}, "whole reply is missing"),
        ({"outcome": failed}, "the trial failed"),
    ):
        with pytest.raises(NotUsable, match=reason):
            trajectory_of(replace(rollout, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("scaffold", ["bash-block", "tools"])
def test_students_of_every_family_learn_to_end_their_replies_as_they_do(name: str, scaffold: str):
    family = FAMILIES[name]
    student = family.renderer().with_thinking(False)
    call = CallRecord("c1", "execute_commands", {"commands": ["ls"]}, ("ls",), "a b")
    turn = Said("", ("a b",), (call,)) if scaffold == "tools" else Said("```bash\nls\n```", ("a b",))
    agent = AgentSettings(scaffold=scaffold, thinking=False, compaction=CompactionSettings(window=65_536))
    trajectory = Trajectory("r", "t", ("look",), (turn, turn), reward=1.0)
    (segment,) = rerendered(trajectory, student, agent).segments
    last = np.flatnonzero(segment.optimized & ~np.append(segment.optimized[1:], False))
    ends = student._tokenizer.convert_ids_to_tokens(segment.token_ids[last].tolist())
    assert ends == [family.after_calls if scaffold == "tools" else family.after_text] * 2
    following = segment.token_ids[last[last + 1 < len(segment.token_ids)] + 1]
    assert not np.isin(following, segment.token_ids[last]).any(), "what opens the next message stands there twice"


@pytest.mark.parametrize("said", ["", "I look."])
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_beside_the_text_are_written_as_the_student_writes_them(name: str, said: str):
    family = FAMILIES[name]
    student = family.renderer(thinking=False)
    calls = [{"name": "execute_commands", "arguments": {"commands": [command]}} for command in ("ls é", "pwd")]
    written = calls[: 1 if name == "llama-3.2" else 2]  # Llama's template allows one call in a reply
    records = tuple(CallRecord("", c["name"], c["arguments"], tuple(c["arguments"]["commands"]), "a") for c in written)
    turn = Said(said, ("a b",) * len(written), records)
    agent = AgentSettings(scaffold="tools", thinking=False, compaction=CompactionSettings(window=65_536))
    (segment,) = rerendered(Trajectory("r", "t", ("look",), (turn,), reward=1.0), student, agent).segments
    reply = student.decode(segment.token_ids[segment.optimized])
    assert reply == family.joint.join(filter(None, [said, *map(family.call, written)]))


def calls_of(*turns: Said) -> Trajectory:
    return Trajectory("r", "t", ("look",), turns, reward=1.0)


def call(name: str, commands: tuple[str, ...] = (), answer: str = "a") -> CallRecord:
    return CallRecord("", name, {"commands": list(commands)} if commands else {}, commands, answer)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (Said('Done.\n<tool_call>\n{"name": "finish"}\n</tool_call>', ("a",), (call("task_complete"),)), "be written"),
        (Said("I mended the <tool_call> parser.", ("a",), (call("task_complete"),)), "be written"),
        (Said("", ("the JSON is broken",), (call("execute_commands", answer="the JSON is broken"),)), "be written"),
    ],
)
def test_a_call_that_would_be_taught_as_another_is_refused(turn: Said, reason: str):
    agent = AgentSettings(scaffold="tools", thinking=False, compaction=CompactionSettings(window=65_536))
    work = Said("", ("a",), (call("execute_commands", ("ls",)),))
    with pytest.raises(NotUsable, match=reason):
        rerendered(calls_of(work, turn), FAMILIES["qwen3"].renderer(thinking=False), agent)
    assert rerendered(calls_of(work), FAMILIES["qwen3"].renderer(thinking=False), agent).segments


def test_what_ran_no_command_is_no_work_to_learn_from():
    agent = AgentSettings(scaffold="tools", thinking=False, compaction=CompactionSettings(window=65_536))
    with pytest.raises(NotUsable, match="none of its replies is a command"):
        rerendered(calls_of(Said("", None, (call("task_complete"),))), FAMILIES["qwen3"].renderer(), agent)


@pytest.mark.parametrize("name", FAMILIES)
def test_another_agents_calls_become_what_the_student_itself_would_have_done(name: str):
    """The ATIF file of an agent with a shell tool; the student's own agent loop gives the same tokens."""
    student = FAMILIES[name].renderer(thinking=False)
    steps = [
        {"source": "user", "message": "find the answer"},
        *({"source": "agent", "message": "", "observation": {"results": [{"content": shown}]},
           "tool_calls": [{"tool_call_id": "x", "function_name": "bash", "arguments": {"command": command}}]}
          for command, shown in (("cat a", "b\n"), ("cat b", "42\n"), ("echo 42 > answer", ""))),
        {"source": "agent", "message": ""},
    ]  # fmt: skip
    atif = {"schema_version": "ATIF-v1.6", "agent": {"name": "other"},
            "steps": [{"step_id": i, **step} for i, step in enumerate(steps, 1)]}  # fmt: skip
    told = trajectory_from_atif(atif, "x", "tools", 1.0)
    agent = AgentSettings(scaffold="tools", thinking=False, compaction=CompactionSettings(window=65_536))
    (segment,) = rerendered(told, student, agent).segments
    texts = [student.decode(each) for each in runs(segment.token_ids, segment.optimized)]
    scaffold = load_scaffold("tools")
    actions = [scaffold.parse(text, "stop") for text in texts]
    assert [[call.commands for call in action.calls] for action in actions] == [
        [("cat a",)], [("cat b",)], [("echo 42 > answer",)], [()], [()]
    ]  # fmt: skip
    assert actions[-1].kind == "finish"
    assert actions[-2].calls[0].answer in student._tokenizer.decode(segment.token_ids)
