"""Writing files whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> Path:
    """Writes `text` so that the file is whole or as it was, also after a power cut. Raises OSError (disk full)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
