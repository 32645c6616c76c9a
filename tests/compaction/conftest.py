"""Renderers over a small real tokenizer, one per kind of chat template."""

from __future__ import annotations

import pytest

from compaction.rendering import ChatTemplateRenderer
from tests.compaction.parts import CHATML, PLAIN, make_tokenizer


@pytest.fixture(scope="session")
def renderer() -> ChatTemplateRenderer:
    return ChatTemplateRenderer(make_tokenizer(PLAIN))


@pytest.fixture(scope="session")
def chatml_renderer() -> ChatTemplateRenderer:
    return ChatTemplateRenderer(make_tokenizer(CHATML))


@pytest.fixture(scope="session", params=[PLAIN, CHATML], ids=["plain", "chatml"])
def any_renderer(request: pytest.FixtureRequest) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(make_tokenizer(request.param))
