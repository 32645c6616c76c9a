"""`compactionrl up`: the services of one home in one place, until Ctrl-C. `compactionrl serve`: runs for Prefect.

Each service is a process in a session of its own: a Ctrl-C reaches the command alone, which ends them in order.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import NoReturn

import typer
from filelock import Timeout
from rich.console import Console
from rich.markup import escape

from flows.local_server import LocalServer, free_port, tail
from flows.prefect_server import PrefectServer
from flows.services import (
    Home,
    Services,
    beside_python,
    configured_prefect,
    prefect_server,
    prepare_environment,
    prepare_mlflow,
    services_on,
)
from flows.session import INTERRUPTED, TERMINATED, Terminated, portable_file
from flows.standing import Standing, StandingRecord
from tasks.cluster import OBJECT_STORE_BYTES, make_ray_folder
from tasks.errors import CommandError, UserError
from tasks.processes import ProcessId, stop_process

PREFECT_PORT, MLFLOW_PORT, RAY_PORT, DASHBOARD_PORT, RAY_CLIENT_PORT = 4200, 5000, 6379, 8265, 10001
DASHBOARD_PACKAGES = ("aiohttp_cors", "grpc", "opencensus", "prometheus_client")
CHECK_SECONDS = 0.5
READY = "deployments are registered"
SERVED = "served"
"""What the runner prints when it is, and what it calls its deployments"""
RUNNER_LOGS = {
    "PREFECT_LOGGING_LEVEL": "INFO",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "compactionrl",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
"""Nobody watches a terminal here: what a command prints is shown with the flow run"""
STOP_SECONDS = 60.0
"""A runner ends the runs in progress first, each with its MLflow runs and its Ray"""


@dataclass(frozen=True)
class ServeOptions:
    """What deployments start with."""

    preset: str
    cron: str | None
    limit: int

    def check(self) -> None:
        """Raises UserError for a preset or a schedule that would fail later."""
        from flows.experiment import load_experiment

        load_experiment(self.preset)
        if self.cron is not None:
            from prefect.client.schemas.schedules import CronSchedule

            try:
                CronSchedule(cron=self.cron)
            except ValueError as error:
                raise UserError(
                    f"--cron {self.cron!r} is no schedule; write minute, hour, day, month and weekday, "
                    "for example '0 3 * * *' for every night at 3 (UTC)"
                ) from error


def run_up(home: Home, console: Console, *, ray_dashboard: bool, serve: ServeOptions | None) -> None:
    """Start what is missing, print where it is, wait, stop it. Returns where an `up` runs on the home already."""
    home.create()
    record = StandingRecord(home.root)
    with _ended_in_order(home, console) as stack:
        try:
            stack.enter_context(record.lock.acquire(timeout=0))
        except Timeout:
            _say_that_one_is_up(home, record, console)
            return
        prepare_environment(home)
        if serve:
            serve.check()
        for name in record.stop_left_over():
            console.print(f"ended {name}, left over from an `up` that was killed", highlight=False)
        url, servers = _start_services(home, record, stack, ray_dashboard)
        if serve:
            servers.append(stack.enter_context(_running(_start_runner(home, url, serve))))
            servers[-1].wait_until_healthy()
        if standing := record.read():
            _print_links(standing, console)
        if serve:
            _print_served(serve, console)
        console.print("Commands on this home use these. Ctrl-C stops them.", soft_wrap=True)
        _wait(servers)


def run_serve(home: Home, console: Console, serve: ServeOptions) -> None:
    """Serve runs on the Prefect server that is there, until Ctrl-C."""
    if configured_prefect() is None and PrefectServer(home.prefect).running() is None:
        raise CommandError(
            f"no Prefect server runs on {home.root}: start one with `compactionrl up` in another terminal, "
            "or both at once with `compactionrl up --serve`"
        )
    prepare_environment(home)
    serve.check()
    with _ended_in_order(home, console) as stack:
        url, _, server = stack.enter_context(prefect_server(home))
        if server:
            server.wait_until_healthy()
        runner = stack.enter_context(_running(_start_runner(home, url, serve)))
        runner.wait_until_healthy()
        _print_lines({"Prefect": url.removesuffix("/api")}, console)
        _print_served(serve, console)
        console.print("Ctrl-C stops serving.")
        _wait([runner, *([server] if server else [])])


@contextmanager
def _ended_in_order(home: Home, console: Console) -> Iterator[ExitStack]:
    """What is on the stack ends in order on Ctrl-C or TERM, and no second Ctrl-C cuts that short."""
    code = None
    with ExitStack() as stack:
        try:
            yield stack
        except (KeyboardInterrupt, Terminated) as ending:
            code = TERMINATED if isinstance(ending, Terminated) else INTERRUPTED
            console.print("stopping …")
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
    if code is not None:
        if users := PrefectServer(home.prefect).live_users():
            console.print(
                f"stopped; the Prefect server goes on for {len(users)} running commands, the last one ends it"
            )
        else:
            console.print("stopped")
        raise typer.Exit(code)


def _start_services(
    home: Home, record: StandingRecord, stack: ExitStack, ray_dashboard: bool
) -> tuple[str, list[LocalServer]]:
    """Start the services side by side, wait for all, record them. Returns Prefect's API and what to watch."""
    url, origin, prefect = stack.enter_context(prefect_server(home, PREFECT_PORT))
    services = services_on(home, url, origin)
    if ray_dashboard and services.ray_address:
        raise UserError(f"--ray-dashboard starts a Ray of its own, but {services.ray_origin} names one: unset it")
    if ray_dashboard and not all(map(find_spec, DASHBOARD_PACKAGES)):
        raise UserError(f"Ray's dashboard is not installed: {sys.executable} -m pip install 'compactionrl[dashboard]'")
    prepare_mlflow(services)
    standing = Standing(ProcessId.current(), prefect=url.removesuffix("/api"), mlflow=services.mlflow_uri)
    started: list[LocalServer] = []
    if services.mlflow_is_ours:
        started.append(stack.enter_context(_running(_start_mlflow(services))))
        standing = replace(standing, mlflow=started[-1].url)
    if ray_dashboard:
        ray, address = stack.enter_context(_ray_head(home))
        started.append(ray)
        standing = replace(standing, ray_dashboard=ray.url, ray_address=address)
    stack.callback(record.remove)
    standing = replace(standing, servers=tuple(started))
    record.write(standing)
    watched = [*([prefect] if prefect else []), *started]
    for server in watched:
        server.wait_until_healthy()
    record.write(replace(standing, ready=True))
    return url, watched


