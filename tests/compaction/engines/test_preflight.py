"""What an endpoint is found to be, and why one is refused before a job."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from compaction.engines.endpoint_errors import EndpointRefused
from compaction.engines.endpoint_info import EndpointInfo
from compaction.engines.openai import OpenAIEngine
from compaction.engines.preflight import check_window, preflight
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import TextRenderer
from tests.compaction.engines.asking import MESSAGES, settings, vllm
from tests.compaction.engines.stub_endpoint import Answer, Call, Json, StubEndpoint, as_json, refused, reply, usage

HTML = b"<html>Welcome</html>"


def listed(*models: Json) -> Answer:
    return as_json({"object": "list", "data": list(models)})


def look(
    routes: dict[str, Answer], script: list[Answer] | Callable[[Call], Answer] | None = None, **changes: Any
) -> tuple[EndpointInfo, StubEndpoint]:
    with StubEndpoint(script or [reply("ok")], routes).serving() as stub:
        return asyncio.run(preflight(settings(stub.url, **changes), temperature=0.7)), stub


def refusal(routes: dict[str, Answer], script: list[Answer] | None = None, **changes: Any) -> str:
    with StubEndpoint(script or [reply("ok")], routes).serving() as stub, pytest.raises(EndpointRefused) as error:
        asyncio.run(preflight(settings(stub.url, **changes)))
    return str(error.value)


def test_a_vllm_server():
    ids = {"message": {"content": "ok"}, "finish_reason": "stop", "token_ids": [4, 2]}
    routes = {
        "/v1/models": listed({"id": "m", "owned_by": "vllm", "max_model_len": 4096}, {"id": "lora"}),
        "/tokenize": as_json({"count": 12, "max_model_len": 4096, "tokens": [1] * 12}),
    }
    info, stub = look(routes, [as_json({"choices": [ids], "usage": usage(completion=2)})])
    assert info == EndpointInfo("m", "vllm", 4096, True, True, True, ("m", "lora"))
    assert len(stub.calls) == 1, "one reply is paid for"
    assert (stub.bodies[0]["max_tokens"], stub.bodies[0]["temperature"]) == (16, 0.7)
    old, _ = look({"/v1/models": routes["/v1/models"]})
    assert (old.gives_token_ids, old.has_tokenizer) == (False, False), "what it does counts, not its name"


def test_a_llama_cpp_server():
    meta = {"n_ctx_train": 131072}
    routes = {
        "/v1/models": listed({"id": "x.gguf", "aliases": ["m"], "owned_by": "llamacpp", "meta": meta}),
        "/props": as_json({"default_generation_settings": {"n_ctx": 8192}}),
        "/apply-template": as_json({"prompt": "<user>hello<assistant>"}),
        "/tokenize": as_json({"tokens": [1] * 9}),
    }
    info, _ = look(routes)
    assert info == EndpointInfo("m", "llama.cpp", 8192, False, True, True, ("x.gguf",))
    without, _ = look({"/v1/models": routes["/v1/models"]})
    assert (without.context_length, without.has_tokenizer) == (131072, False)


@pytest.mark.parametrize(
    ("entry", "server", "context"),
    [
        ({"owned_by": "sglang", "max_model_len": 999}, "sglang", 999),
        ({"owned_by": "library"}, "ollama", 77),
        ({"owned_by": "openai-internal"}, "openai", 77),
        ({"owned_by": "somebody", "context_length": 555}, "unknown", 555),
        ({"context_window": 444}, "unknown", 444),
        ({"max_model_len": "many"}, "unknown", 77),
    ],
)
def test_other_servers(entry: Json, server: str, context: int):
    info, _ = look({"/v1/models": listed({"id": "m", **entry})}, context_length=77)
    assert (info.server, info.context_length, info.has_tokenizer) == (server, context, False)


def test_ollama_lists_a_model_with_its_tag():
    info, _ = look({"/v1/models": listed({"id": "m:latest", "owned_by": "library"})})
    assert info.server == "ollama"


@pytest.mark.parametrize("answer", [refused(404, "no"), refused(403, "scope"), as_json({"data": None}), as_json([])])
def test_a_server_without_a_list_of_models(answer: Answer):
    info, _ = look({"/v1/models": answer})
    assert (info.models, info.server, info.context_length) == ((), "unknown", None)


def test_a_server_without_usage_is_taken_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        info, _ = look({}, [reply("ok", used={})])
    assert not info.gives_usage
    assert "does not say what a call takes" in caplog.text


def test_the_first_reply_is_booked():
    spending = Spending()
    with StubEndpoint([reply("ok")]).serving() as stub:
        asyncio.run(preflight(settings(stub.url), spending=spending))
    assert (spending.total.calls, spending.total.prompt_tokens) == (1, 50)


def test_what_only_the_first_tries_met_is_no_reason_to_refuse():
    info, stub = look({}, [refused(503, "Loading model"), reply("ok")])
    assert info.gives_usage
    assert len(stub.calls) == 2


# Refused


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EndpointRefused, match=f"Is the server running at http://127.0.0.1:{port}/v1"):
        asyncio.run(preflight(settings(f"http://127.0.0.1:{port}/v1")))


def test_tls_where_there_is_none():
    with (
        StubEndpoint([reply()]).serving() as stub,
        pytest.raises(EndpointRefused, match=f"is it http://127.0.0.1:{stub.port}/v1"),
    ):
        asyncio.run(preflight(settings(stub.url.replace("http:", "https:"))))


def test_keys(monkeypatch):
    assert "no key was sent: STUB_KEY is unset" in refusal({}, [refused(401, "who are you")])
    monkeypatch.setenv("STUB_KEY", "sk-1")
    text = refusal({}, [refused(401, "who are you")])
    assert "the key in STUB_KEY was sent" in text
    assert "api_key_env" in text


def test_models_that_are_not_there():
    models = [{"id": name, "owned_by": "vllm"} for name in ("qwen3-8b", "qwen3-32b", "llama-3")]
    text = refusal({"/v1/models": listed(*models)}, model="qwen3-9b")
    assert "nearest: qwen3-8b" in text
    assert "available: qwen3-8b, qwen3-32b, llama-3" in text
    gateway = [{"id": f"model-{i}"} for i in range(30)]
    text = refusal({"/v1/models": listed(*gateway)}, [refused(404, "no such model")], model="model-99")
    assert "and 10 more" in text
    assert "base_url is right" in refusal({}, [as_json({"detail": "Not Found"}, 404)])


@pytest.mark.parametrize(
    ("routes", "script", "says"),
    [
        ({"/v1/models": Answer(200, HTML, "text/html")}, [reply()], "not as an OpenAI-compatible server"),
        ({}, [Answer(200, HTML, "text/html")], "not as an OpenAI-compatible server"),
        ({}, [refused(402, "no credit")], "add credit"),
        ({}, [refused(400, "Unsupported value: 'temperature'")], "request_extra"),
        ({}, [refused(500, "boom")], "server's log"),
        ({}, [refused(429, "slow down")], "raise attempts"),
        ({}, [refused(400, "maximum context length is 8")], "not even one short message"),
    ],
)
def test_refusals_say_what_to_do(routes, script, says: str):
    assert says in refusal(routes, script)


def test_windows_that_do_not_fit():
    check_window(vllm(context_length=4096), 4096)
    check_window(vllm(context_length=None), 10**9)
    with pytest.raises(EndpointRefused, match=r"window=4097 .* context length 4096 of m; lower --windows"):
        check_window(vllm(context_length=4096), 4097)


# The server's tokenizer


def measured(routes: dict[str, Answer], info: EndpointInfo, times: int = 1) -> tuple[list[int | None], Any, Any]:
    renderer = TextRenderer()

    async def counts(url: str) -> list[int | None]:
        engine = OpenAIEngine(settings(url), renderer, Spending(), info)
        found = [await engine.measure(MESSAGES) for _ in range(times)]
        await engine.aclose()
        return found

    with StubEndpoint([reply()], routes).serving() as stub:
        return asyncio.run(counts(stub.url)), renderer, stub


def test_the_servers_own_count():
    counts, renderer, stub = measured({"/tokenize": as_json({"count": 12})}, vllm())
    assert (counts, renderer.count_source) == ([12], "tokenizer")
    assert stub.others[0].body == {"model": "m", "messages": list(MESSAGES), "add_generation_prompt": False}
    routes = {"/apply-template": as_json({"prompt": "<u>x<a>"}), "/tokenize": as_json({"tokens": [1] * 9})}
    counts, renderer, stub = measured(routes, vllm(server="llama.cpp"))
    assert (counts, renderer.count_source) == ([5], "tokenizer"), "without what opens a reply"
    assert stub.others[1].body["content"] == "<u>x<a>"


@pytest.mark.parametrize(
    "answer", [refused(500, "boom"), Answer(0), Answer(200, HTML, "text/html"), as_json({"count": "x"}), as_json([])]
)
def test_a_tokenizer_that_fails_once_is_not_asked_again(answer: Answer, caplog):
    counts, renderer, stub = measured({"/tokenize": answer}, vllm(), times=3)
    assert (counts, renderer.count_source, len(stub.others)) == ([None] * 3, "estimate", 1)
    assert caplog.text.count("not asked again") == 1


def test_no_tokenizer_is_asked_that_is_not_there():
    counts, renderer, stub = measured({}, vllm(has_tokenizer=False))
    assert (counts, renderer.count_source, stub.others) == ([None], "estimate", [])
