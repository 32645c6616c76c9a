from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.prefect_server import PrefectServer
from flows.services import Home, Services, sqlite_uri
from tasks.errors import UserError
from tasks.processes import ProcessId, stop_process

CONFIGURED = "import json; from flows.services import configured_prefect; print(json.dumps(configured_prefect()))"


def configured(folder: Path, **environment: str) -> tuple[str, str] | None:
    """What a fresh process in `folder` takes for the user's Prefect."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    root = Path(__file__).parents[2]
    output = subprocess.run(
        [sys.executable, "-c", CONFIGURED],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(root), "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = json.loads(output)
    return tuple(found) if found else None


def test_home_is_the_argument_the_variable_or_beside_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPACTIONRL_HOME", str(tmp_path / "set"))
    assert Home.locate(tmp_path / "given").root == tmp_path / "given"
    assert Home.locate().root == tmp_path / "set"
    monkeypatch.delenv("COMPACTIONRL_HOME")
    assert Home.locate().root == tmp_path / "compactionrl-data"


def test_a_home_hides_from_git_and_is_made_twice_without_harm(tmp_path: Path) -> None:
    home = Home(tmp_path / "a b").create().create()
    assert (home.root / ".gitignore").read_text() == "*\n"
    assert home.mlflow_artifacts.is_dir()


def test_a_home_that_cannot_be_made_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="set COMPACTIONRL_HOME"):
        Home(tmp_path / "file" / "home").create()


def test_prefect_of_the_user_is_found_wherever_it_is_set(tmp_path: Path) -> None:
    assert configured(tmp_path) is None
    (tmp_path / ".prefect").mkdir()
    (tmp_path / ".prefect" / "profiles.toml").write_text(
        'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://a/api"\n[profiles.other]\nPREFECT_API_URL = "b"\n'
    )
    assert configured(tmp_path) == ("http://a/api", "profile mine")
    assert configured(tmp_path, PREFECT_PROFILE="other") == ("b", "profile other")
    (tmp_path / "prefect.toml").write_text('[api]\nurl = "http://c/api"\n')
    assert configured(tmp_path) == ("http://c/api", "prefect.toml")
    assert configured(tmp_path, PREFECT_API_URL="http://d/api") == ("http://d/api", "PREFECT_API_URL")


def test_an_ephemeral_profile_means_no_server_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "profiles.toml").write_text(
        'active = "ephemeral"\n[profiles.ephemeral]\nPREFECT_SERVER_ALLOW_EPHEMERAL_MODE = "true"\n'
    )
    assert configured(tmp_path, PREFECT_PROFILES_PATH=str(tmp_path / "profiles.toml")) is None


def test_the_first_line_says_what_is_used(tmp_path: Path) -> None:
    home = Home(tmp_path)
    local = Services(home, "http://127.0.0.1:1/api", "local server", sqlite_uri(home.mlflow_database), True, None)
    assert local.description == (
        f"Prefect: http://127.0.0.1:1/api (local server) · MLflow: {tmp_path}/mlflow/mlflow.db · Ray: local"
    )
    assert str(home.mlflow_database) in local.how_to_open({})["mlflow"]
    assert f"PREFECT_HOME='{home.prefect}'" in local.how_to_open({})["prefect"]
    theirs = Services(home, "http://p/api", "profile mine", "http://m", False, "10.0.0.1:6379")
    assert theirs.description == (
        "Prefect: http://p/api (profile mine) · MLflow: http://m (MLFLOW_TRACKING_URI) · "
        "Ray: 10.0.0.1:6379 (RAY_ADDRESS)"
    )
    assert theirs.how_to_open({}) == {"mlflow": "http://m", "prefect": "http://p"}


def test_a_recorded_server_counts_only_while_its_very_process_lives(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessId.of(process.pid)
    server = PrefectServer(tmp_path)

    def record(created: float) -> None:
        content = {"host": identity.host, "pid": identity.pid, "created": created}
        server.record.write_text(json.dumps({"name": "x", "url": "http://x/api", "process": content, "log": "x"}))

    record(identity.created)
    assert server.running() is not None
    record(identity.created - 1_000)  # the pid was given to another process
    assert server.running() is None
    record(identity.created)
    stop_process(identity)
    process.communicate()
    assert server.running() is None
    server.record.write_text("{")
    assert server.running() is None


def test_users_that_died_do_not_hold_a_server(tmp_path: Path) -> None:
    server = PrefectServer(tmp_path)
    server.users.mkdir()
    me = ProcessId.current()
    (server.users / "me.json").write_text(json.dumps(vars(me)))
    (server.users / "dead.json").write_text(json.dumps({**vars(me), "created": 1.0}))
    (server.users / "cut.json").write_text("{")
    assert server.live_users() == [me]
    assert [path.name for path in server.users.iterdir()] == ["me.json"]