def _start_mlflow(services: Services) -> LocalServer:
    port = free_port(MLFLOW_PORT)
    home = services.home
    command = [
        *(beside_python("mlflow"), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", services.mlflow_uri, "--artifacts-destination", home.mlflow_artifacts.as_uri()),
    ]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # evaluations from its UI: not ours
    log = home.mlflow / "server.log"
    return LocalServer.start("MLflow", command, f"http://127.0.0.1:{port}", log, environment=environment)


@contextmanager
def _ray_head(home: Home) -> Iterator[tuple[LocalServer, str]]:
    """A Ray with its dashboard, and the address at which commands join it. Its token authentication stays on."""
    port, dashboard = free_port(RAY_PORT), free_port(DASHBOARD_PORT)
    folder = make_ray_folder(home.root)
    command = [
        *(beside_python("ray"), "start", "--head", "--block", "--disable-usage-stats", "--log-color", "false"),
        *("--port", str(port), "--ray-client-server-port", str(free_port(RAY_CLIENT_PORT)), "--temp-dir", folder),
        *("--num-cpus", str(os.cpu_count()), "--object-store-memory", str(OBJECT_STORE_BYTES)),
        *("--include-dashboard", "true", "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        url = f"http://127.0.0.1:{dashboard}"
        server = LocalServer.start("Ray", command, url, home.root / "ray.log", environment=environment, health="")
        with _running(server):
            yield server, f"127.0.0.1:{port}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_runner(home: Home, url: str, serve: ServeOptions) -> LocalServer:
    preset = portable_file(serve.preset)
    command = [sys.executable, "-m", "flows.serving", preset, serve.cron or "", str(serve.limit)]
    environment = {**os.environ, **RUNNER_LOGS, "PREFECT_API_URL": url, "COMPACTIONRL_HOME": str(home.root)}
    log = home.prefect / "serve.log"
    return LocalServer.start("the runner", command, "", log, environment=environment, health=READY)


@contextmanager
def _running(server: LocalServer) -> Iterator[LocalServer]:
    try:
        yield server
    finally:
        stop_process(server.process, patience=STOP_SECONDS, head_only=True)


def _wait(servers: Sequence[LocalServer]) -> NoReturn:
    """Until a signal. Raises CommandError when one of them ends by itself."""
    while True:
        for server in servers:
            if not server.running():
                raise CommandError(f"{server.name} ended by itself; its log {server.log} says:\n{tail(server.log)}")
        time.sleep(CHECK_SECONDS)


def _say_that_one_is_up(home: Home, record: StandingRecord, console: Console) -> None:
    standing = record.read()
    state = "is up already" if standing else "is being started in another terminal"
    console.print(f"{escape(str(home.root))} {state}", highlight=False, soft_wrap=True)
    if standing:
        _print_links(standing, console)


def _print_links(standing: Standing, console: Console) -> None:
    _print_lines(standing.links, console)
    if standing.ray_address:
        console.print(
            f"Ray takes jobs at {standing.ray_address} and listens beyond this machine: only who holds its token "
            "(~/.ray/auth_token, or RAY_AUTH_TOKEN) is let in. Keep it to yourself.",
            highlight=False,
            soft_wrap=True,
        )
        console.print("The dashboard asks for that token: `ray get-auth-token` prints it.", highlight=False)


def _print_served(serve: ServeOptions, console: Console) -> None:
    scheduled = f"reproduce is scheduled at {serve.cron} (UTC)" if serve.cron else "nothing is scheduled"
    console.print(
        f"Serving the deployments reproduce/{SERVED} and sweep/{SERVED}, {serve.limit} at a time; {scheduled}. "
        "To start one: Deployments on Prefect's page, then Run → Custom run.",
        highlight=False,
        soft_wrap=True,
    )


def _print_lines(lines: Mapping[str, str], console: Console) -> None:
    width = max(map(len, lines))
    for name, text in lines.items():
        console.print(f"  [bold]{name:<{width}}[/]  {escape(text)}", highlight=False, soft_wrap=True)
