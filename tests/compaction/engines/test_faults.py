"""What an endpoint can do wrong: each with its class, its message, and tried again only where that can help."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from compaction.engines import openai
from compaction.engines.openai import OpenAIEngine
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import TextRenderer
from compaction.protocols import Completion, ContextLengthError, EngineError, Usage
from tests.compaction.engines.asking import ask, request, settings
from tests.compaction.engines.stub_endpoint import (
    DONE,
    USAGE,
    Answer,
    StubEndpoint,
    as_json,
    delta,
    event,
    refused,
    reply,
    stream,
    usage,
)

HTML = b"<!DOCTYPE html><html><body><h1>502 Bad Gateway</h1></body></html>"
NO_CHOICES = as_json({"choices": [], "usage": usage()})


def failed(answers: list[Answer], **changes: Any) -> tuple[EngineError, int]:
    """(error, calls)"""
    outcome, stub = ask(answers, **changes)
    assert type(outcome) is EngineError, outcome
    return outcome, len(stub.calls)


# Not tried again


@pytest.mark.parametrize(
    ("answer", "error_class", "says"),
    [
        (refused(401, "Incorrect API key provided"), "authentication", "no key was sent: STUB_KEY is unset"),
        (refused(403, "forbidden"), "authentication", "forbidden"),
        (refused(402, "pay first"), "budget_exceeded", "pay first"),
        (refused(429, "You exceeded your current quota", "insufficient_quota"), "budget_exceeded", "current quota"),
        (refused(429, "quota", None, "insufficient_quota"), "budget_exceeded", "quota"),
        (refused(404, "The model `m` does not exist.", "model_not_found"), "model_not_found", "does not exist"),
        (refused(400, "model 'm' not found, try pulling it first"), "model_not_found", "try pulling it first"),
        (refused(400, "Unsupported value: 'temperature'"), "bad_request", "Unsupported value"),
        (refused(400, "max_tokens=99 cannot be greater than max_model_len=9"), "bad_request", "cannot be greater"),
        (refused(405, "Method Not Allowed"), "bad_request", "HTTP 405"),
        (refused(400, "The response was filtered", "content_filter"), "refusal", "filtered"),
        (as_json({"detail": [{"loc": ["body", "n"], "msg": "too many"}]}, 422), "bad_request", "too many"),
        (as_json({"detail": "Not Found"}, 404), "model_not_found", "Not Found"),
        (as_json({"object": "error", "message": "bad n", "code": 400}, 400), "bad_request", "bad n"),
        (as_json({"error": "plain words"}, 400), "bad_request", "plain words"),
        (as_json([{"error": {"message": "in a list"}}], 400), "bad_request", "in a list"),
        (Answer(301, headers={"Location": "https://h/v1"}), "bad_request", "set base_url to that"),
        (Answer(200, HTML, "text/html"), "bad_request", "web page"),
        (Answer(200, HTML, "application/json"), "bad_request", "web page"),
        (reply("", "content_filter"), "refusal", "content filter"),
        (reply(None, refusal="I cannot help with that"), "refusal", "I cannot help with that"),
    ],
)
def test_what_another_try_cannot_change_is_tried_once(answer: Answer, error_class: str, says: str):
    error, calls = failed([answer, reply()])
    assert (error.error_class, calls) == (error_class, 1)
    assert says in str(error)
    assert "127.0.0.1" in str(error), "names the endpoint"


# Tried again


@pytest.mark.parametrize(
    ("answer", "error_class", "says"),
    [
        (refused(408, "slow"), "engine_timeout", "slow"),
        (refused(409, "conflict"), "server_error", "conflict"),
        (refused(425, "early"), "server_error", "early"),
        (refused(429, "Rate limit reached", "rate_limit_exceeded"), "rate_limit", "Rate limit reached"),
        (refused(500, "boom"), "server_error", "boom"),
        (refused(503, "Loading model"), "server_error", "Loading model"),
        (refused(529, "overloaded"), "server_error", "overloaded"),
        (Answer(502, HTML, "text/html"), "server_error", "502 Bad Gateway"),
        (Answer(504), "server_error", "(empty)"),
        (NO_CHOICES, "server_error", "no choices"),
        (as_json({"object": "x"}), "server_error", "no choices"),
        (as_json("word"), "server_error", "not an object"),
        (as_json({"choices": "word"}), "server_error", "not a list"),
        (as_json({"choices": ["word"]}), "server_error", "not an object"),
        (as_json({"choices": [{"message": "word"}]}), "server_error", "not an object"),
        (as_json({"choices": [{"message": {"content": 7}}]}), "server_error", "neither text"),
        (reply("half", "abort"), "server_error", "abort"),
        (Answer(200, b'{"choices": [', "application/json"), "server_error", "not JSON"),
        (Answer(200, b"ok", "text/plain"), "server_error", "text/plain"),
        (Answer(204, b"", ""), "server_error", "not JSON"),
        (Answer(0), "connection", "RemoteProtocolError"),
        (Answer(200, b'{"choices": ', cut=True), "connection", "RemoteProtocolError"),
        (Answer(200, b"rubbish", headers={"Content-Encoding": "gzip"}), "connection", "DecodingError"),
    ],
)
def test_what_may_pass_is_tried_again_as_often_as_allowed(answer: Answer, error_class: str, says: str):
    error, calls = failed([answer])
    assert (error.error_class, calls) == (error_class, 3)
    assert says in str(error)
    assert "tried 3 times" in str(error)
    outcome, stub = ask([answer, reply()])
    assert isinstance(outcome, Completion)
    assert len(stub.calls) == 2
    assert failed([answer], attempts=1)[1] == 1


@pytest.mark.parametrize(
    ("answer", "error_class", "says"),
    [
        (stream(delta("ca"), cut=True), "connection", "RemoteProtocolError"),
        (stream(delta("ca")), "connection", "ended before the reply did"),
        (stream(), "connection", "ended before the reply did"),
        (stream(USAGE, DONE), "server_error", "no choices"),
        (stream(delta("ca"), b"data: {broken\n\n", delta("t", "stop"), DONE), "server_error", "not JSON"),
        (stream(event({"error": {"message": "overloaded", "code": 503}})), "server_error", "overloaded"),
        (stream(delta("ca"), event({"error": {"message": "boom", "type": "x"}})), "server_error", "boom"),
        (stream(b'error: {"code": 500, "message": "slot lost", "type": "server_error"}\n\n'), "server_error", "slot"),
        (stream(delta("ca"), event("[1]")), "server_error", "not an object"),
    ],
)
def test_broken_streams_are_tried_again(answer: Answer, error_class: str, says: str):
    error, calls = failed([answer], stream=True)
    assert (error.error_class, calls) == (error_class, 3)
    assert says in str(error)
    outcome, _ = ask([answer, stream(delta("cat a", "stop"), USAGE, DONE)], stream=True)
    assert isinstance(outcome, Completion)
    assert outcome.text == "cat a", "nothing of the broken one stays"


def test_a_stream_may_refuse():
    too_long = event({"error": {"message": "This model's maximum context length is 9 tokens.", "code": 400}})
    outcome, _ = ask([stream(too_long)], stream=True)
    assert isinstance(outcome, ContextLengthError)


@pytest.mark.parametrize("stream_it", [False, True])
def test_a_call_may_take_only_so_long(stream_it: bool):
    late = stream(delta("a", "stop"), DONE, seconds=3) if stream_it else reply()
    late = Answer(late.status, late.body, late.kind, pieces=late.pieces, seconds=3)
    outcome, _ = ask([late, reply()], timeout=1, stream=stream_it)
    assert isinstance(outcome, Completion)
    error, calls = failed([late], timeout=1, attempts=1, stream=stream_it)
    assert (error.error_class, calls) == ("engine_timeout", 1)
    assert "no reply within 1 s" in str(error)


def test_someone_elses_timeout_is_not_the_endpoints():
    async def hurried(url: str) -> None:
        engine = OpenAIEngine(settings(url), TextRenderer(), Spending())
        try:
            async with asyncio.timeout(0.05):
                await engine.generate(request())
        finally:
            await engine.aclose()

    slow = Answer(200, b"{}", seconds=0.3)
    with StubEndpoint([slow]).serving() as stub, pytest.raises(TimeoutError):
        asyncio.run(hurried(stub.url))


def lone(url: str, **changes: Any) -> Exception:
    async def once() -> Exception:
        engine = OpenAIEngine(settings(url, **changes), TextRenderer(), Spending())
        try:
            await engine.generate(request())
        except EngineError as error:
            return error
        finally:
            await engine.aclose()
        raise AssertionError

    return asyncio.run(once())


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    error = lone(f"http://127.0.0.1:{port}/v1", attempts=2)
    assert error.error_class == "connection"
    assert f":{port}/v1: ConnectError" in str(error)


def test_https_to_a_server_without_it_is_said_once():
    with StubEndpoint([reply()]).serving() as stub:
        error = lone(stub.url.replace("http://", "https://"), attempts=5)
    assert error.error_class == "connection"
    assert f"is it {stub.url}" in str(error)
    assert "tried" not in str(error)


# Waiting


def gaps(answers: list[Answer], **changes: Any) -> list[float]:
    """Seconds between the calls."""
    outcome, stub = ask(answers, **changes)
    assert isinstance(outcome, Completion)
    times = [call.at for call in stub.calls]
    return [later - sooner for sooner, later in itertools.pairwise(times)]


SOON = 30.0
"""Seconds that no call waits, however busy the machine is, unless it waits for `max_wait` or what it was told"""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hears nothing of when to come back waits for `max_wait`."""
    monkeypatch.setattr(openai, "_FIRST_WAIT", 3_600.0)
    monkeypatch.setattr("random.uniform", lambda low, high: high)


