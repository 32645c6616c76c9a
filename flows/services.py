"""Where everything is kept, and the services a run talks to: the user's own first, else local ones.

Nothing here imports Prefect, MLflow or Ray at module level: their environment must be set first.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import httpx

from flows.local_server import LocalServer
from flows.prefect_server import PrefectServer
from flows.standing import StandingRecord
from tasks.errors import CommandError, UserError

LOCAL = "local server"
QUIET_AND_OFFLINE = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",  # DO_NOT_TRACK alone does not stop the server's telemetry
    "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
    "PREFECT_CLIENT_MAX_RETRIES": "3",  # 2, 4 and 8 s: a server that died must not hold a command for minutes
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",  # else a server that died is told of with every single event
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # its tracebacks go to its server; a command says it once
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Home:
    """The folder that holds everything a run leaves behind (`COMPACTIONRL_HOME`, default ./compactionrl-data).

    ```
    compactionrl-data/
      prefect/   prefect.db  server.json  server.log  users/<pid>.json     the shared local Prefect server
      mlflow/    mlflow.db  artifacts/                                     every metric, parameter and artifact
      stages/    <stage>-<digest>/{manifest.json, …}  .work/  .locks/      finished stages, reused by content
      runs/      <time>-<preset>/{run.json, results.json, report.html, logs/}
      jobs/      evaluation jobs on real tasks
    ```
    """

    root: Path

    @classmethod
    def locate(cls, path: str | Path | None = None) -> Home:
        """`path`, else COMPACTIONRL_HOME, else ./compactionrl-data; always absolute."""
        chosen = path or os.environ.get("COMPACTIONRL_HOME") or "compactionrl-data"
        return cls(Path(chosen).expanduser().resolve())

    @property
    def prefect(self) -> Path:
        return self.root / "prefect"

    @property
    def mlflow(self) -> Path:
        return self.root / "mlflow"

    @property
    def mlflow_database(self) -> Path:
        return self.mlflow / "mlflow.db"

    @property
    def mlflow_artifacts(self) -> Path:
        return self.mlflow / "artifacts"

    @property
    def stages(self) -> Path:
        return self.root / "stages"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    def create(self) -> Home:
        """Make the folders. Raises UserError where that is not possible."""
        try:
            for folder in (self.prefect, self.mlflow_artifacts, self.stages, self.runs, self.jobs):
                folder.mkdir(parents=True, exist_ok=True)
            ignore = self.root / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n")
        except OSError as error:
            raise UserError(
                f"cannot write to {self.root} ({error.strerror}): set COMPACTIONRL_HOME to a folder you can write to"
            ) from error
        return self


@dataclass(frozen=True)
class Services:
    """What a run talks to."""

    home: Home
    prefect_url: str
    prefect_origin: str
    """Who chose it: `PREFECT_API_URL`, a profile's name, or `local server`"""
    mlflow_uri: str
    mlflow_is_ours: bool
    ray_address: str | None
    """None: start an own cluster with address="local\""""
    ray_origin: str = "RAY_ADDRESS"

    @property
    def description(self) -> str:
        mlflow = str(self.home.mlflow_database) if self.mlflow_is_ours else f"{self.mlflow_uri} (MLFLOW_TRACKING_URI)"
        ray = f"{self.ray_address} ({self.ray_origin})" if self.ray_address else "local"
        return f"Prefect: {self.prefect_url} ({self.prefect_origin}) · MLflow: {mlflow} · Ray: {ray}"

    @property
    def mlflow_page(self) -> str | None:
        """Where MLflow can be looked at now."""
        if not self.mlflow_is_ours:
            return self.mlflow_uri if self.mlflow_uri.startswith("http") else None
        standing = StandingRecord(self.home.root).read()
        return standing.mlflow if standing else None

    @property
    def prefect_page(self) -> str | None:
        """Where Prefect can be looked at after this command too: a server that it started itself ends with it."""
        if self.prefect_origin != LOCAL:
            return self.prefect_url.removesuffix("/api")
        standing = StandingRecord(self.home.root).read()
        return standing.prefect if standing else None

    def mlflow_run_page(self, experiment_id: str, run_id: str, part: str = "") -> str | None:
        page = self.mlflow_page
        return f"{page}/#/experiments/{experiment_id}/runs/{run_id}{part}" if page else None

    def how_to_open(self, run: Mapping[str, Any]) -> dict[str, str]:
        """How to look at the run that `run` (what run.json holds) records, by service: a link, or a command."""
        mlflow, prefect = self.mlflow_page, self.prefect_page
        if mlflow and (experiment_id := run.get("mlflow_experiment_id")):
            mlflow = self.mlflow_run_page(experiment_id, run["mlflow_run_id"])
        if prefect and (flow_run_id := run.get("prefect_flow_run_id")):
            prefect = f"{prefect}/runs/flow-run/{flow_run_id}"
        return {
            "mlflow": mlflow or f"{beside_python('mlflow')} ui --backend-store-uri '{self.mlflow_uri}' --port 5000",
            "prefect": prefect or f"PREFECT_HOME='{self.home.prefect}' {beside_python('prefect')} server start",
        }


def beside_python(command: str) -> str:
    path = Path(sys.executable).parent / command
    return str(path) if path.exists() else command


def prepare_environment(home: Home) -> None:
    """Set the variables of Prefect, MLflow and Ray that must stand before they are imported."""
    for name, value in QUIET_AND_OFFLINE.items():
        os.environ.setdefault(name, value)
    if configured_prefect() is None:
        os.environ.setdefault("PREFECT_HOME", str(home.prefect))
        os.environ.setdefault("PREFECT_RESULTS_LOCAL_STORAGE_PATH", str(home.prefect / "storage"))  # not below its home


