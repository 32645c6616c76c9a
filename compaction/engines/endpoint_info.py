"""What is known of an endpoint once it was asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Server = Literal["vllm", "sglang", "llama.cpp", "ollama", "openai", "unknown"]


@dataclass(frozen=True)
class EndpointInfo:
    """What an endpoint is and can do; made by `preflight`."""

    model: str
    server: Server
    context_length: int | None
    """Tokens of prompt and reply together; None where neither the server nor the settings tell"""
    gives_token_ids: bool
    """Whether replies come with the model's own token ids and their logprobs"""
    has_tokenizer: bool
    """Whether the server counts chats with the model's own tokenizer and template"""
    gives_usage: bool
    """Whether replies say how many tokens they took"""
    models: tuple[str, ...]
    """What the server lists; empty where it does not"""
