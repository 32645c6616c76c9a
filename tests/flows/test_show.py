from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from compaction.rollout import CallRecord, CompactionRecord, Outcome, Rollout, Segment, TurnRecord
from compaction.settings import AgentSettings
from compaction.storage import write_rollouts
from flows.runs import create_run, find_run
from flows.services import Home
from flows.show import show_run
from tasks.errors import UserError


def segment(ordinal: int) -> Segment:
    return Segment(
        kind="summary" if ordinal % 2 else "execution",
        ordinal=ordinal,
        context_ids=np.zeros(1, np.int32),
        token_ids=np.zeros(2, np.int32),
        optimized=np.ones(2, bool),
        logprobs=np.full(2, -1.0, np.float32),
        versions=np.zeros(2, np.int32),
    )


ROLLOUT = Rollout(
    id="r7",
    task_id="trail-3",
    seed=0,
    settings=AgentSettings(),
    segments=tuple(segment(i) for i in range(3)),
    outcome=Outcome(1.0, "finished"),
    turns=(
        TurnRecord(0, "ls [red]", "\n".join(f"line {i}" for i in range(9)), 30),
        TurnRecord(0, "cat a", "b is next", 60),
        TurnRecord(2, "exit", "", 25),
    ),
    compactions=(CompactionRecord(1, 2, tokens_before=80, tokens_after=20, dropped=1, kept=1, summary="out a: [b]"),),
)
FAILED = Rollout("r8", "trail-4", 0, AgentSettings(), (segment(0),), Outcome(None, "error", "engine", "it broke"))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home").create()
    stage = home.stages / "evaluate-1"
    stage.mkdir()
    write_rollouts(stage / "rollouts.parquet", [ROLLOUT, FAILED])
    run = create_run(home, "tiny", "compactionrl reproduce", {})
    run.update(stages=[{"name": "evaluate", "folder": "evaluate-1"}])
    return home


def shown(home: Home, name: str, number: int | None = None, *, stage: str | None = None, full: bool = False) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    show_run(home, name, number, stage=stage, full=full, console=console)
    return console.export_text()


def test_the_list_has_a_line_per_rollout(home: Home) -> None:
    lines = [line.split() for line in shown(home, "latest").splitlines()]
    assert ["0", "trail-3", "1", "3", "1", "2", "finished"] in lines
    assert ["1", "trail-4", "none", "0", "0", "–", "error"] in lines
    assert ["2", "rollouts,", "mean", "reward", "1.000"] in lines


def test_the_list_of_some_stages_keeps_the_numbers_of_all(home: Home) -> None:
    critic = home.stages / "critic-1"
    critic.mkdir()
    write_rollouts(critic / "rollouts.parquet", [FAILED])
    find_run(home, "latest").update(stages=[{"folder": "evaluate-1"}, {"folder": "critic-1"}])
    lines = [line.split() for line in shown(home, "latest", stage="critic").splitlines()]
    assert ["2", "trail-4", "none", "0", "0", "–", "error"] in lines
    assert ["1", "rollout,", "no", "reward"] in lines
    assert not any("trail-3" in line for line in lines)
    assert ["Read", "one:", "compactionrl", "show", "latest", "--rollout", "2"] in lines
    with pytest.raises(UserError, match=r"no stage .* has 'ppo' in its title; there are:\n  evaluate-1\n  critic-1"):
        shown(home, "latest", stage="ppo")
    with pytest.raises(UserError, match="leave one of them out"):
        shown(home, "latest", 2, stage="critic")


def test_a_rollout_reads_from_first_turn_to_grade(home: Home) -> None:
    text = shown(home, "latest", 0)
    expected = [
        "ls [red]", "line 2", "… 6 more lines", "cat a", "80 → 20 tokens (−75%)", "dropped: 1 turn folded",
        "out a: [b]", "kept: the last 1 turn, verbatim", "exit", "reward 1",
    ]  # fmt: skip
    positions = [text.find(part) for part in expected]
    assert -1 not in positions, text
    assert positions == sorted(positions)
    assert "line 8" not in text


def test_full_unfolds_the_turns(home: Home) -> None:
    assert "line 8" in shown(home, "latest", 0, full=True)


def test_a_turn_that_calls_functions_shows_what_they_ran(home: Home, tmp_path: Path) -> None:
    def call(name: str, *commands: str) -> CallRecord:
        return CallRecord("c", name, {}, commands, "")

    turns = (
        TurnRecord(0, "<tool_call>\n…", "", 9, (call("execute_commands", "ls", "pwd"), call("execute_commands", "id"))),
        TurnRecord(0, "<tool_call>\n…", "", 9, (call("task_complete"),)),
        TurnRecord(0, "<tool_call>\n…", "", 9, (call(""),)),
    )
    write_rollouts(tmp_path / "r.parquet", [replace(ROLLOUT, turns=turns, compactions=())])
    text = shown(home, str(tmp_path / "r.parquet"), 0)
    assert [line.split("   |h|")[0].strip() for line in text.splitlines() if "|h|" in line] == [
        "1 › ls; pwd · id",
        "2 › task_complete",
        "3 › (a call that could not be read)",
    ]
    assert "<tool_call>" in shown(home, str(tmp_path / "r.parquet"), 0, full=True)


def test_a_failed_rollout_says_what_broke(home: Home) -> None:
    assert "engine: it broke" in shown(home, "latest", 1)


def test_a_parquet_file_is_shown_by_its_path(home: Home) -> None:
    assert "reward 1" in shown(home, str(home.stages / "evaluate-1" / "rollouts.parquet"), 0)


def test_what_cannot_be_shown_is_said(home: Home, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has rollouts 0 to 1; --rollout 2"):
        shown(home, "latest", 2)
    with pytest.raises(UserError, match="no file"):
        shown(home, str(tmp_path / "gone.parquet"))
    (tmp_path / "bad.parquet").write_text("x")
    with pytest.raises(UserError, match="holds no readable rollouts"):
        shown(home, str(tmp_path / "bad.parquet"))
    create_run(home, "tiny", "c", {})
    with pytest.raises(UserError, match="no rollouts kept"):
        shown(home, "latest")