def test_retry_after_is_waited_for(late: None):
    assert gaps([refused(429, "x", Retry_After="0"), reply()], max_wait=60.0)[0] < SOON
    assert 0.2 <= gaps([refused(503, "x", Retry_After="0.2"), reply()], max_wait=60.0)[0] < SOON
    past = format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True)
    assert gaps([refused(429, "x", Retry_After=past), reply()], max_wait=60.0)[0] < SOON


def test_retry_after_is_bounded():
    later = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    for after in ("3600", later):
        assert 0.1 <= gaps([refused(429, "x", Retry_After=after), reply()], max_wait=0.1)[0] < SOON


@pytest.mark.parametrize("after", ["soon", "-5", "nan", "", "inf"])
def test_a_retry_after_that_says_nothing_is_ignored(after: str):
    assert gaps([refused(429, "x", Retry_After=after), reply()], max_wait=60.0)[0] < SOON


# What was spent


def test_tries_that_failed_are_paid_for_too():
    filtered = reply("", "content_filter", used=usage(prompt=10, completion=1))
    spending = Spending()
    outcome, _ = ask([NO_CHOICES, reply(), reply()], spending=spending)
    assert isinstance(outcome, Completion)
    assert outcome.usage == Usage(100, 10, 0, calls=2, cost=None)
    assert spending.total == outcome.usage
    error, _ = failed([NO_CHOICES, filtered])
    assert error.usage == Usage(60, 6, 0, calls=2, cost=None)
    assert failed([refused(500, "boom")])[0].usage is None, "nobody knows"


