"""A key and a password are in no text that leaves the engine, whatever the endpoint does with them."""

from __future__ import annotations

import asyncio
import base64
import logging
import traceback
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from compaction.engines.credentials import take_userinfo
from compaction.engines.endpoint_errors import EndpointRefused
from compaction.engines.endpoint_settings import EndpointSettings
from compaction.engines.openai import OpenAIEngine
from compaction.engines.preflight import preflight
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import TextRenderer
from compaction.protocols import EngineError
from compaction.settings import Settings
from tests.compaction.engines.asking import request, settings, vllm
from tests.compaction.engines.stub_endpoint import Answer, Call, StubEndpoint, as_json, refused, reply, stream

KEY = "sk-canary-0123456789"
PASSWORD = "canary/pass@word"
BASIC = base64.b64encode(f"ada:{PASSWORD}".encode()).decode()
SECRETS = (KEY, PASSWORD, "canary%2Fpass%40word", "canary", BASIC)


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    for name in (None, "httpx", "httpcore", "compaction"):
        caplog.set_level(logging.DEBUG, logger=name)
    yield caplog
    clean(caplog.text + "".join(f"{record.__dict__}" for record in caplog.records))


def clean(text: str) -> None:
    for secret in SECRETS:
        assert secret not in text


def clean_error(error: BaseException) -> None:
    """Its own texts, those of what led to it, and all variables of the frames it came through."""
    one: BaseException | None = error
    while one is not None:
        clean(str(one) + repr(one) + repr(vars(one)))
        one = one.__cause__ or one.__context__
    report = traceback.TracebackException.from_exception(error, capture_locals=True)
    clean("".join(line for line in report.format() if "SECRETS" not in line and "tests/" not in line))


def sent_by(call: Call) -> str:
    return call.headers["authorization"].split()[-1]


def echo(call: Call) -> Answer:
    """A server that shows what it was sent."""
    return refused(400, f"bad request with {call.headers} and {sent_by(call)}")


FAULTS = {
    "echo": echo,
    "echo-html": lambda call: Answer(502, f"<html>{call.headers}</html>".encode(), "text/html"),
    "echo-json": lambda call: Answer(200, str(call.headers).encode(), "text/plain"),
    "redirect": lambda call: Answer(302, headers={"Location": f"http://h/?k={sent_by(call)}"}),
    "unauthorized": lambda call: refused(401, f"Incorrect API key provided: {sent_by(call)}"),
    "closes": lambda call: Answer(0),
    "cut": lambda call: Answer(200, b"{", cut=True),
    "half-stream": lambda call: stream(b"data: x\n\n"),
    "refusal": lambda call: reply(None, refusal=f"no: {sent_by(call)}"),
    "slow": lambda call: Answer(200, b"{}", seconds=0.4),
}


def attempt(given: EndpointSettings) -> EngineError:
    async def once() -> EngineError:
        engine = OpenAIEngine(given, TextRenderer(), Spending(), vllm())
        try:
            await engine.measure(request().messages)
            await engine.generate(request())
        except EngineError as error:
            return error
        finally:
            clean(repr(engine) + repr(vars(engine)))
            await engine.aclose()
        raise AssertionError

    return asyncio.run(once())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("by", ["key", "password"])
def test_no_failure_shows_a_secret(fault: str, by: str, logs, monkeypatch):
    monkeypatch.setenv("STUB_KEY", KEY)
    with StubEndpoint(FAULTS[fault]).serving() as stub:
        url = stub.url if by == "key" else stub.url.replace("://", f"://ada:{PASSWORD}@")
        error = attempt(settings(url, timeout=0.2 if fault == "slow" else 10.0, attempts=2))
        with pytest.raises(EndpointRefused) as refusal:
            asyncio.run(preflight(settings(url, timeout=0.2 if fault == "slow" else 10.0, attempts=2)))
    sent = {call.headers["authorization"] for call in (*stub.calls, *stub.others)}
    assert sent == {f"Bearer {KEY}" if by == "key" else f"Basic {BASIC}"}
    clean_error(error)
    clean_error(refusal.value)
    assert error.__context__ is None, "an httpx error would hold the request and its headers"


