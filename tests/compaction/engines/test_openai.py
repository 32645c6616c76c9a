"""What an engine makes of the replies of an endpoint, whole and streamed."""

from __future__ import annotations

import numpy as np
import pytest

from compaction.engines.openai import OpenAIEngine
from compaction.engines.paired import PairedEngine
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import TextRenderer
from compaction.protocols import Completion, ContextLengthError, Engine, EngineError, MeasuringEngine, Usage
from compaction.rendering import ChatTemplateRenderer
from tests.compaction.engines.asking import MESSAGES, ask, completed, request, settings, vllm
from tests.compaction.engines.stub_endpoint import (
    DONE,
    USAGE,
    Answer,
    as_json,
    delta,
    refused,
    reply,
    stream,
    usage,
)
from tests.compaction.parts import PLAIN, make_tokenizer

THINKING = "look at a first, then at b, and then decide"


def test_a_reply_is_text_with_as_many_placeholders_as_it_takes_in_the_next_prompt():
    completion, stub = ask([reply("cat a", used=usage(prompt=50, completion=5, cached=16))])
    assert isinstance(completion, Completion)
    assert (completion.text, completion.finish_reason) == ("cat a", "stop")
    assert completion.token_ids.tolist() == [0] * 5
    assert (completion.logprobs.dtype, completion.logprobs.tolist()) == (np.float32, [0.0] * 5)
    assert completion.versions.tolist() == [0] * 5
    assert (completion.prompt_tokens, completion.cached_tokens) == (50, 16)
    assert completion.usage == Usage(50, 5, 16, calls=1, cost=None)
    assert completion.reasoning is None
    assert stub.bodies == [
        {"model": "m", "messages": list(MESSAGES), "max_tokens": 20, "temperature": 1.0, "seed": 7},
    ]


def test_further_fields_go_with_every_request_and_null_leaves_one_out():
    _, stub = ask([reply()], request_extra={"top_p": 0.9, "seed": None, "chat_template_kwargs": {"a": 1}})
    assert stub.bodies[0]["top_p"] == 0.9
    assert stub.bodies[0]["chat_template_kwargs"] == {"a": 1}
    assert "seed" not in stub.bodies[0]


@pytest.mark.parametrize(
    ("finish", "sampled", "expected"),
    [
        ("stop", 5, "stop"), ("length", 20, "length"), ("tool_calls", 5, "stop"), ("function_call", 5, "stop"),
        (None, 5, "stop"), (None, 20, "length"), ("eos_token", 5, "stop"), ("max_output", 20, "length"),
    ],
)  # fmt: skip
def test_reasons_to_finish(finish: str | None, sampled: int, expected: str):
    assert completed([reply(finish=finish, used=usage(completion=sampled))]).finish_reason == expected


def test_contents_that_are_no_plain_text():
    assert completed([reply(None)]).text == ""
    assert completed([reply(None, "tool_calls", tool_calls=[{"id": "1"}])]).text == ""
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "cat "}, {"type": "text", "text": "a"}]
    assert completed([as_json({"choices": [{"message": {"content": parts}, "finish_reason": "stop"}]})]).text == "cat a"


def test_half_a_surrogate_pair_is_no_text_and_two_halves_are():
    assert completed([reply("a\ud83d")]).text == "a\ufffd"
    assert completed([stream(delta("\ud83d"), delta("\ude42", "stop"), DONE)], stream=True).text == "🙂"


def test_messages_may_hold_anything():
    odd = ({"role": "user", "content": 'a\ud83d\u2028\x00"'},)
    _, stub = ask([reply()], asked=request(messages=odd))
    assert stub.bodies[0]["messages"] == list(odd)


# Usage


@pytest.mark.parametrize("used", [{}, {"prompt_tokens": None}, {"prompt_tokens": 0}, {"prompt_tokens": "many"}])
def test_without_usage_the_text_is_counted_and_nothing_is_learned(used):
    renderer = TextRenderer()
    completion = completed([reply("cat a file", used=used)], renderer=renderer)
    assert completion.prompt_tokens == 0, "the loop keeps its own count"
    assert len(completion.token_ids) == 4
    assert completion.usage == Usage(40, 4, 0, calls=1, cost=None)
    assert renderer.chars_per_token == 3.0


