from __future__ import annotations

from pathlib import Path

import pytest

from compaction.scaffolds import load_scaffold
from compaction.summaries import PromptPack, judge_summary, load_prompt_pack

NINE, TINY = load_prompt_pack("nine-items"), load_prompt_pack("tiny")


def judge(text: str, pack: PromptPack = NINE, finish: str = "stop"):
    return judge_summary(text, finish, pack, load_scaffold("shell-line"))


def wrapped(body: str) -> str:
    return f"<analysis>went through it</analysis>\n<summary>{body}</summary>"


def test_an_accepted_summary_is_its_body_without_the_scratch_part():
    assert judge(wrapped("\n1. all of it\n")).body == "1. all of it"
    assert judge("out a 7 at b", TINY).body == "out a 7 at b"


@pytest.mark.parametrize(
    ("text", "finish", "why"),
    [
        ("", "stop", "empty"),
        ("   \n", "stop", "empty"),
        (wrapped("cut at the limit"), "length", "endless"),
        (wrapped("<tool_call>{}</tool_call>"), "stop", "tool_call"),
        ('{"tool_calls": []}', "stop", "tool_call"),
        ("<|user|>" + wrapped("next"), "stop", "role_play"),
        ("User: and now?\n" + wrapped("next"), "stop", "role_play"),
        (wrapped("done\nUser: go on\nAssistant: I did"), "stop", "role_play"),
        ("cat <summary>x</summary>", "stop", "action"),
        ("it all went well", "stop", "no_body"),
        (wrapped("  \n "), "stop", "no_body"),
    ],
)
def test_what_is_no_summary_is_rejected_with_its_kind(text: str, finish: str, why: str):
    verdict = judge(text, finish=finish)
    assert (verdict.body, verdict.rejected) == (None, why)


@pytest.mark.parametrize(
    "body",
    ["docker-compose.yaml holds:\nuser: postgres\nport: 5", 'the reply has a key "tool_calls" that is a list'],
    ids=["a quoted file", "a quoted key"],
)
def test_a_summary_may_quote_what_the_work_needs(body: str):
    assert judge(wrapped(body)).body == body


def test_tags_named_in_the_scratch_part_or_quoted_in_the_body_do_not_cut_the_summary():
    text = "<analysis>then <summary> tags follow</analysis><summary>it prints <summary>x</summary> once</summary>"
    assert judge(text).body == "it prints <summary>x</summary> once"


def test_the_tiny_pack_accepts_one_line_only():
    assert judge("out a\ncat b", TINY).rejected == "no_body"
    assert judge("go out a", TINY).rejected == "no_body"


def test_the_nine_items_are_all_asked_for_and_the_task_is_restated():
    for number in range(1, 10):
        assert f"\n{number}. " in NINE.summary_instruction
    assert "task again" in NINE.summary_instruction
    assert "<analysis>" in NINE.summary_instruction


def test_the_resume_message_holds_the_body_word_for_word():
    assert "{x} {summary} \\1" in NINE.resume_message("{x} {summary} \\1")


def test_a_pack_may_be_a_file(tmp_path: Path):
    pack = tmp_path / "mine.yaml"
    pack.write_text(
        "name: mine\nsystem: s\nsummary_instruction: q\nresume: 'r {summary}'\nsummary_pattern: '(?P<body>.+)'\n"
    )
    assert load_prompt_pack(str(pack)).resume_message("x") == "r x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [", "not YAML"),
        ("name: m\nsystem: s\nsummary_instruction: q\nresume: 'r'\nsummary_pattern: '(?P<body>.)'", "{summary}"),
        ("name: m\nsystem: s\nsummary_instruction: q\nresume: '{summary}'\nsummary_pattern: 'x'", "group named body"),
        ("name: m\nsystem: s\nsummary_instruction: q\nresume: '{summary}'\nsummary_pattern: '('", "regular expression"),
    ],
)
def test_a_broken_pack_is_refused_with_what_is_wrong(tmp_path: Path, text: str, said: str):
    pack = tmp_path / "mine.yaml"
    pack.write_text(text)
    with pytest.raises(ValueError, match=said):
        load_prompt_pack(str(pack))


def test_an_unknown_pack_is_named_with_the_shipped_ones():
    with pytest.raises(ValueError, match=r"'tinny' is neither .* \(nine-items, tiny\)"):
        load_prompt_pack("tinny")
