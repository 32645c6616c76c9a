"""Settings of an endpoint: what is put right, what is refused and how."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from compaction.engines.endpoint_settings import EndpointSettings


def test_every_field_is_described():
    assert [name for name, field in EndpointSettings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    "url",
    [
        "http://h:1/v1", " http://h:1/v1/ ", "http://h:1/v1/chat/completions", "http://h:1/v1/completions/",
        "http://h:1/v1/models",
    ],
)  # fmt: skip
def test_copied_addresses_are_put_right(url: str):
    given = EndpointSettings(base_url=url, model="m")
    assert (given.base_url, given.server_root) == ("http://h:1/v1", "http://h:1")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base_url": "localhost:8000/v1"}, "must begin with http://"),
        ({"base_url": "ws://h/v1"}, "must begin with http://"),
        ({"base_url": ""}, "must begin with http://"),
        ({"base_url": "http://"}, "must begin with http://"),
        ({"base_url": "http://h:99999/v1"}, "http://HOST:PORT"),
        ({"base_url": "http://h:port/v1"}, "http://HOST:PORT"),
        ({"base_url": "http://[::1/v1"}, "http://HOST:PORT"),
        ({"base_url": "http://a b/v1"}, "http://HOST:PORT"),
        ({"base_url": "http://h/v1?key=1"}, "no [?] or # part"),
        ({"base_url": 7}, "string"),
        ({"api_key_env": "sk-123"}, "pattern"),
        ({"request_extra": {"max_tokens": 3}}, "may not set max_tokens"),
        ({"request_extra": {"n": 3, "stream": True}}, "may not set n, stream"),
        ({"request_extra": {"a": float("nan")}}, "what JSON cannot"),
        ({"request_extra": {"a": {1, 2}}}, "what JSON cannot"),
        ({"attempts": 0}, "greater than or equal to 1"),
        ({"price_input": -1}, "greater than or equal to 0"),
        ({"reasoning": "yes"}, "'keep', 'drop' or 'count'"),
        ({"modle": "m"}, "modle"),
    ],
)
def test_mistakes_are_refused(changes, says: str):
    with pytest.raises(ValidationError, match=says):
        EndpointSettings.model_validate({"base_url": "http://h/v1", "model": "m", **changes})
