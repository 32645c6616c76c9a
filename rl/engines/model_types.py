"""What a model must be to be sampled from. Apart from the engines: a command says it before torch is imported."""

from __future__ import annotations

from rl.errors import UnsupportedModel

SUPPORTED = ("llama", "qwen2", "qwen3")


def check_model_type(model_type: str | None) -> None:
    """Raises UnsupportedModel for a type that the torch engine does not know."""
    if model_type not in SUPPORTED:
        raise UnsupportedModel(
            f"model type {model_type!r} is not supported by the torch engine, which knows {', '.join(SUPPORTED)}; "
            "with other models let vLLM sample: --engine vllm"
        )


def check_length(longest: int, positions: int | None) -> None:
    """Raises UnsupportedModel where windows of up to `longest` tokens do not fit a model that knows `positions`."""
    if positions is not None and longest > positions:
        raise UnsupportedModel(
            f"the model takes {positions} tokens, the longest window is {longest}; lower the windows"
        )
