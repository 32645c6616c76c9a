"""What every test runs under: offline, single-threaded, with a home of its own and no service of the user's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

HOME = tempfile.mkdtemp(prefix="crl-")  # short: Ray puts sockets below it

os.environ.update(
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    COMPACTIONRL_HOME=HOME,
    PREFECT_PROFILES_PATH=os.path.join(HOME, "profiles.toml"),
)
for name in ("PREFECT_API_URL", "PREFECT_API_KEY", "MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
    os.environ.pop(name, None)

# A shell that starts the tests in the background lets them ignore Ctrl-C, and commands that they start inherit that.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

REQUIRE_ALL = os.environ.get("COMPACTIONRL_REQUIRE_ALL") == "1"
HAS_VLLM = importlib.util.find_spec("vllm") is not None

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _mlflow_of_this_test() -> Iterator[None]:
    """MLflow writes the tracking URI that a test sets into the environment, where commands of later tests find it."""
    yield
    os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One Ray for all tests of a process. Whoever uses it is marked `xdist_group("ray")`, so that one process does."""
    from tasks.cluster import Cluster

    cluster = Cluster(None, "tests", tmp_path_factory.mktemp("logs"))
    cluster.ensure()
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy with tokenizer and prompt pack, on which whole rollouts run."""
    from tests.rl.small import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("small"))


def pytest_unconfigure() -> None:
    shutil.rmtree(HOME, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of vLLM run in the environment that has it (`make test-vllm`), and are no part of the others."""
    if not HAS_VLLM:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: make test-vllm"))


def _may_skip(item: pytest.Item) -> bool:
    return item.get_closest_marker("may_skip") is not None or (
        not HAS_VLLM and item.get_closest_marker("vllm") is not None
    )


def _fail_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: {reason}. With COMPACTIONRL_REQUIRE_ALL=1 nothing may be skipped."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    expected_failure = hasattr(report, "wasxfail")
    if REQUIRE_ALL and report.skipped and not expected_failure and not _may_skip(item):
        _fail_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if REQUIRE_ALL and report.skipped:
        _fail_skipped(report)
    return report
