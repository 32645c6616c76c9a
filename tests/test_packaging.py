"""What is installed, what is pinned, and that the commands the README names exist."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flows.cli import app

ROOT = Path(__file__).parent.parent
PACKAGES = ("compaction", "evaluation", "flows", "rl", "tasks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TASKS = ROOT / "evaluation/tasksets/bench12"
"""Data: Python files below it are what agents and verifiers run, not ours to import"""
EXTRAS = PROJECT["project"]["optional-dependencies"]
OPTIONAL = {
    canonicalize_name(Requirement(line).name)
    for extra in ("lora", "gpu", "cpu-rollout", "harbor")
    for line in EXTRAS[extra]
}
"""Distributions that some modules need and a plain installation lacks"""
PINS = ("constraints.txt", "constraints-gpu.txt")


def shipped_files() -> Iterator[Path]:
    """Every file of the five packages, relative to the root."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT)


def shipped_code() -> Iterator[Path]:
    return (path for path in shipped_files() if path.suffix == ".py" and not (ROOT / path).is_relative_to(TASKS))


def pins(name: str) -> dict[str, str]:
    return dict(line.split("==") for line in (ROOT / name).read_text().splitlines())


# What is installed


def test_every_folder_with_code_is_a_listed_package() -> None:
    folders = {".".join(path.parent.parts) for path in shipped_code()}
    assert sorted(folders) == PROJECT["tool"]["setuptools"]["packages"]


def test_the_wheel_holds_every_file_of_the_packages_and_no_tests(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        licensed = any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert held == {path.as_posix() for path in shipped_files()}
    assert licensed


def test_every_import_is_a_declared_dependency() -> None:
    declared = {canonicalize_name(Requirement(line).name) for line in PROJECT["project"]["dependencies"]}
    homes = importlib.metadata.packages_distributions()
    undeclared = {}
    for path in shipped_code():
        for name in imported_packages(path) - set(PACKAGES) - sys.stdlib_module_names:
            distributions = {canonicalize_name(home) for home in homes.get(name, [name])}
            if not distributions & (declared | OPTIONAL):
                undeclared.setdefault(name, str(path))
    assert not undeclared


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("compaction", {"torch", "transformers", "ray", "prefect", "mlflow"}),
        ("evaluation", {"torch", "transformers", "ray", "prefect", "mlflow"}),
        ("flows.cli", {"torch", "transformers", "ray", "prefect", "mlflow", "pandas"}),
    ],
)
def test_importing_stays_light(package: str, absent: set[str]) -> None:
    prefix = package.split(".")[0]
    modules = [package] if "." in package else sorted(module_names(prefix))
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert not absent & set(loaded.split())


def module_names(package: str) -> set[str]:
    """Modules that a plain installation can import: all but those of an extra."""
    paths = (path for path in shipped_code() if path.parts[0] == package and not imported_packages(path) & OPTIONAL)
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}


def test_files_stay_readable_in_one_sitting() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in shipped_code()}
    long = {path: n for path, n in lengths.items() if n > 400}
    if long:
        warnings.warn(f"files over 400 lines: {long}", stacklevel=1)


# What is pinned


@pytest.mark.parametrize("name", PINS)
def test_pins_are_plain_versions_in_order(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9][0-9a-z.]*", line)] == []
    assert lines == sorted(set(lines))


def test_both_pin_sets_agree() -> None:
    base, gpu = (pins(name) for name in PINS)
    assert {name: (base[name], gpu[name]) for name in base.keys() & gpu.keys() if base[name] != gpu[name]} == {}


@pytest.mark.parametrize(
    ("name", "extras"), [("constraints.txt", ["dev", "harbor"]), ("constraints-gpu.txt", ["gpu", "cpu-rollout", "dev"])]
)
def test_pins_lie_within_the_declared_bounds(name: str, extras: list[str]) -> None:
    pinned = pins(name)
    lines = PROJECT["project"]["dependencies"] + [line for extra in extras for line in EXTRAS[extra]]
    for requirement in map(Requirement, lines):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_what_runs_here_is_what_is_pinned() -> None:
    pinned = pins("constraints.txt")
    for requirement in map(Requirement, PROJECT["project"]["dependencies"] + EXTRAS["dev"]):
        version = importlib.metadata.version(requirement.name).split("+")[0]
        assert requirement.specifier.contains(version), f"{requirement} but {version} is installed"
        if os.environ.get("CI"):
            assert version == pinned[canonicalize_name(requirement.name)], requirement.name


@pytest.mark.parametrize(
    "name", [*PINS, "uv-overrides.txt", "pyproject.toml", "Makefile", ".ci/run", ".ci/make-venv", ".ci/resolve"]
)
def test_no_registry_is_named(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.search(r"https?://|index-url|--find-links", text)


# What the README says


def readme_commands() -> list[list[str]]:
    """Command lines of the README's shell blocks, split into words, without comments and variables before them."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    commands = []
    for line in lines:
        for part in re.split(r"&&|\||;", line):
            words = shlex.split(part, comments=True)
            while words and "=" in words[0]:
                words = words[1:]
            if words:
                commands.append(words)
    return commands


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for words in readme_commands() if words[0] == "make"}
    assert {"reproduce", "test"} <= named <= targets


def test_commands_and_options_of_the_readme_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    seen = set()
    for words in readme_commands():
        if Path(words[0]).name != "compactionrl" or words[1:2] in ([], ["--help"]):
            continue
        assert words[1] in commands, words
        command = commands[words[1]]
        if "commands" in vars(command):  # a group: its own commands follow
            assert words[2] in command.commands, words
            command = command.commands[words[2]]
        options = {option for parameter in command.params for option in parameter.opts}
        used = {word.split("=")[0] for word in words[2:] if word.startswith("-")} - {"--help"}
        assert used <= options, words
        seen.add(words[1])
    assert seen == set(commands), "the README shows every command"


# How it is set up


def run_make_venv(python: Path | str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", ".ci/make-venv", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )


def python_that_fails_on(word: str, path: Path) -> Path:
    path.write_text(f'#!/bin/sh\ncase "$*" in *{word}*) exit 1 ;; esac\nexec {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("word", "said"), [("version_info", "Python 3.11 or newer"), ("ensurepip", "venv module")])
def test_what_is_missing_is_said_in_one_sentence(tmp_path: Path, word: str, said: str) -> None:
    done = run_make_venv(python_that_fails_on(word, tmp_path / "python"), tmp_path / "venv")
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


SKIPS = """
import pytest

@pytest.mark.skip(reason="no such part")
def test_skipped(): ...

@pytest.mark.may_skip
@pytest.mark.skip(reason="another system")
def test_may_skip(): ...

@pytest.mark.xfail(strict=True)
def test_expected(): raise ValueError
"""


@pytest.mark.parametrize(("required", "said"), [("0", "2 skipped, 1 xfailed"), ("1", "1 skipped, 1 xfailed, 1 error")])
def test_a_skip_fails_where_everything_is_required(tmp_path: Path, required: str, said: str) -> None:
    assert said in run_pytest(tmp_path, SKIPS, required)


def test_a_skipped_file_fails_where_everything_is_required(tmp_path: Path) -> None:
    source = "import pytest\npytest.importorskip('no_such_module')\n"
    assert "1 skipped" in run_pytest(tmp_path, source, "0")
    assert "1 error" in run_pytest(tmp_path, source, "1")


def run_pytest(folder: Path, source: str, required: str) -> str:
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = may_skip\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(folder)]
    environment = os.environ | {"COMPACTIONRL_REQUIRE_ALL": required, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout
