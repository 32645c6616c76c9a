"""Function calls over the wire: sent, read whole and streamed, and answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from compaction.agent import run_rollout
from compaction.engines.openai import OpenAIEngine
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import TextRenderer
from compaction.protocols import Renderer, ToolCall
from compaction.rollout import Rollout
from compaction.scaffolds.tools import NativeTools
from tests.compaction.engines.asking import ask, completed, request, settings, vllm
from tests.compaction.engines.stub_endpoint import (
    DONE,
    USAGE,
    Answer,
    Call,
    Json,
    StubEndpoint,
    as_json,
    delta,
    reply,
    stream,
    usage,
)
from tests.compaction.families import FAMILIES
from tests.compaction.parts import FilesTask, small_settings


def call(name: str, arguments: Any, id: str | None = "c1", **more: Any) -> Json:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": written}, **more}


def cat(*commands: str, id: str = "c1") -> Json:
    return call("execute_commands", {"commands": list(commands)}, id)


COMPLETE = call("task_complete", {}, "c9")
PARTS = [
    {"index": 0, "id": "c1", "type": "function", "function": {"name": "execute_commands", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"commands": ["cat'}},
    {"index": 1, "id": "c2", "type": "function", "function": {"name": "task_complete", "arguments": "{}"}},
    {"index": 0, "function": {"arguments": ' a"]}'}},
]


# One call


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (reply(None, "tool_calls", tool_calls=[cat("cat a")]), [("c1", "execute_commands", '{"commands": ["cat a"]}')]),
        (reply("", "stop", tool_calls=[cat("a", id="x"), cat("b", id="y")]),
         [("x", "execute_commands", '{"commands": ["a"]}'), ("y", "execute_commands", '{"commands": ["b"]}')]),
        (reply(None, "tool_calls", tool_calls=[call("task_complete", "{}", None)]),
         [("call_1", "task_complete", "{}")]),
        (reply(None, "tool_calls", tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}]),
         [("call_1", "f", '{"a": 1}')]),
        (reply("hi", "stop", tool_calls=None), []),
        (reply("hi", "stop", tool_calls=[None, {"function": None}, 3]), []),
        (stream(delta("I look."), *(delta(None, fields={"tool_calls": [part]}) for part in PARTS),
                delta(None, "tool_calls"), USAGE, DONE),
         [("c1", "execute_commands", '{"commands": ["cat a"]}'), ("c2", "task_complete", "{}")]),
        (stream(delta(None, "tool_calls", fields={"tool_calls": [cat("a", id="x"), cat("b", id="y")]}), DONE),
         [("x", "execute_commands", '{"commands": ["a"]}'), ("y", "execute_commands", '{"commands": ["b"]}')]),
    ],
    ids=["one", "two", "no id", "arguments as an object", "none", "broken ones", "in pieces", "whole, not numbered"],
)  # fmt: skip
def test_calls_are_read_whole_and_from_a_stream(answer: Answer, expected: list[tuple[str, str, str]]):
    assert completed([answer]).tool_calls == tuple(ToolCall(*fields) for fields in expected)


def test_a_reply_of_calls_alone_takes_tokens_in_the_next_prompt():
    answer = reply(None, "tool_calls", tool_calls=[cat("cat a")])
    assert len(completed([answer]).token_ids) == 5, "as the server counts"
    unsaid = as_json({"choices": [json.loads(answer.body)["choices"][0]]})
    assert len(completed([unsaid]).token_ids) > 10, "as its text is long"


@pytest.mark.parametrize("tools", [(), NativeTools.tools], ids=["without", "with"])
def test_tools_are_sent_where_the_request_has_some(tools: tuple[Json, ...]):
    _, stub = ask([reply()], asked=request(tools=tools))
    assert stub.bodies[0].get("tools", []) == list(tools)


# Whole rollouts


class Model:
    """Answers from a list of calls, or of whole answers; sums up when asked. Counts what it is sent."""

    def __init__(self, replies: list[Any], streams: bool = False, summary: Answer | None = None) -> None:
        self.left = iter(replies)
        self.streams, self.summary = streams, summary

    def __call__(self, asked: Call) -> Answer:
        _check_protocol(asked.body)
        used = usage(count(asked.body), 20)
        if asked.body["messages"][-1]["content"] == "summarize":
            return self.summary or reply("out a at b", used=used)
        calls = next(self.left, [COMPLETE])
        if isinstance(calls, Answer):
            return calls
        if not self.streams:
            return reply(None, "tool_calls", used, tool_calls=calls)
        pieces = [
            delta(None, fields={"tool_calls": [{**one, "index": number}]}) for number, one in enumerate(calls)
        ]  # fmt: skip
        return stream(*pieces, delta(None, "tool_calls"), DONE)


def _check_protocol(body: Json) -> None:
    """What an endpoint refuses: calls without an answer, answers without a call, arguments that are no object."""
    waiting: list[str] = []
    for message in body["messages"]:
        if message["role"] == "tool":
            assert message["tool_call_id"] == waiting.pop(0)
            continue
        assert not waiting, "every call is answered, in order"
        for one in message.get("tool_calls", []):
            assert isinstance(json.loads(one["function"]["arguments"]), dict)
            waiting.append(one["id"])
    assert not waiting


def count(body: Json) -> int:
    return len(json.dumps([body["messages"], body.get("tools", [])])) // 3


def roll(
    model: Callable[[Call], Answer],
    renderer: Renderer | None = None,
    info: Any = None,
    routes: dict[str, Answer] | None = None,
    **changes: Any,
) -> tuple[Rollout, StubEndpoint, FilesTask]:
    task = FilesTask(files={"a": "go on with b", "b": "the answer is 42 " * 30})
    renderer = renderer or TextRenderer()
    agent = small_settings(**{
        "window": 3000, "threshold": 1100, "max_response": 300, "summary_cap": 100, "cap": 3, "keep_recent": 1,
        **changes,
    }).model_copy(update={"scaffold": "tools"})  # fmt: skip

    async def once(url: str) -> Rollout:
        engine = OpenAIEngine(settings(url, stream=getattr(model, "streams", False)), renderer, Spending(), info)
        try:
            return await run_rollout(task, engine, renderer, agent, seed=1, rollout_id="r")
        finally:
            await engine.aclose()

    with StubEndpoint(model, routes).serving() as stub:
        return asyncio.run(once(stub.url)), stub, task


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_task_is_solved_by_an_endpoints_calls(streams: bool):
    model = Model([[cat("cat a", id="1"), cat("cat b", id="2")], [cat("echo 42 > answer")], [COMPLETE]], streams)
    rollout, stub, task = roll(model)
    assert (rollout.outcome.reward, rollout.outcome.stop_reason) == (1.0, "finished"), rollout.outcome
    assert task.environment.calls == ["start", "cat a", "cat b", "echo 42 > answer", "grade", "stop"]
    assert all(body["tools"] == list(NativeTools.tools) for body in stub.bodies)
    assert "<tools>" not in stub.bodies[0]["messages"][0]["content"]
    sent = stub.bodies[1]["messages"][2:]
    assert [m["role"] for m in sent] == ["assistant", "tool", "tool"]
    assert [one["id"] for one in sent[0]["tool_calls"]] == [m["tool_call_id"] for m in sent[1:]] == ["1", "2"]
    assert sent[1]["content"] == "[exit code 0]\ngo on with b"


def test_malformed_calls_are_answered_by_their_ids_and_sent_back_as_an_object():
    bad = [call("execute_commands", "{", "1"), call("bash", {}, "2"), cat("cat a", id="3")]
    rollout, stub, task = roll(Model([bad, reply("I would run ls."), [COMPLETE]]))
    assert rollout.outcome.stop_reason == "finished", rollout.outcome
    assert task.environment.calls == ["start", "grade", "stop"]
    sent = stub.bodies[1]["messages"][2:]
    assert json.loads(sent[0]["tool_calls"][0]["function"]["arguments"]) == {"malformed": "{"}
    assert ["JSON cannot be read" in sent[1]["content"], "no function 'bash'" in sent[2]["content"]] == [True, True]
    assert sent[3]["content"].startswith("Not run")
    assert [m["role"] for m in stub.bodies[2]["messages"][-2:]] == ["assistant", "user"]
    assert "There is no call in your reply" in stub.bodies[2]["messages"][-1]["content"]


def test_a_cut_reply_is_not_sent_back_with_calls_that_nobody_answers():
    cut = reply(None, "length", tool_calls=[call("execute_commands", '{"comm', "1")])
    rollout, stub, _ = roll(Model([cut, [COMPLETE]]))
    assert rollout.outcome.stop_reason == "finished", rollout.outcome
    assert "cut off" in stub.bodies[1]["messages"][-1]["content"]


def test_calls_that_an_endpoint_leaves_in_the_text_are_run_and_answered_by_the_user():
    text = '<tool_call>{"name": "execute_commands", "arguments": {"commands": ["cat a"]}}</tool_call>'
    rollout, stub, task = roll(Model([reply(text), [COMPLETE]]))
    assert rollout.outcome.stop_reason == "finished", rollout.outcome
    assert "cat a" in task.environment.calls
    assert stub.bodies[1]["messages"][-1] == {
        "role": "user", "content": "<tool_response>\n[exit code 0]\ngo on with b\n</tool_response>"
    }  # fmt: skip


@pytest.mark.parametrize("counted", ["estimate", "tokenizer"])
def test_a_long_rollout_compacts_and_sends_the_same_tools_with_every_request(counted: str):
    model = Model([[cat("cat b", id=f"{n}")] for n in range(16)])
    renderer = FAMILIES["qwen3"].renderer() if counted == "tokenizer" else TextRenderer()
    rollout, stub, _ = roll(model, renderer, max_turns=15)
    assert rollout.outcome.stop_reason == "max_turns", rollout.outcome
    assert rollout.n_compactions >= 1
    assert all(body["tools"] == list(NativeTools.tools) for body in stub.bodies)
    systems = {json.dumps(body["messages"][0]) for body in stub.bodies}
    assert len(systems) == 1
    assert [body["messages"][-1]["content"] for body in stub.bodies].count("summarize") == rollout.n_compactions


def test_a_summary_that_calls_a_function_is_no_summary():
    summary = reply("out a at b", "tool_calls", tool_calls=[COMPLETE])
    rollout, _, _ = roll(Model([[cat("cat b", id=f"{n}")] for n in range(30)], summary=summary))
    assert (rollout.outcome.stop_reason, rollout.outcome.detail) == ("summary_failed", "tool_call")


@pytest.mark.parametrize(
    ("server", "path", "routes"),
    [
        ("vllm", "/tokenize", {"/tokenize": as_json({"count": 200})}),
        ("llama.cpp", "/apply-template",
         {"/apply-template": as_json({"prompt": "p"}), "/tokenize": as_json({"tokens": [1] * 200})}),
    ],
)  # fmt: skip
def test_the_servers_tokenizer_is_told_of_the_tools(server: Any, path: str, routes: dict[str, Answer]):
    info = vllm(server=server, gives_token_ids=False)
    rollout, stub, _ = roll(Model([[cat("cat a")], [COMPLETE]]), info=info, routes=routes)
    assert rollout.count_source == "tokenizer"
    told = [other.body["tools"] for other in stub.others if other.path == path]
    assert told == [list(NativeTools.tools)] * len(told) != []
