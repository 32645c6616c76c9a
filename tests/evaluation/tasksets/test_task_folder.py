"""Every field of task.toml is honoured or refused by name; nothing is ignored."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from compaction.protocols import EnvironmentFailure, Task
from evaluation.settings import SandboxSettings
from evaluation.tasksets.task_folder import (
    FolderTask,
    HealthCheck,
    TaskFolder,
    TaskFolderError,
    folder_checksum,
    load_task_folder,
    resolve_env,
)
from tests.evaluation.tasksets.folders import make_folder

FULL = """
schema_version = "1.4"
source = "somewhere"
artifacts = ["/logs/artifacts/plot.png", "/app/model.bin"]

[task]
name = "org/clean-up"
version = "2"
description = "Clean up"
authors = [{ name = "Ada", email = "ada@example.org" }]
keywords = ["files"]

[metadata]
difficulty = "easy"
max_turns = 12
anything = { nested = [1, 2] }

[agent]
timeout_sec = 30
user = "agent"
network_mode = "no-network"

[verifier]
timeout_sec = 20.5
user = 1000
environment_mode = "shared"
[verifier.env]
KEY = "${KEY:-none}"

[solution.env]
TOKEN = "${TOKEN}"

[environment]
build_timeout_sec = 60
docker_image = "debian:12"
os = "linux"
cpus = 0.5
memory_mb = 256
storage_mb = 1024
workdir = "/app"
network_mode = "no-network"
gpus = 0
gpu_types = []
mcp_servers = []
[environment.env]
MODE = "test"
[environment.healthcheck]
command = "true"
interval_sec = 1
timeout_sec = 2
start_period_sec = 3
start_interval_sec = 4
retries = 5
"""


def refusal(folder: Path) -> str:
    with pytest.raises(TaskFolderError) as caught:
        load_task_folder(folder)
    message = str(caught.value)
    assert message.startswith(f"task folder {folder}: ")
    assert "\n" not in message
    return message.removeprefix(f"task folder {folder}: ")


# What is honoured


def test_a_folder_with_every_field(tmp_path: Path) -> None:
    folder = load_task_folder(make_folder(tmp_path / "t", FULL))
    assert replace(folder, checksum="", notes=()) == TaskFolder(
        path=tmp_path / "t",
        name="clean-up",
        instruction="Do it.\n",
        checksum="",
        docker_image="debian:12",
        workdir="/app",
        env={"MODE": "test"},
        network="no-network",
        cpus=0.5,
        memory_mb=256,
        storage_mb=1024,
        build_timeout=60.0,
        agent_timeout=30.0,
        agent_user="agent",
        verifier_timeout=20.5,
        verifier_user="1000",
        verifier_env={"KEY": "${KEY:-none}"},
        solution_env={"TOKEN": "${TOKEN}"},
        healthcheck=HealthCheck("true", 1.0, 2.0, 3.0, 4.0, 5),
        max_turns=12,
    )
    assert [note.split()[0] for note in folder.notes] == ["environment.storage_mb", "artifacts:"]
    assert "/app/model.bin" in folder.notes[1]


def test_an_empty_task_toml_leaves_everything_open(tmp_path: Path) -> None:
    folder = load_task_folder(make_folder(tmp_path / "t"))
    assert (folder.name, folder.network, folder.notes) == ("t", "public", ())
    assert (folder.cpus, folder.memory_mb, folder.agent_timeout, folder.verifier_timeout) == (None, None, None, 600.0)


def test_old_spellings_are_honoured_and_noted(tmp_path: Path) -> None:
    toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    folder = load_task_folder(make_folder(tmp_path / "t", toml))
    assert (folder.memory_mb, folder.storage_mb, folder.network) == (2048, 512, "no-network")
    noted = " ".join(folder.notes)
    for old in ("version", "environment.memory", "environment.storage", "environment.allow_internet"):
        assert f"{old} is the old name" in noted
    assert load_task_folder(make_folder(tmp_path / "u", "[environment]\nallow_internet = true")).network == "public"


def test_windows_line_ends_and_a_byte_order_mark_are_read_past(tmp_path: Path) -> None:
    files = {"instruction.md": b"\xef\xbb\xbfOne\r\nTwo\r\n"}
    toml = '\ufeff[task]\r\nname = "a/b"\r\n'
    folder = load_task_folder(make_folder(tmp_path / "t", toml, files))
    assert (folder.name, folder.instruction) == ("b", "One\nTwo\n")


@pytest.mark.parametrize("name", ["with space", "größe-任务", ".hidden", "UPPER", "a'b\"c", "-dash"])
def test_odd_folder_names_work(tmp_path: Path, name: str) -> None:
    task = FolderTask(load_task_folder(make_folder(tmp_path / name)), SandboxSettings())
    assert isinstance(task, Task)
    assert task.id == name
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / task.id).touch()


def test_limits_are_the_lower_of_task_and_settings(tmp_path: Path) -> None:
    folder = load_task_folder(make_folder(tmp_path / "t", "[agent]\ntimeout_sec = 30\n[metadata]\nmax_turns = 4\n"))
    assert FolderTask(folder, SandboxSettings()).limits.deadline_seconds == 30
    limits = FolderTask(folder, SandboxSettings(max_deadline=10)).limits
    assert (limits.max_turns, limits.deadline_seconds) == (4, 10)


# What is refused


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('[[steps]]\nname = "one"', "steps"),
        ('[verifier]\nenvironment_mode = "separate"', "verifier.environment_mode is 'separate'"),
        ("[verifier.environment]\ncpus = 1", "verifier.environment"),
        ('[[verifier.collect]]\ncommand = "x"', "verifier.collect"),
        ('[verifier]\nnetwork_mode = "no-network"', "verifier.network_mode is 'no-network'"),
        ('[environment]\nnetwork_mode = "allowlist"', "environment.network_mode is 'allowlist'"),
        ('[environment]\nallowed_hosts = ["a.org"]', "environment.allowed_hosts"),
        ('[agent]\nallowed_hosts = ["a.org"]', "agent.allowed_hosts"),
        ('[agent]\nnetwork_mode = "no-network"', "agent.network_mode is 'no-network'"),
        ("[environment]\ngpus = 1", "environment.gpus is 1"),
        ('[environment]\ngpu_types = ["H100"]', "environment.gpu_types"),
        ('[environment]\ntpu = { type = "v4", topology = "2x2" }', "environment.tpu"),
        ('[[environment.mcp_servers]]\nname = "x"', "environment.mcp_servers"),
        ('[environment]\nskills_dir = "/skills"', "environment.skills_dir is '/skills'"),
        ('[environment]\nos = "windows"', "environment.os is 'windows'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, toml: str, said: str) -> None:
    message = refusal(make_folder(tmp_path / "t", toml))
    assert said in message
    assert "not supported" in message


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec is 0"),
        ("[verifier]\ntimeout_sec = -1", "verifier.timeout_sec is -1"),
        ("[agent]\ntimeout_sec = inf", "agent.timeout_sec is inf"),
        ("[environment]\ncpus = 0", "environment.cpus is 0"),
        ("[environment]\ncpus = nan", "environment.cpus is nan"),
        ("[environment]\nmemory_mb = 1.5", "environment.memory_mb is 1.5"),
        ('[environment]\nmemory = "2X"', "environment.memory is '2X'"),
        ("[environment]\nmemory = 2", "environment.memory is 2"),
        ('[environment]\nmemory = "1G"\nmemory_mb = 5', "differ; keep memory_mb"),
        ('[environment]\nallow_internet = true\nnetwork_mode = "no-network"', "differ; keep network_mode"),
        ('[environment]\nworkdir = "app"', "environment.workdir is 'app'"),
        ('[environment]\ndocker_image = ""', "environment.docker_image"),
        ('[environment.healthcheck]\ncommand = "x"\nretries = 0', "environment.healthcheck.retries is 0"),
        ("[environment.healthcheck]\nretries = 1", "environment.healthcheck.command is missing"),
        ('schema_version = "2.0"', "schema_version is '2.0'"),
        ('[task]\nname = "no-org"', "task.name is 'no-org'"),
        ('[task]\nname = "a/../b"', "task.name"),
        ("[task]", "task.name is missing"),
        ("[metadata]\nmax_turns = 0", "max_turns is 0"),
        ("[metadata]\nmax_turns = true", "max_turns is True"),
        ("[agent]\nuser = true", "agent.user is True"),
        ("x =", "task.toml is not TOML"),
    ],
)
def test_wrong_values_are_refused_with_field_and_value(tmp_path: Path, toml: str, said: str) -> None:
    assert said in refusal(make_folder(tmp_path / "t", toml))


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[enviroment]\ncpus = 1", "unknown key enviroment; did you mean environment?"),
        ("[agent]\ntimeout = 1", "unknown key agent.timeout; did you mean agent.timeout_sec?"),
        ('[environment.healthcheck]\ncommand = "x"\nretry = 1', "did you mean environment.healthcheck.retries?"),
        ('[task]\nname = "a/b"\nauthors = [{ name = "x", mail = "y" }]', "did you mean task.authors.0.email?"),
        ("[solution]\nqqq = 1", "unknown key solution.qqq (allowed: env)"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(tmp_path: Path, toml: str, said: str) -> None:
    assert said in refusal(make_folder(tmp_path / "t", toml))


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    message = refusal(make_folder(tmp_path / "t", "[agent]\ntimeout_sec = 0\n[environment]\ngpus = 2\n"))
    assert "agent.timeout_sec" in message
    assert "environment.gpus" in message


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("task.toml", "task.toml is missing"),
        ("instruction.md", "instruction.md is missing"),
        ("tests/test.sh", "tests/test.sh is missing"),
        ("environment/Dockerfile", "the folder environment/ with a Dockerfile is missing"),
    ],
)
def test_a_missing_part_is_named(tmp_path: Path, missing: str, said: str) -> None:
    assert said in refusal(make_folder(tmp_path / "t", files={missing: None}))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("steps/one/instruction.md", "x", "steps"),
        ("trajectory.json", "{}", "trajectory"),
        ("environment/docker-compose.yaml", "services: {}", "several containers"),
        ("instruction.md", " \n", "instruction.md is empty"),
        ("instruction.md", b"\xff\xfe", "instruction.md is not UTF-8"),
        ("tests/test.sh", "echo\r\n", "tests/test.sh has Windows line ends"),
        ("solution/solve.sh", b"\xef\xbb\xbfecho\n", "solution/solve.sh has Windows line ends or a byte order mark"),
    ],
)
def test_parts_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    assert said in refusal(make_folder(tmp_path / "t", files={name: content}))


def test_a_ready_image_needs_no_environment_folder(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "t", '[environment]\ndocker_image = "debian:12"\n', {"environment/Dockerfile": None}
    )
    assert load_task_folder(folder).docker_image == "debian:12"


@pytest.mark.parametrize("kind", ["file", "nothing"])
def test_what_is_no_folder_is_said(tmp_path: Path, kind: str) -> None:
    if kind == "file":
        (tmp_path / "t").touch()
    with pytest.raises(TaskFolderError, match="is a file" if kind == "file" else "does not exist"):
        load_task_folder(tmp_path / "t")


# Variables


def test_variables_come_from_the_machine_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "secret")
    monkeypatch.delenv("NOT_GIVEN", raising=False)
    values = {"A": "${GIVEN}", "B": "${NOT_GIVEN:-else}", "C": "plain ${GIVEN}", "D": "${NOT_GIVEN:-}"}
    resolved = {"A": "secret", "B": "else", "C": "plain ${GIVEN}", "D": ""}
    assert resolve_env(values, "task t") == resolved
    with pytest.raises(TaskFolderError, match=r"^task t: not set .*: \$\{NOT_GIVEN\} for F; export it") as caught:
        resolve_env({**values, "F": "${NOT_GIVEN}"}, "task t")
    assert "secret" not in str(caught.value)


def test_a_missing_variable_is_a_failure_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_GIVEN", raising=False)
    folder = load_task_folder(make_folder(tmp_path / "t", '[verifier.env]\nA = "${NOT_GIVEN}"\n'))
    with pytest.raises(EnvironmentFailure, match=r"task t: verifier.env: .*NOT_GIVEN.* for A") as caught:
        FolderTask(folder, SandboxSettings()).open()
    assert caught.value.error_class == "environment_start"


def test_variables_reach_the_sandbox_with_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "value")
    monkeypatch.delenv("NOT_GIVEN", raising=False)
    toml = """
        environment.env.A = "${GIVEN}"
        verifier.env.B = "${GIVEN}"
        solution.env = { C = "${GIVEN}", D = "${NOT_GIVEN}" }
    """
    task = FolderTask(load_task_folder(make_folder(tmp_path / "t", toml)), SandboxSettings(kind="local"))
    folder = task.open().folder  # type: ignore[attr-defined]
    assert (folder.env, folder.verifier_env) == ({"A": "value"}, {"B": "value"})
    assert folder.solution_env == {"C": "value", "D": "${NOT_GIVEN}"}, "only the solution asks for D"


@pytest.mark.parametrize("toml", ['[environment.env]\nKEY = ["sesame"]', '[environment]\nenv = "sesame"'])
def test_values_of_variables_are_in_no_message(tmp_path: Path, toml: str) -> None:
    message = refusal(make_folder(tmp_path / "t", toml))
    assert "environment.env" in message
    assert "sesame" not in message
    loaded = load_task_folder(make_folder(tmp_path / "u", '[environment.env]\nKEY = "sesame"\n'))
    assert "sesame" not in repr(loaded)


# The checksum


def test_the_checksum_is_of_paths_and_contents(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "t")
    before = folder_checksum(folder)
    (folder / "tests/test.sh").chmod(0o755)
    (folder / "tests/__pycache__").mkdir()
    (folder / "tests/__pycache__/check.pyc").write_bytes(b"x")
    shutil.copytree(folder, tmp_path / "copy")
    assert folder_checksum(folder) == folder_checksum(tmp_path / "copy") == before
    seen = {before}
    (folder / "new").write_text("ab")
    seen.add(folder_checksum(folder))
    (folder / "new").rename(folder / "newa")
    (folder / "newa").write_text("b")
    seen.add(folder_checksum(folder))
    (folder / "newa").unlink()
    (folder / "newa").symlink_to("nowhere")
    seen.add(folder_checksum(folder))
    assert len(seen) == 4
