from __future__ import annotations

import io
from pathlib import Path

import pytest
from filelock import FileLock
from rich.console import Console

from flows.cleaning import clean_home, format_bytes
from flows.runs import create_run
from flows.services import Home
from tasks.errors import CommandError


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home").create()
    for name in ("sft-used", "ppo-free", ".work/ppo-begun"):
        folder = home.stages / name
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * 2_048)
    run = create_run(home, "tiny", "c", {})
    run.update(stages=[{"name": "sft", "folder": "sft-used"}], status="ok")
    return home


def clean(home: Home, *, everything: bool = False, dry_run: bool = False) -> tuple[set[str], str]:
    console = Console(width=160, record=True, file=io.StringIO())
    removed = clean_home(home, everything=everything, dry_run=dry_run, yes=True, console=console)
    return {path.name for path in removed}, console.export_text()


def test_stages_that_no_run_uses_and_unfinished_ones_go(home: Home) -> None:
    removed, text = clean(home)
    assert removed == {"ppo-free", "ppo-begun"}
    assert (home.stages / "sft-used").is_dir()
    assert not (home.stages / "ppo-free").exists()
    assert "2 KiB" in text
    assert "removed 2 entries, 4 KiB" in text


def test_a_dry_run_removes_nothing(home: Home) -> None:
    removed, text = clean(home, dry_run=True)
    assert removed == set()
    assert (home.stages / "ppo-free").is_dir()
    assert "would remove 2 entries" in text


def test_a_stage_at_work_stays(home: Home) -> None:
    locks = home.stages / ".locks"
    locks.mkdir()
    with FileLock(locks / "ppo-begun.lock"):
        removed, _ = clean(home, everything=True)
    assert "ppo-begun" not in removed
    assert (home.stages / ".work" / "ppo-begun").is_dir()


def test_everything_goes_on_request_unless_a_run_is_going(home: Home) -> None:
    going = create_run(home, "tiny", "c", {})
    with pytest.raises(CommandError, match=f"still going: {going.name}"):
        clean(home, everything=True)
    going.update(status="ok")
    clean(home, everything=True)
    assert [path for path in home.root.rglob("*") if path.is_file() and ".lock" not in path.name] == [
        home.root / ".gitignore"
    ]


def test_a_home_that_does_not_exist(tmp_path: Path) -> None:
    removed, text = clean(Home(tmp_path / "none"))
    assert removed == set()
    assert "nothing to clean" in text


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (5, 2_048, 3 * 2**20, 5 * 2**30)] == ["5 B", "2 KiB", "3 MiB", "5.0 GiB"]