def test_cost_counts_cached_tokens_at_their_own_price():
    prices = {"price_input": 2.0, "price_cached": 0.5, "price_output": 10.0}
    used = usage(prompt=1000, completion=100, cached=600)
    cost = completed([reply(used=used)], **prices).usage.cost
    assert cost == pytest.approx((400 * 2.0 + 600 * 0.5 + 100 * 10.0) / 1e6)
    assert completed([reply(used=used)], **{**prices, "price_cached": None}).usage.cost is None
    free = dict.fromkeys(prices, 0.0)
    assert completed([reply(used={})], **free).usage.cost == 0.0, "free without usage too"
    assert completed([reply(used={})], **prices).usage.cost is None


def test_a_broken_servers_counts_break_nothing():
    used = {"prompt_tokens": 10.0, "completion_tokens": 10**15, "prompt_tokens_details": {"cached_tokens": 99}}
    completion = completed([reply("cat a", used=used)])
    assert len(completion.token_ids) == 20, "no more than were asked for"
    assert completion.cached_tokens == 10, "cached tokens are part of the prompt"


# Thinking


@pytest.mark.parametrize(
    ("setting", "expected", "tokens"), [("keep", THINKING, 15), ("drop", None, 3), ("count", None, 15)]
)
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_is_kept_dropped_or_counted(setting: str, expected: str | None, tokens: int, name: str):
    answer = reply("cat a", used=usage(completion=15, reasoning=12), **{name: THINKING})
    completion = completed([answer], reasoning=setting)
    assert (completion.text, completion.reasoning, len(completion.token_ids)) == ("cat a", expected, tokens)


@pytest.mark.parametrize(
    ("content", "text", "thought"),
    [
        (f"<think>{THINKING}</think>\n\ncat a", "cat a", THINKING),
        (f"\n<think>\n{THINKING}\n</think>cat a", "cat a", THINKING),
        (f"{THINKING}</think>\ncat a", "cat a", THINKING),
        (f"<think>{THINKING}", "", THINKING),
        ("echo '<think>a</think>'", "echo '<think>a</think>'", None),
    ],
)
def test_thinking_inside_the_text_is_set_apart(content: str, text: str, thought: str | None):
    completion = completed([reply(content)], reasoning="keep")
    assert (completion.text, completion.reasoning) == (text, thought)


def test_thinking_that_the_server_set_apart_leaves_the_text_alone():
    assert completed([reply("echo </think>", reasoning_content=THINKING)]).text == "echo </think>"


def test_without_a_count_of_the_thinking_its_share_of_the_text_counts():
    said, thought = "a" * 30, "b" * 90
    completion = completed([reply(f"<think>{thought}</think>{said}", used=usage(completion=16))])
    assert len(completion.token_ids) in (4, 5)


def test_thinking_that_the_server_hides_is_not_sent_back():
    used = usage(completion=15, reasoning=12)
    assert len(completed([reply("cat a", used=used)], reasoning="keep").token_ids) == 3
    assert len(completed([reply("cat a", used=used)], reasoning="count").token_ids) == 15


# Token ids


def with_ids(ids: list[int], logprobs: list[float], **message: str) -> Answer:
    choice = {
        "message": {"content": "cat a", **message},
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"token": "x", "logprob": p} for p in logprobs]},
    }
    return as_json({"choices": [choice], "usage": usage(completion=len(ids))})


def test_the_models_own_ids_and_logprobs_where_the_server_gives_them():
    completion, stub = ask([with_ids([5, 6, 2], [-0.5, -1.0, -0.25])], info=vllm())
    assert isinstance(completion, Completion)
    assert (stub.bodies[0]["return_token_ids"], stub.bodies[0]["logprobs"]) == (True, True)
    assert completion.token_ids.tolist() == [5, 6, 2]
    assert completion.logprobs.tolist() == [-0.5, -1.0, -0.25]
    _, other = ask([reply()], info=vllm(gives_token_ids=False))
    assert "return_token_ids" not in other.bodies[0]


def test_logprobs_of_another_distribution_or_number_are_none():
    tempered = completed([with_ids([5, 6], [-0.5, -1.0])], info=vllm(), asked=request(temperature=0.7))
    assert (tempered.token_ids.tolist(), tempered.logprobs.tolist()) == ([5, 6], [0.0, 0.0])
    fewer = completed([with_ids([5, 6], [-0.5])], info=vllm())
    assert (fewer.token_ids.tolist(), fewer.logprobs.tolist()) == ([5, 6], [0.0, 0.0])


def test_ids_of_dropped_thinking_do_not_count():
    answer = with_ids([9] * 12 + [5, 6, 2], [-1.0] * 15, reasoning_content=THINKING)
    assert 0 < len(completed([answer], info=vllm()).token_ids) < 15
    assert len(completed([answer], info=vllm(), reasoning="keep").token_ids) == 15


def test_placeholders_are_no_control_tokens_of_a_real_tokenizer():
    renderer = ChatTemplateRenderer(make_tokenizer(PLAIN), "tokenizer")
    assert 0 in renderer.special_ids
    completion = completed([reply("out a at b")], renderer=renderer)
    assert not renderer.special_ids.intersection(completion.token_ids.tolist())
    counted = completed([reply("out a at b", used={})], renderer=renderer)
    assert len(counted.token_ids) == len(renderer.encode("out a at b"))


# Streams


@pytest.mark.parametrize(
    "answer",
    [
        stream(delta("ca"), delta("t a"), delta(finish="stop"), USAGE, DONE),
        stream(delta("ca"), delta("t a", "stop"), USAGE),
        stream(b": keep-alive\n\n", b"event: x\nid: 1\nrubbish\n", delta("cat a", "stop"), USAGE, DONE, b"data: {"),
        stream(*(bytes([b]) for b in delta("cat a", "stop") + USAGE + DONE)),
        stream((delta("cat a", "stop") + USAGE + DONE).replace(b"\n", b"\r\n")),
        stream((delta("cat a", "stop") + USAGE).rstrip()),
        reply("cat a"),
    ],
    ids=["pieces", "no-done", "keep-alive", "bytes", "crlf", "no-last-newline", "not-streamed"],
)
def test_streams_that_hold_a_whole_reply(answer: Answer):
    completion, stub = ask([answer], stream=True)
    assert isinstance(completion, Completion), completion
    assert (completion.text, len(completion.token_ids), completion.prompt_tokens) == ("cat a", 5, 50)
    assert len(stub.calls) == 1
    assert stub.bodies[0]["stream_options"] == {"include_usage": True}


def test_a_server_that_streams_unasked():
    assert completed([stream(delta("cat a", "stop"), USAGE, DONE)]).text == "cat a"


def test_line_separators_inside_a_streamed_text_end_no_line():
    text = "a\u2028b\x85c"
    piece = delta("@", "stop").replace(b"@", text.encode())
    assert completed([stream(piece, DONE)], stream=True).text == text


def test_streamed_thinking_ids_and_logprobs():
    pieces = [
        delta(fields={"reasoning_content": "hm"}, token_ids=[1], logprobs={"content": [{"logprob": -1.0}]}),
        delta("cat a", "stop", token_ids=[2, 3], logprobs={"content": [{"logprob": -2.0}, {"logprob": -3.0}]}),
        USAGE,
        DONE,
    ]
    completion = completed([stream(*pieces)], stream=True, info=vllm(), reasoning="keep")
    assert (completion.text, completion.reasoning) == ("cat a", "hm")
    assert completion.token_ids.tolist() == [1, 2, 3]
    assert completion.logprobs.tolist() == [-1.0, -2.0, -3.0]


# What never leaves, budgets, pairs


def test_a_request_for_no_token_never_leaves():
    for limit in (0, -5):
        outcome, stub = ask([reply()], asked=request(max_tokens=limit))
        assert isinstance(outcome, ContextLengthError)
        assert stub.calls == []


def test_the_limits_other_name_is_learned_once_and_costs_no_try():
    wanted = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )

    def answer(call):
        return refused(400, wanted, "unsupported_parameter") if "max_tokens" in call.body else reply()

    outcome, stub = ask(answer, attempts=1)
    assert isinstance(outcome, Completion)
    assert [b.get("max_completion_tokens") for b in stub.bodies] == [None, 20]

    outcome, stub = ask([refused(400, wanted)], attempts=3)
    assert isinstance(outcome, EngineError)
    assert (outcome.error_class, len(stub.calls)) == ("bad_request", 2)


def test_an_engine_and_a_pair_are_engines_that_measure():
    engine = OpenAIEngine(settings("http://h/v1"), TextRenderer(), Spending())
    for each in (engine, PairedEngine(engine, engine)):
        assert isinstance(each, Engine)
        assert isinstance(each, MeasuringEngine)


def test_an_error_object_in_a_completions_place():
    outcome, stub = ask([as_json({"error": {"code": 400, "message": "no such field"}})])
    assert isinstance(outcome, EngineError)
    assert (outcome.error_class, len(stub.calls)) == ("bad_request", 1)
    broken = as_json({"choices": [{"error": {"code": 502, "message": "upstream"}, "finish_reason": "error"}]})
    outcome, stub = ask([broken, reply()])
    assert isinstance(outcome, Completion)
    assert len(stub.calls) == 2
