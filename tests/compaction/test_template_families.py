"""The chat templates of real families, on a recorded conversation with thinking, tools and a compaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compaction.rendering import ChatTemplateRenderer, TemplateNotSupported, load_renderer
from compaction.thinking import split_thinking
from tests.compaction.families import CONVERSATION, FAMILIES, TOOLS, Family
from tests.compaction.parts import FilesTask, ReleasedEngine, play, small_settings

TURNS: list[dict[str, Any]] = CONVERSATION["turns"]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def family_renderer(family: Family) -> ChatTemplateRenderer:
    return family.renderer()


def observed(renderer: ChatTemplateRenderer, turn: dict[str, Any]) -> list[int]:
    """The message that answers a turn."""
    if renderer.takes_results:
        return renderer.results(turn["results"])
    return renderer.message("user", "\n".join(turn["results"]))


def windows(family: Family, renderer: ChatTemplateRenderer) -> list[list[tuple[str, list[int]]]]:
    """The conversation as the agent loop renders it, in pieces: window by window, what each piece is and its ids."""
    tools = TOOLS if renderer.takes_tools else ()
    system = ("system", renderer.message("system", CONVERSATION["system"], tools))
    out = []
    for opening, turns in ((CONVERSATION["task"], TURNS), (CONVERSATION["summary"]["said"], CONVERSATION["resumed"])):
        pieces = [system, ("opening", renderer.message("user", opening))]
        for turn in turns:
            sampled = family.sampled(renderer, turn)
            answer = renderer.follow(sampled, "stop", observed(renderer, turn))
            pieces += [("prompt", list(renderer.generation_prompt)), ("sampled", sampled), ("answer", answer)]
        out.append(pieces)
    return out


def text_of(renderer: ChatTemplateRenderer, pieces: list[tuple[str, list[int]]]) -> str:
    return str(renderer._tokenizer.decode([i for _, ids in pieces for i in ids], skip_special_tokens=False))


def as_messages(family: Family, opening: str, turns: list[dict[str, Any]], calls: bool) -> list[dict[str, Any]]:
    """A window as chat messages; `calls`: with calls and thinking in fields of their own, as endpoints have them."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": CONVERSATION["system"]}, {"role": "user", "content": opening}
    ]  # fmt: skip
    for turn in turns:
        reply: dict[str, Any] = {"role": "assistant", "content": family.reply(turn)}
        if calls:
            reply |= {"content": turn["said"], "reasoning_content": turn["thinking"]}
            reply["tool_calls"] = [{"type": "function", "function": call} for call in turn["calls"]]
        messages += [reply, *({"role": "tool", "content": result} for result in turn["results"])]
    return messages


def rendered_whole(renderer: ChatTemplateRenderer, messages: list[dict[str, Any]], **more: Any) -> str:
    return str(
        renderer._tokenizer.apply_chat_template(
            messages, tools=list(TOOLS) if renderer.takes_tools else None, tokenize=False, date_string="26 Jul 2024",
            tools_in_user_message=False, **more,
        )
    )  # fmt: skip


# One rendering


@pytest.mark.parametrize("calls", [False, True], ids=["as text", "as calls"])
@pytest.mark.parametrize("name", ["qwen3", "glm-4.6", "glm-4.7", "llama-3.2"])
def test_a_window_reads_as_the_template_renders_it_whole(name: str, calls: bool):
    """Until another user message follows, the templates drop nothing."""
    family, renderer = FAMILIES[name], FAMILIES[name].renderer()
    openings = (CONVERSATION["task"], CONVERSATION["summary"]["said"])
    for pieces, opening, turns in zip(
        windows(family, renderer), openings, (TURNS, CONVERSATION["resumed"]), strict=True
    ):
        as_calls = calls and name != "llama-3.2"  # that template takes one call a reply, and no text beside it
        whole = rendered_whole(renderer, as_messages(family, opening, turns, as_calls))
        assert text_of(renderer, pieces) == whole


@pytest.mark.parametrize("name", ["llama-3.2", "smollm2"])
def test_a_conversation_of_plain_replies_reads_as_the_template_renders_it_whole(name: str):
    """Of templates that leave replies as they were."""
    renderer = FAMILIES[name].renderer()
    messages = [{"role": role, "content": f"{role} says b"} for role in ["system", *["user", "assistant"] * 2, "user"]]
    ids: list[int] = []
    for message in messages:
        if message["role"] == "assistant":
            sampled = [*renderer.encode(message["content"]), renderer.end_ids[0]]
            ids += [*renderer.generation_prompt, *sampled, *renderer.close(sampled, "stop")]
        else:
            ids += renderer.message(message["role"], message["content"])
    whole = renderer._tokenizer.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024")
    assert text_of(renderer, [("", ids)]) == whole


