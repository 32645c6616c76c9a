"""Task folders made for tests, and the Docker engine that they run on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from evaluation.tasksets.task_folder import TaskFolder

DEFAULT_HOST = "unix:///tmp/compactionrl-docker/docker.sock"
"""Where `.ci/docker-up` puts it"""


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Any]:
    """A client of the engine at DOCKER_HOST or at `DEFAULT_HOST`, which DOCKER_HOST then names."""
    import docker
    from docker.errors import DockerException

    patch = pytest.MonkeyPatch()
    patch.setenv("DOCKER_HOST", os.environ.get("DOCKER_HOST", DEFAULT_HOST))
    try:
        client = docker.from_env(timeout=20)
        client.images.get("local/debian")
    except DockerException as error:
        patch.undo()
        pytest.skip(f"no Docker engine with the image local/debian: {error}; run `. .ci/docker-up`")
    yield client
    client.close()
    patch.undo()


def task_folder(place: Path, files: Mapping[str, str], **settings: Any) -> TaskFolder:
    """A task folder with these files; `settings` as task.toml would give them."""
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return TaskFolder(path=place, name=f"tests/{place.name}", instruction="", checksum="", **settings)
