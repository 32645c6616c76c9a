from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.runs import COLLECTED, RunFolder, all_runs, create_run, find_run
from flows.services import Home
from tasks.errors import CommandError, UserError


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").create()


def make(home: Home, mlflow_run_id: str | None = None) -> RunFolder:
    run = create_run(home, "tiny", "compactionrl reproduce", {"name": "tiny"})
    run.update(mlflow_run_id=mlflow_run_id)
    return run


def test_two_runs_of_one_second_have_folders_of_their_own(home: Home) -> None:
    runs = [make(home) for _ in range(3)]
    assert len({run.name for run in runs}) == 3
    assert [run.name for run in all_runs(home)] == [run.name for run in runs]
    assert all(run.logs.is_dir() for run in runs)


def test_a_run_is_found_by_every_name_it_has(home: Home) -> None:
    first, second = make(home, "abc123"), make(home, "abd456")
    assert find_run(home, "latest").name == second.name
    for name in (first.name, str(first.path), "abc123", "abc"):
        assert find_run(home, name).name == first.name


def test_a_run_that_was_refused_before_its_first_stage_is_not_the_latest(home: Home) -> None:
    first, refused = make(home), make(home)
    refused.update(status="failed", stages=[])
    assert find_run(home, "latest").name == first.name
    refused.update(stages=[{"name": "sft"}])
    assert find_run(home, "latest").name == refused.name


def test_a_run_of_collect_says_that_it_has_no_scores(home: Home) -> None:
    run = make(home)
    (run.path / COLLECTED).write_text("{}")
    run.update(status="ok")
    with pytest.raises(CommandError, match="collected trajectories"):
        run.read_results()


def test_a_full_name_wins_over_a_beginning(home: Home) -> None:
    first, second = make(home), make(home)
    assert second.name.startswith(first.name)
    assert find_run(home, first.name).name == first.name


def test_ambiguous_and_unknown_names_are_refused(home: Home) -> None:
    make(home, "abc123")
    make(home, "abd456")
    with pytest.raises(UserError, match="'ab' names 2 runs"):
        find_run(home, "ab")
    with pytest.raises(UserError, match=r"no run 'zzz' in .*; the last ones: "):
        find_run(home, "zzz")


def test_a_home_without_runs_says_how_to_start_one(home: Home) -> None:
    with pytest.raises(UserError, match="start one with `compactionrl reproduce`"):
        find_run(home, "latest")


def test_a_record_cut_short_is_passed_over(home: Home) -> None:
    run = make(home)
    (home.runs / "broken").mkdir()
    (home.runs / "broken" / "run.json").write_text('{"preset":')
    assert [found.name for found in all_runs(home)] == [run.name]


def test_a_run_is_running_while_its_process_is(home: Home) -> None:
    run = make(home)
    assert run.is_running()
    record = json.loads((run.path / "run.json").read_text())
    record["process"]["created"] -= 1_000  # the pid was reused
    assert not RunFolder(run.path, record).is_running()
    run.update(status="ok")
    assert not run.is_running()


def test_stage_folders_that_were_removed_are_left_out(home: Home) -> None:
    run = make(home)
    (home.stages / "sft-1").mkdir()
    run.update(stages=[{"folder": "sft-1"}, {"folder": "ppo-2"}, {"name": "report"}])
    assert run.stage_folders(home.stages) == [home.stages / "sft-1"]
