from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console

from tasks import progress
from tasks.progress import open_progress, show_metrics


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with open_progress("auto", Console(file=io.StringIO())) as sink:
        sink.note("reused: sft")
        with sink.stage("ppo seed 0", 4, "updates") as stage:
            stage.update(1, {"train/reward": 0.51234, "train/kl_to_sampler": None})
            stage.update(2)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line.partition(" ")[2] for line in captured.err.splitlines()]
    assert lines[0] == "reused: sft"
    assert lines[1] == "ppo seed 0: started"
    assert lines[2].startswith("ppo seed 0: 1/4 updates (")
    assert lines[2].endswith("reward 0.512")
    assert "s left" in lines[3]
    assert lines[4].startswith("ppo seed 0: done in")


def test_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress("auto", Console(file=io.StringIO())) as sink, sink.stage("sft", None, "rows") as stage:
        for done in range(1_000):
            stage.update(done)
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(("error", "said"), [(ZeroDivisionError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_a_stage_that_does_not_finish_says_how_it_ended(
    error: type[BaseException], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(error),
        open_progress("auto", Console(file=io.StringIO())) as sink,
        sink.stage("sft", 3, "rows"),
    ):
        raise error
    assert f"sft: {said} after" in capsys.readouterr().err


def test_bars_on_a_terminal() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=140)
    with open_progress("auto", console) as sink, sink.stage("ppo [seed 0]", 4, "updates") as stage:
        sink.note("waiting [here]")
        stage.update(4, {"train/reward": 0.5})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    assert "ppo [seed 0]" in text
    assert "waiting [here]" in text
    assert "reward 0.5" in text


def test_the_log_mode_writes_no_output(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "compactionrl.progress"), open_progress("log") as sink, sink.stage("s", 1, "x"):
        pass
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
    assert "s: started" in caplog.text


def test_metrics_are_named_without_their_group() -> None:
    assert show_metrics({"train/reward": 0.5, "loss": 1e-5, "x": None}) == "reward 0.5 · loss 1e-05"
