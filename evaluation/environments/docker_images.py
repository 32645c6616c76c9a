"""Images of task folders: built once for equal content, or pulled where they are missing."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, BuildError, DockerException, ImageNotFound
from filelock import FileLock, Timeout
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from compaction.protocols import EnvironmentFailure
from evaluation.tasksets.task_folder import TaskFolder

IMAGE_LABEL = "compactionrl.image"
"""On every image built here: `docker image prune --all --filter label=compactionrl.image` removes them"""
_LINES_SHOWN = 20


def image_of(client: docker.DockerClient, folder: TaskFolder, give_up: Callable[[], bool]) -> Any:
    """The image that a task runs in, made if need be. `give_up` says that nobody waits for it any more.

    Raises EnvironmentFailure of class environment_build or environment_start.
    """
    if folder.docker_image is not None:
        return _ready_image(client, folder)
    if not folder.dockerfile.is_file():
        raise EnvironmentFailure(
            f"task {folder.name} has neither environment/Dockerfile in {folder.path} nor a docker_image in task.toml",
            "environment_start",
        )
    tag = f"compactionrl/task:{content_digest(folder.path / 'environment')}"
    if (image := _local(client, tag)) is not None:
        return image
    locks = Path(tempfile.gettempdir()) / f"compactionrl-builds-{os.getuid()}"
    locks.mkdir(exist_ok=True)
    lock = locks / f"{tag.rpartition(':')[2]}.lock"
    try:
        with FileLock(lock, timeout=folder.build_timeout):
            if (image := _local(client, tag)) is not None:
                return image
            _build(client, folder, tag, give_up)
            return client.images.get(tag)
    except Timeout:
        raise EnvironmentFailure(
            f"task {folder.name}: another build of its image holds {lock} for more than {folder.build_timeout:g} s",
            "environment_build",
        ) from None


def content_digest(folder: Path) -> str:
    """Names a folder by what is in it: paths, kinds, permissions, contents."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        link = path.is_symlink()
        content = os.readlink(path).encode() if link else path.read_bytes() if path.is_file() else b""
        mode = 0 if link else path.stat().st_mode
        head = f"{path.relative_to(folder)}\0{'link' if link else oct(mode)}\0{len(content)}\0"
        digest.update(head.encode("utf-8", "surrogateescape") + content)
    return digest.hexdigest()[:24]


def _ready_image(client: docker.DockerClient, folder: TaskFolder) -> Any:
    name = folder.docker_image
    if (image := _local(client, name)) is not None:
        return image
    try:
        return client.images.pull(name)
    except (DockerException, RequestException, HTTPError) as error:
        raise EnvironmentFailure(
            f"task {folder.name}: image {name} is not on this machine and cannot be pulled: {error}; "
            f"try `docker pull {name}`",
            "environment_start",
        ) from None


def _local(client: docker.DockerClient, name: str | None) -> Any | None:
    try:
        return client.images.get(name)
    except ImageNotFound:
        return None


def _build(client: docker.DockerClient, folder: TaskFolder, tag: str, give_up: Callable[[], bool]) -> None:
    """A build that is left is given up by the daemon too, since its connection closes."""
    ends = time.monotonic() + folder.build_timeout
    lines: deque[str] = deque(maxlen=_LINES_SHOWN)

    def failed(why: str) -> EnvironmentFailure:
        shown = "\n".join(lines)
        return EnvironmentFailure(
            f"task {folder.name}: building {folder.dockerfile} {why}\n{shown}".rstrip(), "environment_build"
        )

    try:
        steps = client.api.build(
            path=str(folder.path / "environment"),
            tag=tag,
            rm=True,
            forcerm=True,
            decode=True,
            labels={IMAGE_LABEL: folder.name},
            timeout=folder.build_timeout,  # of one silence; the whole is watched below
        )
        with closing(steps):
            for step in steps:
                lines.extend(str(step.get("stream") or step.get("error") or "").splitlines())
                if "error" in step:
                    raise failed("failed:")
                if time.monotonic() > ends:
                    raise failed(f"did not end within {folder.build_timeout:g} s (build_timeout_sec in task.toml):")
                if give_up():
                    raise failed("was given up:")
    except (RequestException, HTTPError):
        raise failed(f"stopped answering, at most {folder.build_timeout:g} s ago:") from None
    except (BuildError, APIError, TypeError) as error:
        raise failed(f"failed: {error}") from None
