"""Estimates that learn, and a budget that holds."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from compaction.engines.endpoint_errors import EndpointRefused
from compaction.engines.openai import OpenAIEngine
from compaction.engines.paired import PairedEngine
from compaction.engines.spending import Remaining, Spending
from compaction.engines.text_renderer import TextRenderer, count_text, endpoint_renderer
from compaction.protocols import EngineError, Usage
from tests.compaction.engines.asking import ask, completed, request, settings
from tests.compaction.engines.stub_endpoint import StubEndpoint, refused, reply, usage
from tests.compaction.parts import CHATML, make_tokenizer

PRICES = {"price_input": 1.0, "price_cached": 1.0, "price_output": 1.0}


def test_an_estimate_has_a_margin_and_what_a_template_adds():
    renderer = TextRenderer(chars_per_token=3.0)
    assert len(renderer.message("user", "")) == 4
    assert len(renderer.message("user", "a" * 299)) == 110 + 4
    assert count_text(renderer, "a" * 299) == 110
    assert renderer.close([0, 0], "length") == []
    assert len(renderer.generation_prompt) == 4
    assert renderer.decode(renderer.encode("aß漢🙂")) == "aß漢🙂"


@pytest.mark.parametrize("true_ratio", [1.3, 2.0, 3.7, 5.5])
def test_the_ratio_converges_on_what_the_server_counts(true_ratio: float):
    renderer, sizes = TextRenderer(), random.Random(0)
    for _ in range(12):
        characters = sizes.randrange(500, 20_000)
        renderer.learn(characters, round(characters / true_ratio))
    assert renderer.chars_per_token == pytest.approx(true_ratio, rel=0.02)
    text = "x" * 1000
    assert 1.0 <= count_text(renderer, text) / (1000 / true_ratio) <= 1.15


def test_the_ratio_stays_what_a_tokenizer_can_have():
    low, high = TextRenderer(), TextRenderer()
    for _ in range(50):
        low.learn(10, 10_000)
        high.learn(10_000, 1)
        high.learn(0, 5)
        high.learn(5, -3)
    assert (low.chars_per_token, high.chars_per_token) == (1.0, 6.0)


def test_an_engine_learns_from_usage():
    renderer = TextRenderer()
    long = ({"role": "user", "content": "x" * 5000, "reasoning_content": "y" * 1000},)
    for _ in range(3):
        completed([reply(used=usage(prompt=1500 + 8))], renderer=renderer, asked=request(messages=long))
    assert renderer.chars_per_token == pytest.approx(4.0, rel=0.05)


@pytest.mark.slow  # the class of a tokenizer is found by what imports torch
def test_a_tokenizer_folder_counts_in_place_of_an_estimate(tmp_path: Path):
    make_tokenizer(CHATML).save_pretrained(tmp_path)
    renderer = endpoint_renderer(settings("http://h/v1", tokenizer=str(tmp_path)))
    assert renderer.count_source == "tokenizer"
    assert isinstance(endpoint_renderer(settings("http://h/v1")), TextRenderer)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        endpoint_renderer(settings("http://h/v1", tokenizer="nowhere"))


# Spending


def test_a_ledger_by_kind():
    spending = Spending(max_cost=1.0, max_tokens=1000)
    spending.add("execution", Usage(100, 10, 20, 1, 0.25))
    spending.add("summary", Usage(50, 5, 0, 1, 0.5))
    assert spending.total == Usage(150, 15, 20, 2, 0.75)
    assert spending.by_kind["summary"] == Usage(50, 5, 0, 1, 0.5)
    assert spending.remaining == Remaining(0.25, 835)
    spending.check()
    spending.add("summary", Usage(5000, 5, 0, 1, 0.5))
    assert spending.remaining == Remaining(0.0, 0)
    assert Spending().remaining == Remaining(None, None)


@pytest.mark.parametrize(
    ("limits", "says"),
    [({"max_tokens": 100}, r"110 tokens in 2 calls reach max_tokens=100"), ({"max_cost": 0.0001}, r"\$0.0001 for 2")],
)
def test_no_call_is_made_once_a_limit_is_reached(limits, says: str):
    spending = Spending(**limits)
    for _ in range(2):
        completed([reply()], spending=spending, **PRICES)
    outcome, stub = ask([reply()], spending=spending, **PRICES)
    assert isinstance(outcome, EngineError)
    assert (outcome.error_class, stub.calls) == ("budget_exceeded", [])
    with pytest.raises(EngineError, match=says):
        spending.check()


def test_a_limit_stops_tries_too_and_what_they_took_is_known():
    empty = reply()
    empty = type(empty)(200, b'{"choices": [], "usage": {"prompt_tokens": 60, "completion_tokens": 0}}')
    outcome, stub = ask([empty], spending=Spending(max_tokens=100), attempts=9)
    assert isinstance(outcome, EngineError)
    assert (outcome.error_class, len(stub.calls)) == ("budget_exceeded", 2)
    assert outcome.usage == Usage(120, 0, 0, 2, None)


def test_a_cost_limit_needs_prices_and_usage():
    with pytest.raises(EndpointRefused, match=r"max_cost=2 needs .* set price_cached, price_output in USD per million"):
        OpenAIEngine(settings("http://h/v1", price_input=1.0), TextRenderer(), Spending(max_cost=2.0))
    spending = Spending(max_cost=2.0)
    completed([reply(used={})], spending=spending, **PRICES)
    with pytest.raises(EngineError, match="the server did not say what a call took"):
        spending.check()


# Two engines


def test_another_model_writes_the_summaries():
    spending = Spending()

    async def both(actions: str, summaries: str) -> list[str | None]:
        pair = PairedEngine(
            OpenAIEngine(settings(actions, model="actor"), TextRenderer(), spending),
            OpenAIEngine(settings(summaries, model="writer"), TextRenderer(), spending),
        )
        texts = [(await pair.generate(request(kind=kind))).text for kind in ("execution", "summary")]
        assert await pair.measure(request().messages) is None
        await pair.release("r")
        await pair.aclose()
        return texts

    with StubEndpoint([reply("cat a")]).serving() as actor, StubEndpoint([reply("so far")]).serving() as writer:
        assert asyncio.run(both(actor.url, writer.url)) == ["cat a", "so far"]
    assert ([b["model"] for b in actor.bodies], [b["model"] for b in writer.bodies]) == (["actor"], ["writer"])
    assert {kind: usage.calls for kind, usage in spending.by_kind.items()} == {"execution": 1, "summary": 1}


def test_one_engine_serves_many_calls_and_many_event_loops():
    with StubEndpoint([refused(503, "wait", Retry_After="0"), reply()]).serving() as stub:
        engine = OpenAIEngine(settings(stub.url), TextRenderer(), Spending())

        async def many() -> int:
            texts = await asyncio.gather(*(engine.generate(request()) for _ in range(40)))
            await engine.aclose()
            return len(texts)

        assert [asyncio.run(many()) for _ in range(2)] == [40, 40]
    assert len(stub.calls) == 81
