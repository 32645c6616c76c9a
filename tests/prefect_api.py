"""Prefect's API, asked as its own client asks it."""

from __future__ import annotations

from typing import Any

import httpx
from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed


@retry(
    retry=retry_if_result(lambda answer: answer.status_code == 503),
    wait=wait_fixed(0.2),
    stop=stop_after_delay(60),
    retry_error_callback=lambda last: last.outcome.result() if last.outcome else None,
)
def ask_prefect(method: str, address: str, content: Any = None) -> httpx.Response:
    """Again where it answers 503: with SQLite, two that write at once are not both served."""
    return httpx.request(method, address, json=content, timeout=60)