def test_what_was_sampled_stands_in_the_window_as_it_was(family, family_renderer):
    for pieces, turns in zip(windows(family, family_renderer), (TURNS, CONVERSATION["resumed"]), strict=True):
        kinds = [kind for kind, _ in pieces]
        assert kinds == ["system", "opening", *["prompt", "sampled", "answer"] * len(turns)]
        sampled = [ids for kind, ids in pieces if kind == "sampled"]
        assert sampled == [family.sampled(family_renderer, turn) for turn in turns]
        assert [family_renderer.decode(ids) for ids in sampled] == [family.reply(turn) for turn in turns]


def test_the_system_prompt_is_the_same_ids_in_every_window(family, family_renderer):
    first, second = windows(family, family_renderer)
    assert first[0] == second[0]


def test_a_template_that_prints_the_date_prints_always_the_same():
    renderer = FAMILIES["llama-3.2"].renderer()
    assert "Today Date: 26 Jul 2024\n" in text_of(renderer, [("", renderer.message("system", "act"))])


# What the template would do, and what is refused


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3", ["drops the thinking", "in another form"]),
        ("glm-4.6", ["drops the thinking", "in another form"]),
        ("glm-4.7", ["drops the thinking", "in another form"]),
        ("llama-3.2", ["tool definitions into the first user message", "day's date; here it is always 26 Jul 2024"]),
        ("smollm2", []),
    ],
)
def test_what_a_template_rewrites_is_said(name: str, said: list[str]):
    found = FAMILIES[name].renderer().rewrites
    assert len(found) == len(said)
    for sentence, part in zip(found, said, strict=True):
        assert part in sentence


@pytest.mark.parametrize("name", ["qwen3", "glm-4.6", "glm-4.7"])
def test_thinking_stays_in_the_window_where_the_template_would_drop_it(name: str):
    family, family_renderer = FAMILIES[name], FAMILIES[name].renderer()
    messages = [*as_messages(family, "go", TURNS[:1], False), {"role": "user", "content": "and now?"}]
    assert "The Makefile may tell" not in rendered_whole(family_renderer, messages)
    pieces = [*windows(family, family_renderer)[0][:5], ("user", family_renderer.message("user", "and now?"))]
    assert "The Makefile may tell" in text_of(family_renderer, pieces)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: "{{ raise_exception('no system here') if messages[0].role == 'system' }}" + t, "no system here"),
        (lambda t: t.replace("+ message.content +", "+ message.content|upper +"), "changes the content of a user"),
        (lambda t: t.replace("+ message.content +", "+ message.content + message.content +"), "user message 2 times"),
    ],
)
def test_a_template_that_cannot_be_rendered_message_by_message_is_refused_with_why(change, said: str):
    tokenizer = FAMILIES["qwen3"].tokenizer()
    tokenizer.chat_template = change(tokenizer.chat_template)
    with pytest.raises(TemplateNotSupported, match=said):
        ChatTemplateRenderer(tokenizer)


def test_without_a_listed_opener_nothing_ends_a_glm_reply(tmp_path: Path):
    family = FAMILIES["glm-4.6"]
    with pytest.raises(TemplateNotSupported, match=r"closes an assistant message with ''.*generation_config\.json"):
        ChatTemplateRenderer(family.tokenizer())
    family.tokenizer().save_pretrained(tmp_path)
    ends = family.tokenizer().convert_tokens_to_ids(list(family.listed))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert set(load_renderer(tmp_path).end_ids) == set(ends)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert set(load_renderer(tmp_path).end_ids) == set(ends)


# How replies end


def test_every_end_token_is_stripped_and_never_doubled(family, family_renderer):
    renderer = family_renderer
    for end in family.listed:
        sampled = [*renderer.encode("b"), renderer._tokenizer.convert_tokens_to_ids(end)]
        assert renderer.decode(sampled) == "b"
        for message in (renderer.message("user", "u"), observed(renderer, TURNS[0])):
            context = [*sampled, *renderer.follow(sampled, "stop", message)]
            assert context[: len(sampled)] == sampled
            assert context[-len(message) + 1 :] == message[1:]
            assert text_of(renderer, [("", context)]).count(end + end) == 0


def test_a_glm_reply_that_ends_with_the_next_opener_opens_it():
    family = FAMILIES["glm-4.6"]
    renderer = family.renderer()
    result, user = renderer.results(["r"]), renderer.message("user", "u")
    sampled = family.sampled(renderer, TURNS[0])
    assert [sampled[-1], *renderer.follow(sampled, "stop", result)] == result
    assert renderer.follow(sampled, "stop", user) == user, "another opener stays as it was sampled"
    assert renderer.follow(sampled[:-1], "length", result) == result


