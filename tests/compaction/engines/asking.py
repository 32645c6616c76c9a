"""One call of an engine against a stub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from compaction.engines.endpoint_info import EndpointInfo
from compaction.engines.endpoint_settings import EndpointSettings
from compaction.engines.openai import OpenAIEngine
from compaction.engines.spending import Spending
from compaction.engines.text_renderer import TextRenderer
from compaction.protocols import Completion, GenerateRequest, Renderer
from tests.compaction.engines.stub_endpoint import Answer, Call, StubEndpoint

MESSAGES = ({"role": "system", "content": "act"}, {"role": "user", "content": "what is in a?"})


def settings(url: str, **changes: Any) -> EndpointSettings:
    """Settings that wait for nothing."""
    given = {"model": "m", "api_key_env": "STUB_KEY", "max_wait": 0.01, "timeout": 10.0, "attempts": 3, **changes}
    return EndpointSettings(base_url=url, **given)


def request(**changes: Any) -> GenerateRequest:
    given: dict[str, Any] = {
        "rollout_id": "r", "prompt_ids": np.zeros(40, np.int32), "max_tokens": 20, "temperature": 1.0,
        "seed": 2**63 + 7, "messages": MESSAGES,
    }  # fmt: skip
    return GenerateRequest(**{**given, **changes})


def ask(
    script: list[Answer] | Callable[[Call], Answer],
    *,
    renderer: Renderer | None = None,
    spending: Spending | None = None,
    info: EndpointInfo | None = None,
    asked: GenerateRequest | None = None,
    **changes: Any,
) -> tuple[Completion | Exception, StubEndpoint]:
    """(completion or what was raised, stub) of one call; `changes` are of the settings."""

    async def once(url: str) -> Completion | Exception:
        engine = OpenAIEngine(settings(url, **changes), renderer or TextRenderer(), spending or Spending(), info)
        try:
            return await engine.generate(asked or request())
        except Exception as error:
            return error
        finally:
            await engine.aclose()

    with StubEndpoint(script).serving() as stub:
        return asyncio.run(once(stub.url)), stub


def completed(*args: Any, **named: Any) -> Completion:
    outcome, _ = ask(*args, **named)
    assert isinstance(outcome, Completion), outcome
    return outcome


def vllm(**changes: Any) -> EndpointInfo:
    given: dict[str, Any] = {
        "model": "m", "server": "vllm", "context_length": 4096, "gives_token_ids": True, "has_tokenizer": True,
        "gives_usage": True, "models": ("m",),
    }  # fmt: skip
    return EndpointInfo(**{**given, **changes})