def test_usage_of_a_stream_that_broke_after_it_was_told():
    broken = stream(event({"choices": [], "usage": usage(prompt=10, completion=1)}), delta("ca"), cut=True)
    error, _ = failed([broken], stream=True, attempts=2)
    assert error.usage == Usage(20, 2, 0, calls=2, cost=None)


# Context length, in the servers' own words

TOO_LONG = [
    "This model's maximum context length is 4096 tokens. However, you requested 5096 tokens (4596 in the messages, 500 "
    "in the completion). Please reduce the length of the messages or completion.",
    "This model's maximum context length is 16384 tokens. However, you requested 8192 output tokens and your prompt "
    "contains at least 8193 input tokens, for a total of at least 16385 tokens.",
    "The decoder prompt (length 88049) is longer than the maximum model length of 32768. Make sure that "
    "`max_model_len` is no smaller than the number of text tokens.",
    "max_tokens must be at least 1, got -186.",
    "max_tokens must be at least 1, got 0.",
    "'max_tokens' or 'max_completion_tokens' is too large: 16384. This model's maximum context length is 65536 tokens "
    "and your request has 52189 input tokens (16384 > 65536 - 52189).",
    "The input (516368 tokens) is longer than the model's context length (262144 tokens).",
    "Requested token count exceeds the model's maximum context length of 64000 tokens. You requested a total of 71897 "
    "tokens: 7897 tokens from the input messages and 64000 tokens for the completion.",
    "Your input exceeds the context window of this model. Please adjust your input and try again.",
    "request (9412 tokens) exceeds the available context size (8192 tokens), try increasing it",
    "the request exceeds the available context size. try increasing the context size or enable context shift",
    "prompt too long; exceeded max context length by 17 tokens",
    "input length exceeds maximum context length",
    "the input length exceeds the context length",
    "prompt is too long: 213462 tokens > 200000 maximum",
]


@pytest.mark.parametrize("said", TOO_LONG)
def test_servers_say_that_a_prompt_is_too_long(said: str):
    forms = [
        refused(400, said),
        as_json({"object": "error", "message": said, "type": "BadRequestError", "code": 400}, 400),
        as_json({"error": said}, 400),
        as_json({"detail": json.dumps({"error": {"message": said}})}, 400),
        refused(500, said),
    ]
    for form in forms:
        outcome, stub = ask([form])
        assert isinstance(outcome, ContextLengthError), outcome
        assert len(stub.calls) == 1
        assert said[:40] in str(outcome)


@pytest.mark.parametrize(
    "answer",
    [
        refused(400, "too much", "context_length_exceeded"),
        refused(400, "too much", 400, "exceed_context_size_error"),
        refused(413, "Request Entity Too Large"),
        Answer(413, HTML, "text/html"),
    ],
)
def test_codes_say_that_a_prompt_is_too_long(answer: Answer):
    assert isinstance(ask([answer])[0], ContextLengthError)


def test_a_rate_limit_in_tokens_and_a_repeated_request_are_no_context_length():
    error, _ = failed([refused(429, "Request too large: reduce the length of the messages (tokens per min)")])
    assert error.error_class == "rate_limit"
    echo = {"detail": [{"msg": "seed: too large", "input": "the log said: maximum context length is 9"}]}
    assert failed([as_json(echo, 422)])[0].error_class == "bad_request"


def test_long_bodies_are_shown_in_part():
    error, _ = failed([Answer(400, b"x" * 5000, "text/plain")])
    assert len(str(error)) < 400