def test_a_cut_reply_is_closed_as_the_template_does(family, family_renderer):
    cut = family_renderer.encode("b")
    whole = [*family_renderer.generation_prompt, *cut, *family_renderer.close(cut, "length")]
    assert text_of(family_renderer, [("", whole)]).endswith("b" + family_renderer._template.reply_end)


# Control tokens in a text


def test_text_that_looks_like_the_models_tokens_stays_text(family, family_renderer):
    renderer = family_renderer
    own = [*family.special, *family.markup]
    text = "a " + " ".join(own)
    tokens = set(renderer._tokenizer.convert_tokens_to_ids(own))
    for message, frame in (
        (renderer.message("user", text), renderer.message("user", "a")),
        (renderer.message("system", text), renderer.message("system", "a")),
        (observed(renderer, {"results": [text, text]}), observed(renderer, {"results": ["a", "a"]})),
    ):
        assert sum(i in tokens for i in message) == sum(i in tokens for i in frame)
    special = set(renderer._tokenizer.convert_tokens_to_ids(list(family.special)))
    assert not special.intersection(renderer.encode(text))
    assert renderer.decode(renderer.encode(text)) == text


# Thinking


@pytest.mark.parametrize(
    ("name", "thinking", "prompt"),
    [
        ("qwen3", None, "<|im_start|>assistant\n"),
        ("qwen3", True, "<|im_start|>assistant\n"),
        ("qwen3", False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("glm-4.6", None, "<|assistant|>"),
        ("glm-4.6", False, "<|assistant|>\n<think></think>"),
        ("glm-4.7", None, "<|assistant|><think>"),
        ("glm-4.7", False, "<|assistant|></think>"),
        ("llama-3.2", False, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ],
)
def test_one_setting_says_whether_the_model_thinks(name: str, thinking: bool | None, prompt: str):
    renderer = FAMILIES[name].renderer().with_thinking(thinking)
    assert renderer._tokenizer.decode(list(renderer.generation_prompt)) == prompt
    assert renderer.opens_thinking is prompt.endswith("<think>")
    whole = renderer._tokenizer.apply_chat_template(
        [{"role": "user", "content": "b"}], tokenize=False, add_generation_prompt=True,
        **({} if thinking is None else {"enable_thinking": thinking}),
    )  # fmt: skip
    assert whole.endswith(prompt)
    assert renderer.with_thinking(thinking) is renderer


def test_what_is_said_stands_behind_the_thinking(family, family_renderer):
    said = split_thinking(family.reply(TURNS[2]), family_renderer.opens_thinking)[1]
    assert said is not None
    assert said.startswith("Repairing it.")


class Thinker(ReleasedEngine):
    """Ends its replies as its family does where the user speaks next."""

    family = FAMILIES["glm-4.6"]

    async def generate(self, request: Any) -> Any:
        done = await super().generate(request)
        end = self._renderer._tokenizer.convert_tokens_to_ids(self.family.after_text)
        if done.finish_reason == "stop":
            done.token_ids[-1] = end
        return done


@pytest.mark.parametrize("name", ["qwen3", "glm-4.6", "glm-4.7"])
def test_a_rollout_with_thinking_acts_and_compacts_on_what_was_said(name: str):
    family = FAMILIES[name]
    think = family.thought("let me see")
    actions = iter([think + "cat a", "<think>and on and on", *[think + "cat b"] * 40])
    tries = iter(["<think>never ends", *[think + "out a at b"] * 9])
    rollout, engine = play(
        lambda r: next(tries) if r.kind == "summary" else next(actions),
        settings=small_settings(window=900, threshold=500, max_response=200, summary_cap=120, max_turns=14, cap=9),
        task=FilesTask(files={"a": "go on with b " * 8, "b": "<|user|><|im_end|></tool_response>" * 3}),
        renderer=family.renderer(), engine=type("Its", (Thinker,), {"family": family}),
    )  # fmt: skip
    assert rollout.outcome.stop_reason == "max_turns", rollout.outcome
    assert rollout.turns[0].observation.startswith("go on with b")
    assert "is not closed by </think>" in rollout.turns[1].observation
    assert rollout.n_compactions >= 1
    assert rollout.compactions[0].summary == "out a at b"
    assert rollout.compactions[0].discarded == ("<think>never ends",)
    sampled = np.concatenate([s.token_ids[s.optimized] for s in rollout.segments]).tolist()
    kept = [c.token_ids.tolist() for c in engine.completions]
    del kept[next(i for i, r in enumerate(engine.requests) if r.kind == "summary")]  # the one that was discarded
    assert sampled == [i for ids in kept for i in ids]


def test_a_rollout_renders_as_its_settings_say_of_thinking():
    _, engine = play(
        lambda r: "exit",
        settings=small_settings(window=900, threshold=99, thinking=False),
        renderer=FAMILIES["qwen3"].renderer(),
    )
    text = FAMILIES["qwen3"].tokenizer().decode(engine.requests[0].prompt_ids)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
