"""Containers that nobody drives any more: removed at their process's end, or by the next process that starts one."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from contextlib import suppress
from typing import Any

import docker
from docker.errors import DockerException, NotFound
from requests.exceptions import RequestException

from evaluation.environments.owners import Owner

log = logging.getLogger(__name__)

OWNER_LABEL = "compactionrl.owner"
"""The process that drives the container"""

_EXIT_SECONDS = 10.0
"""The longest silence of the daemon within one call, while the process ends"""

_reaped = False
_reaping = threading.Lock()


def reap_dead_containers(client: Any) -> int:
    """Removes containers whose driving process on this host is gone, and says how many. Raises docker's errors."""
    reaped = 0
    for container in client.containers.list(all=True, filters={"label": OWNER_LABEL}, ignore_removed=True):
        owner = Owner.parse(container.labels.get(OWNER_LABEL, ""))
        if owner is not None and owner.is_dead():
            with suppress(NotFound):
                container.remove(force=True, v=True)
                reaped += 1
                log.info("removed container %s of process %s, which is gone", container.name, owner.pid)
    return reaped


def _remove_own(environment: dict[str, str]) -> None:
    """At this process's end: containers that no `stop` took away, such as where its caller was cancelled twice.

    `environment` names the daemon, as it did at the first start.
    """
    own = f"{OWNER_LABEL}={Owner.current()}"
    try:
        client = docker.from_env(timeout=_EXIT_SECONDS, environment=environment)
        for container in client.containers.list(all=True, filters={"label": own}, ignore_removed=True):
            with suppress(NotFound):
                container.remove(force=True, v=True)
    except (DockerException, RequestException, OSError) as error:
        log.info("containers of this process may be left behind; the next one removes them: %s", error)


def reap_once(client: Any) -> None:
    """At this process's first start; what cannot be removed stops nobody."""
    global _reaped
    with _reaping:
        if _reaped:
            return
        _reaped = True
        atexit.register(_remove_own, dict(os.environ))
        try:
            reap_dead_containers(client)
        except (DockerException, RequestException) as error:
            log.warning("containers of dead processes cannot be removed: %s", error)
