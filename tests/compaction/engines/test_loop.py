"""Whole rollouts against a server that counts its own tokens and refuses what does not fit."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from compaction.agent import run_rollout
from compaction.engines.endpoint_info import EndpointInfo
from compaction.engines.openai import OpenAIEngine
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import TextRenderer
from compaction.protocols import Renderer
from compaction.rendering import ChatTemplateRenderer
from compaction.rollout import Rollout
from tests.compaction.engines.asking import settings, vllm
from tests.compaction.engines.stub_endpoint import Answer, Call, Json, StubEndpoint, as_json, refused, reply, usage
from tests.compaction.parts import PLAIN, FilesTask, make_tokenizer, small_settings

WINDOW = 600
FILES = {f"f{i}": f"line {i} of the log: " + "all is well here, go on; " * (1 + i % 5) for i in range(40)}
SUMMARY = "out of the log so far: nothing was found, go on"


class Server:
    """Plays a model: reads one file after the other, sums up when asked. Counts 2.4 characters a token."""

    def __init__(self, context: int, reads: int = 24, thinks: str = "") -> None:
        self.context, self.reads, self.thinks = context, reads, thinks
        self.prompts: list[int] = []
        self.refusals = 0
        self._done = 0

    def __call__(self, call: Call) -> Answer:
        prompt = self.count(call.body["messages"])
        if prompt + call.body["max_tokens"] > self.context:
            self.refusals += 1
            return refused(400, f"This model's maximum context length is {self.context} tokens.")
        self.prompts.append(prompt)
        if "summarize" in call.body["messages"][-1]["content"].lower():
            text = SUMMARY
        else:
            text = f"cat f{self._done}" if self._done < self.reads else "exit"
            self._done += 1
        sampled = math.ceil((len(text) + len(self.thinks)) / 2.4) + 1
        used = usage(prompt, sampled, reasoning=math.ceil(len(self.thinks) / 2.4))
        return reply(text, used=used, **({"reasoning_content": self.thinks} if self.thinks else {}))

    def count(self, messages: list[Json]) -> int:
        """A prompt's tokens by this server's own tokenizer and template."""
        return 3 + sum(6 + math.ceil(len(m["content"] + m.get("reasoning_content", "")) / 2.4) for m in messages)


def roll(
    server: Server, renderer: Renderer, info: EndpointInfo | None = None, max_response: int = 60, **changes: Any
) -> tuple[Rollout, StubEndpoint]:
    async def once(url: str) -> Rollout:
        engine = OpenAIEngine(settings(url, **changes), renderer, Spending(), info)
        agent = small_settings(
            window=WINDOW, threshold=220, max_response=max_response, min_response=8, summary_cap=60, cap=6,
            keep_recent=2, max_turns=60,
        )  # fmt: skip
        try:
            return await run_rollout(FilesTask(dict(FILES)), engine, renderer, agent, seed=1, rollout_id="r")
        finally:
            await engine.aclose()

    stub = StubEndpoint(server)
    answer = stub.answer

    def with_tokenizer(call: Call) -> Answer:
        return as_json({"count": server.count(call.body["messages"]) - 3}) if call.path == "/tokenize" else answer(call)

    stub.answer = with_tokenizer  # type: ignore[method-assign]
    with stub.serving():
        return asyncio.run(once(stub.url)), stub


@pytest.mark.parametrize("stream", [False, True])
def test_a_rollout_by_estimates_stays_in_its_window(stream: bool):
    server = Server(context=10**6)
    rollout, _ = roll(server, TextRenderer(), stream=stream)
    assert rollout.outcome.stop_reason == "finished", rollout.outcome
    assert rollout.n_compactions >= 2
    assert rollout.count_source == "estimate"
    assert max(server.prompts) <= WINDOW * 1.02
    assert rollout.usage.calls == len(server.prompts)
    assert rollout.usage.prompt_tokens == sum(server.prompts)


def test_a_window_as_large_as_the_servers_context_gets_through():
    server = Server(context=WINDOW)
    rollout, _ = roll(server, TextRenderer())
    assert rollout.outcome.stop_reason == "finished", rollout.outcome
    assert rollout.n_compactions >= 2
    assert server.refusals <= 2, "an estimate may be too low once, before anything is learned"


def test_a_context_smaller_than_the_window_compacts_by_the_servers_refusals():
    server = Server(context=WINDOW - 150, reads=10)
    rollout, _ = roll(server, TextRenderer(), max_response=150)
    assert server.refusals >= 2
    assert rollout.n_compactions >= 2
    assert rollout.outcome.stop_reason == "finished", rollout.outcome


def test_the_servers_tokenizer_counts_exactly():
    server = Server(context=WINDOW)
    rollout, _ = roll(server, TextRenderer(), vllm(gives_token_ids=False))
    assert (rollout.outcome.stop_reason, rollout.count_source) == ("finished", "tokenizer")
    assert rollout.n_compactions >= 2
    assert server.refusals == 0


def test_a_tokenizer_folder_counts_well_enough():
    server = Server(context=10**6)
    rollout, _ = roll(server, ChatTemplateRenderer(make_tokenizer(PLAIN), "tokenizer"))
    assert (rollout.outcome.stop_reason, rollout.count_source) == ("finished", "tokenizer")
    assert rollout.n_compactions >= 2
    assert all(c.rejected is None for c in rollout.compactions)


@pytest.mark.parametrize("setting", ["keep", "drop", "count"])
def test_thinking_in_a_rollout(setting: str):
    server = Server(context=10**6, reads=12, thinks="let me see which one comes next")
    rollout, stub = roll(server, TextRenderer(), reasoning=setting)
    assert rollout.outcome.stop_reason == "finished", rollout.outcome
    assert max(server.prompts) <= WINDOW * 1.02
    sent = [m for body in stub.bodies for m in body["messages"] if m["role"] == "assistant"]
    assert {m.get("reasoning_content") for m in sent} == {server.thinks if setting == "keep" else None}


def test_a_failure_ends_the_rollout_without_a_reward_and_with_its_class():
    class Broken(Server):
        def __call__(self, call: Call) -> Answer:
            return refused(401, "no") if len(self.prompts) == 3 else super().__call__(call)

    rollout, _ = roll(Broken(10**6), TextRenderer())
    assert (rollout.outcome.reward, rollout.outcome.error_class) == (None, "authentication")
    assert rollout.usage.calls == 3
