"""What differs between two nested settings, leaf by leaf."""

from __future__ import annotations

from typing import Any

MISSING = "(unset)"


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`ppo.steps 40 → 20` for each leaf that differs."""
    before, after = flatten(old), flatten(new)
    return [
        f"{name} {_show(before.get(name, MISSING))} → {_show(after.get(name, MISSING))}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name, MISSING) != after.get(name, MISSING)
    ]


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings to dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict) and item:
            flat |= flatten(item, f"{name}.")
        else:
            flat[name] = item
    return flat


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
