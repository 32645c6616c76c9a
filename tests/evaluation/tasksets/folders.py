"""Task folders made for the tests of loading them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PARTS = {
    "task.toml": "",
    "instruction.md": "Do it.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
}


def make_folder(place: Path, toml: str = "", files: Mapping[str, str | bytes | None] | None = None) -> Path:
    """A task folder with this task.toml; `files` adds or replaces parts, None leaves one out."""
    for name, content in {**PARTS, "task.toml": toml, **(files or {})}.items():
        if content is None:
            continue
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    return place
