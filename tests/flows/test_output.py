"""What a command prints at its end."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows import output
from flows.runs import RunFolder, create_run
from flows.services import Home


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    home = Home(tmp_path)
    home.create()
    return create_run(home, "endpoint", "compactionrl sweep", {})


def printed(run: RunFolder, **result: Any) -> str:
    text = StringIO()
    whole = {"sweep": False, "results": [], "stages": [], "preset_point": {"window": 1024, "cap": 3, "keep_recent": 2}}
    output.print_result(Console(file=text, width=80), whole | result, run)
    return text.getvalue()


def test_a_partial_result_says_why_cells_are_missing(run: RunFolder) -> None:
    why = "my-model · cap 2: window=2048 is too small: system 176 + [task] 496. Raise window, or lower summary_cap."
    text = printed(run, status="partial", errors=[f"UserError: {why}", "ValueError: a bug"])
    assert f"✗ {why}\n" in text  # in one line, to be copied
    assert "✗ ValueError: a bug\n" in text
    assert "UserError" not in text


def test_a_whole_result_has_nothing_to_say_of_errors(run: RunFolder) -> None:
    assert "✗" not in printed(run, status="ok", errors=[])