def test_no_completion_or_settings_show_a_secret(logs, monkeypatch):
    monkeypatch.setenv("STUB_KEY", KEY)
    with StubEndpoint([reply()]).serving() as stub:
        given = settings(stub.url.replace("://", f"://ada:{PASSWORD}@"))

        async def once() -> str:
            engine = OpenAIEngine(given, TextRenderer(), Spending())
            completion = await engine.generate(request())
            await engine.aclose()
            return repr(completion)

        clean(asyncio.run(once()))
    assert given.base_url == stub.url
    clean(repr(given) + str(given) + given.model_dump_json() + str(given.model_dump()))


@pytest.mark.parametrize("value", [f"{KEY}\nX: 1", f"{KEY} x", f"{KEY}é", f"{KEY}\t1"])
def test_a_key_that_no_header_can_hold_is_not_shown(value: str, logs, monkeypatch):
    monkeypatch.setenv("STUB_KEY", value)
    with StubEndpoint([reply()]).serving() as stub:
        error = attempt(settings(stub.url))
        with pytest.raises(EndpointRefused, match="STUB_KEY holds characters that no key has"):
            asyncio.run(preflight(settings(stub.url)))
    assert error.error_class == "authentication"
    assert stub.calls == stub.others == []
    clean_error(error)


def test_a_key_is_read_at_every_call_and_trimmed(monkeypatch):
    with StubEndpoint([as_json({})]).serving() as stub:
        given = settings(stub.url, attempts=1)
        for value in ("one", " two\n", ""):
            monkeypatch.setenv("STUB_KEY", value)
            attempt(given)
    assert [call.headers.get("authorization") for call in stub.calls] == ["Bearer one", "Bearer two", None]


# Settings


class Outer(Settings):
    endpoint: EndpointSettings


@pytest.mark.parametrize(
    "url",
    [
        f"http://ada:{PASSWORD}@host:8000/v1",
        f"http://ada:{PASSWORD}@host:notaport/v1",
        f"ada:{PASSWORD}@host:8000/v1",
        f"ftp://ada:{PASSWORD}@host/v1",
        f"http://ada:{PASSWORD} x@host/v1",
        f'http://ada:{PASSWORD}"@host/v1',
        f"http://host/v1?api_key={KEY}",
        f"http://ada:{PASSWORD}@/v1",
        f"http://:{PASSWORD}@host/v1?x={KEY}",
    ],
)
def test_no_mistake_in_the_settings_shows_a_secret(url: str):
    for made in (
        lambda: EndpointSettings(base_url=url, model="", attempts=0, request_extra={"n": 2}),
        lambda: EndpointSettings(base_url=url),
        lambda: EndpointSettings.model_validate({"base_url": url, "modle": "m"}),
        lambda: Outer.model_validate({"endpoint": {"base_url": url, "model": ""}}),
    ):
        with pytest.raises(ValidationError) as error:
            made()
        clean(str(error.value) + repr(error.value) + str(error.value.errors()) + error.value.json())


@pytest.mark.parametrize(
    ("argument", "cleaned"),
    [
        ("http://ada:pw@host/v1", "http://host/v1"),
        ("--base-url=https://ada:p/w@host:1/v1/", "--base-url=https://host:1/v1/"),
        ("http://token@host", "http://host"),
        ("http://host/v1", "http://host/v1"),
        ("--instruction=see http://host and write to me@host", "--instruction=see http://host and write to me@host"),
        ("me@host", "me@host"),
        ("", ""),
    ],
)
def test_userinfo_is_taken_out_of_any_argument(argument: str, cleaned: str):
    assert take_userinfo(argument) == cleaned


def test_userinfo_taken_from_the_command_line_is_used_by_settings_made_later():
    with StubEndpoint([refused(400, "no")]).serving() as stub:
        url = take_userinfo(stub.url.replace("://", "://ada:p%40w@") + "/")
        attempt(settings(url))
    assert stub.calls[0].headers["authorization"] == "Basic " + base64.b64encode(b"ada:p@w").decode()
