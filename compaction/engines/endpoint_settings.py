"""Settings of an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, field_validator, model_validator

from compaction.engines.credentials import authorization, describe_credentials, normal_url, redact, take_userinfo
from compaction.protocols import Usage
from compaction.settings import Settings

_OWN_FIELDS = frozenset({"messages", "model", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options"})
"""Fields of a request that are the engine's: `request_extra` may not set them"""


class EndpointSettings(Settings):
    """Where a model is served, how it is asked, and what it costs.

    A user and password in `base_url` are taken out when the settings are read: they stay in this process's memory and
    are in no dump, message or log. Errors do not show the input for the same reason.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    base_url: str = Field(description="address before /chat/completions, such as http://localhost:8000/v1")
    model: str = Field(min_length=1, description="the model's name, as the server lists it")
    api_key_env: str = Field(
        "OPENAI_API_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="NAME of the environment variable that holds the key; unset for servers that ask for none",
    )
    request_extra: dict[str, Any] = Field(
        default_factory=dict,
        description="further fields of every request, such as top_p; null leaves out a field that the server refuses",
    )
    tokenizer: str | None = Field(None, description="folder of the model's tokenizer, to count tokens with")
    reasoning: Literal["keep", "drop", "count"] = Field(
        "drop",
        description="what the model thinks beside its reply: keep = sent back in later turns; drop = neither sent back "
        "nor counted; count = not sent back but counted in the window (for servers that keep it)",
    )
    stream: bool = Field(False, description="receive replies piece by piece; for gateways that cut long silences")
    timeout: float = Field(600.0, gt=0, description="seconds that one call may take")
    attempts: int = Field(5, ge=1, description="how often a call is tried in all before the trial fails")
    max_wait: float = Field(
        60.0, ge=0, description="most seconds between two tries, even if the server asks for more (Retry-After)"
    )
    price_input: float | None = Field(None, ge=0, description="USD per million prompt tokens; null = unknown")
    price_cached: float | None = Field(
        None, ge=0, description="USD per million prompt tokens served from the server's cache; null = unknown"
    )
    price_output: float | None = Field(None, ge=0, description="USD per million sampled tokens; null = unknown")
    context_length: int | None = Field(
        None, ge=1, description="the server's context length in tokens, where it does not tell"
    )

    @model_validator(mode="before")
    @classmethod
    def _take_secrets(cls, values: Any) -> Any:
        """Before any field is read: an error of any field may show this input."""
        if isinstance(values, dict) and isinstance(values.get("base_url"), str):
            return {**values, "base_url": _without_secrets(values["base_url"])}
        return values

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        url = normal_url(url)
        if "@" in url:
            raise ValueError(
                "the user and password in base_url cannot be read; the form is http://USER:PASSWORD@HOST/v1, with "
                "spaces and quotes as %20, %22 and %27"
            )
        if not re.match(r"https?://", url, re.IGNORECASE):
            raise ValueError("base_url must begin with http:// or https://, such as http://localhost:8000/v1")
        if "?" in url or "#" in url:
            raise ValueError("base_url may have no ? or # part; fields of a request belong in request_extra")
        try:
            parts = urlsplit(url)
            named = bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number, a broken IPv6 address
            named = False
        if not named or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError("base_url is not an address of the form http://HOST:PORT/v1")
        return url

    @field_validator("request_extra")
    @classmethod
    def _leaves_the_engines_fields(cls, extra: dict[str, Any]) -> dict[str, Any]:
        own = sorted(_OWN_FIELDS & extra.keys())
        if own:
            raise ValueError(f"request_extra may not set {', '.join(own)}: the engine sets it")
        try:
            json.dumps(extra, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"request_extra holds what JSON cannot: {error}") from None
        return extra

    @property
    def server_root(self) -> str:
        """Where a server has what is not part of OpenAI's interface: the address without its /v1."""
        return self.base_url.removesuffix("/v1")

    @property
    def priced(self) -> bool:
        """Whether the cost of every call can be known."""
        return None not in (self.price_input, self.price_cached, self.price_output)

    def cost(self, prompt: int, cached: int, completion: int) -> float | None:
        """US dollars for these tokens, `cached` of the prompt's from the server's cache; None if a price is unknown."""
        parts = ((prompt - cached, self.price_input), (cached, self.price_cached), (completion, self.price_output))
        if any(price is None for tokens, price in parts if tokens):
            return None
        return sum(tokens * (price or 0.0) for tokens, price in parts) / 1e6

    def usage(self, prompt: int, cached: int, completion: int) -> Usage:
        """One call that took these tokens."""
        return Usage(prompt, completion, cached, calls=1, cost=self.cost(prompt, cached, completion))

    def headers(self) -> dict[str, str]:
        """Of every call. Holds the key: pass it on, keep it in no variable. Raises EngineError for an unusable key."""
        return {"Content-Type": "application/json", **authorization(self.base_url, self.api_key_env)}

    def credentials(self) -> str:
        """In words, what a call is authorised by."""
        return describe_credentials(self.base_url, self.api_key_env)

    def redact(self, text: str) -> str:
        """`text` without this endpoint's key and password."""
        return redact(text, self.base_url, self.api_key_env)


def _without_secrets(url: str) -> str:
    """No userinfo, and no query (`?key=…`), of which only the `?` is left to be refused."""
    url = take_userinfo(url)
    _, at, address = url.rpartition("@")  # what is left of these is refused, without showing what may be a password
    path, mark, _ = address.partition("?")
    return at + path + mark


def check_thinking(thinking: bool | None, request_extra: str = "request_extra") -> None:
    """Raises ValueError where an agent's settings say whether the model behind an endpoint thinks; `request_extra` is
    how that setting is named to the user."""
    if thinking is not None:
        raise ValueError(
            f"thinking={str(thinking).lower()} needs the chat template, which is the endpoint's own; leave it null, "
            f"and say it to the server: {request_extra}={{chat_template_kwargs: {{enable_thinking: …}}}}"
        )