def configured_prefect() -> tuple[str, str] | None:
    """(API url, origin) of the Prefect that the user set up, without importing Prefect."""
    if "prefect" in sys.modules:  # a program that uses this one as a library may have set it there
        from prefect.settings import PREFECT_API_URL

        if current := PREFECT_API_URL.value():
            return current, "PREFECT_API_URL"
    if url := os.environ.get("PREFECT_API_URL"):
        return url, "PREFECT_API_URL"
    return _prefect_toml() or _prefect_profile()


def _prefect_toml() -> tuple[str, str] | None:
    for name, keys in (("prefect.toml", ("api",)), ("pyproject.toml", ("tool", "prefect", "api"))):
        table = _read_toml(Path(name))
        for key in keys:
            table = table.get(key, {})
        if url := table.get("url"):
            return url, name
    return None


def _prefect_profile() -> tuple[str, str] | None:
    folder = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    profiles = _read_toml(Path(os.environ.get("PREFECT_PROFILES_PATH") or folder / "profiles.toml"))
    active = os.environ.get("PREFECT_PROFILE") or profiles.get("active")
    url = profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return (url, f"profile {active}") if url else None


def _read_toml(path: Path) -> dict:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError):  # Prefect itself will say what is wrong with it
        return {}


@contextmanager
def up(home: Home, announce: Callable[[Services], None] = lambda services: None) -> Iterator[Services]:
    """Find or start the services, and leave no process behind. `announce` is told at once, before they are ready.

    A local Prefect server is shared by all commands on this home: the first starts it, the last one out stops it.
    Raises CommandError where a service that the user named does not answer.
    """
    home.create()
    prepare_environment(home)
    with ExitStack() as stack:
        url, origin, server = stack.enter_context(prefect_server(home))
        services = services_on(home, url, origin)
        announce(services)
        prepare_mlflow(services)
        if server:  # the imports above ran while it was starting
            server.wait_until_healthy()
        stack.enter_context(_prefect_at(url))
        yield services


@contextmanager
def prefect_server(home: Home, preferred_port: int = 0) -> Iterator[tuple[str, str, LocalServer | None]]:
    """The API's URL, who chose it, and where it is a local server that one, which may still be starting."""
    if found := configured_prefect():
        url, origin = found
        _require_answer("Prefect", f"{url.rstrip('/')}/health", origin)
        yield url, origin, None
    else:
        with PrefectServer(home.prefect).using(preferred_port) as server:
            yield server.url, LOCAL, server


def services_of_a_deployment(home: Home) -> Services:
    """What a run talks to that a Prefect server started: that server, and the rest as for every command."""
    home.create()
    prepare_environment(home)
    url, origin = configured_prefect() or ("", "")
    services = services_on(home, url, origin)
    prepare_mlflow(services)
    return services


def services_on(home: Home, prefect_url: str, prefect_origin: str) -> Services:
    """The services besides Prefect, as the environment, `compactionrl up` or nobody has chosen them."""
    mlflow_uri = os.environ.get("MLFLOW_TRACKING_URI")
    if mlflow_uri and mlflow_uri.startswith("http"):
        _require_answer("MLflow", f"{mlflow_uri.rstrip('/')}/health", "MLFLOW_TRACKING_URI")
    ray_address, ray_origin = os.environ.get("RAY_ADDRESS") or None, "RAY_ADDRESS"
    if ray_address is None and (standing := StandingRecord(home.root).read()) and standing.ray_address:
        ray_address, ray_origin = standing.ray_address, "compactionrl up"
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # who joins a Ray by its address must say so
    return Services(
        home=home,
        prefect_url=prefect_url,
        prefect_origin=prefect_origin,
        mlflow_uri=mlflow_uri.rstrip("/") if mlflow_uri else sqlite_uri(home.mlflow_database),
        mlflow_is_ours=not mlflow_uri,
        ray_address=ray_address,
        ray_origin=ray_origin,
    )


def prepare_mlflow(services: Services) -> None:
    if services.mlflow_is_ours:
        from tasks.tracking import initialise_database

        initialise_database(services.home.mlflow_database, services.home.mlflow_artifacts)


def sqlite_uri(path: Path) -> str:
    return f"sqlite:///{path}"


@contextmanager
def _prefect_at(url: str) -> Iterator[None]:
    """Point this process, and the processes it starts, at one server."""
    before = os.environ.get("PREFECT_API_URL")
    os.environ["PREFECT_API_URL"] = url
    from prefect.settings import PREFECT_API_URL, temporary_settings

    try:
        with temporary_settings({PREFECT_API_URL: url}):
            try:
                yield
            finally:
                _send_what_is_queued()
    finally:
        if before is None:
            del os.environ["PREFECT_API_URL"]
        else:
            os.environ["PREFECT_API_URL"] = before


def _send_what_is_queued() -> None:
    """Prefect sends logs and events in the background: they must be out before the server goes.

    What a dead server has not taken by then is dropped: at exit Prefect would try every event for seconds.
    """
    from prefect._internal.concurrency.services import _active_services
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    services = list(_active_services)
    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=5)
    for service in services:
        with suppress(Empty):
            while True:
                service._queue.get_nowait()
        service._queue.put_nowait(None)  # the end, for its thread


def _require_answer(service: str, url: str, origin: str) -> None:
    """Any HTTP answer will do: a server that wants a login is still there."""
    try:
        httpx.get(url, timeout=10.0)
    except httpx.InvalidURL as error:
        raise UserError(f"{service}: {origin} holds {url!r}, which is not a URL; correct or unset it") from error
    except httpx.HTTPError as error:
        raise CommandError(
            f"{service} does not answer at {url} (from {origin}: {type(error).__name__}); "
            f"start it, or unset {origin} to use a local one"
        ) from error
