"""Ray for one run: ours comes and goes without a trace, the user's is joined and left running."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("ray")
ROOT = Path(__file__).parents[2]

OURS = """
import json, os, signal, sys
from pathlib import Path
from tasks.cluster import Cluster

def terminate(number, frame): ...

signal.signal(signal.SIGTERM, terminate)
logs = Path(sys.argv[1])
cluster = Cluster(None, "test", logs)
cluster.close()
said = {"closing what never started does nothing": not logs.exists()}
cluster.ensure()
cluster.ensure()
import ray
folder = Path(cluster._temporary)
said["it runs"] = ray.is_initialized() and folder.is_dir()
said["SIGTERM after the start"] = signal.getsignal(signal.SIGTERM) is terminate
said["sockets fit"] = len(ray._private.worker._global_node.raylet_socket_name) < 100
said["token"] = os.environ.get("RAY_AUTH_MODE", "token")
cluster.close()
cluster.close()
said["SIGTERM after the end"] = signal.getsignal(signal.SIGTERM) is terminate
said["it ended"] = not ray.is_initialized()
said["folder gone"] = not folder.exists()
said["logs"] = sorted(path.name for path in (logs / "ray").iterdir())
print(json.dumps(said))
"""

JOINED = """
import json, sys
from pathlib import Path
from tasks.cluster import Cluster

cluster = Cluster(sys.argv[2], "test", Path(sys.argv[1]))
cluster.ensure()
import ray

@ray.remote(num_cpus=0)
def double(x):
    return 2 * x

said = {"answer": ray.get(double.remote(21)), "address": ray.get_runtime_context().gcs_address}
cluster.close()
print(json.dumps(said | {"logs": Path(sys.argv[1]).exists()}))
"""

FAILED = """
import sys, psutil
from pathlib import Path
from tasks import cluster
from tasks.errors import CommandError

cluster.OBJECT_STORE_BYTES = 1
ours = cluster.Cluster(None, "test", Path(sys.argv[1]))
try:
    ours.ensure()
except CommandError as error:
    print(error)
ours.close()
_, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=20)
left = [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
assert not left, [p.cmdline() for p in left]
assert ours._temporary is None
"""

REFUSED = """
import os, sys
os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = "2"
os.environ["RAY_gcs_server_request_timeout_seconds"] = "2"
from pathlib import Path
from tasks.cluster import Cluster
from tasks.errors import CommandError

try:
    Cluster("127.0.0.1:9", "test", Path(sys.argv[1])).ensure()
except CommandError as error:
    print(error)
"""


def said(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_our_cluster_keeps_signal_handlers_leaves_its_logs_and_nothing_else(tmp_path: Path) -> None:
    report = json.loads(said(OURS, tmp_path / "logs"))
    logs = report.pop("logs")
    assert any(name.startswith("raylet") for name in logs)
    assert report.pop("token") == "token"
    assert {name for name, holds in report.items() if not holds} == set()


def test_the_users_cluster_is_joined_and_left_running(ray_cluster: Any, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    for _ in range(2):
        report = json.loads(said(JOINED, tmp_path / "logs", address))
        assert report == {"answer": 42, "address": address, "logs": False}
    assert ray.get(ray.remote(num_cpus=0)(lambda: "still here").remote()) == "still here"


def test_an_address_without_ray_is_one_message(tmp_path: Path) -> None:
    message = said(REFUSED, tmp_path / "logs")
    assert message.startswith("Ray did not start (")
    assert "127.0.0.1:9" in message
    assert message.endswith("or set RAY_ADDRESS to a running cluster")


def test_a_start_that_fails_is_one_message_and_leaves_nothing(tmp_path: Path) -> None:
    message = said(FAILED, tmp_path / "logs")
    assert message.startswith("Ray did not start (ValueError: ")
    assert "free memory" in message
