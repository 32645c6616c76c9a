"""Checkpoints: whole or not there, the last two kept, damage named."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.checkpoint import latest_checkpoint, load_checkpoint, new_checkpoint
from rl.errors import CheckpointError
from rl.settings import TrainerSettings
from rl.trainer import Trainer


def write(root: Path, step: int, text: str = "weights") -> Path:
    with new_checkpoint(root, step, {"cursor": step}) as folder:
        (folder / "policy").mkdir()
        (folder / "policy" / "model").write_text(text)
    return latest_checkpoint(root)


def test_round_trip(tmp_path):
    checkpoint = load_checkpoint(write(tmp_path, 7))
    assert (checkpoint.step, checkpoint.state) == (7, {"cursor": 7})
    assert (checkpoint.folder / "policy" / "model").read_text() == "weights"


def test_the_last_two_are_kept(tmp_path):
    for step in (1, 2, 9, 10):
        write(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]


def test_a_repeated_step_replaces_the_old_one(tmp_path):
    write(tmp_path, 1, "old")
    checkpoint = load_checkpoint(write(tmp_path, 1, "new"))
    assert (checkpoint.folder / "policy" / "model").read_text() == "new"


def test_no_checkpoint_yet(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


def write_half(root: Path, step: int) -> None:
    with new_checkpoint(root, step, {}) as folder:
        (folder / "model").write_text("half")
        raise KeyError(step)


def test_an_error_while_writing_leaves_nothing(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(KeyError):
        write_half(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may grow beyond 20,000 bytes: writes fail as on a full disk, through every library alike."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save(root: Path, trainer: Trainer) -> None:
    with new_checkpoint(root, 2, {}) as folder:
        trainer.save(folder)


def test_a_full_disk_is_one_clear_message_and_keeps_the_earlier_checkpoint(random_checkpoint, tmp_path, full_disk):
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"could not write .*Earlier checkpoints are untouched"):
        save(tmp_path, Trainer(random_checkpoint, TrainerSettings()))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert load_checkpoint(latest_checkpoint(tmp_path)).step == 1


def test_a_kill_while_writing_leaves_the_earlier_checkpoint(tmp_path):
    write(tmp_path, 1)
    code = (
        "import sys, os, signal, pathlib\n"
        "from rl.checkpoint import new_checkpoint\n"
        "with new_checkpoint(pathlib.Path(sys.argv[1]), 2, {}) as folder:\n"
        "    (folder / 'model').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "the half-written folder is still there"
    assert load_checkpoint(latest_checkpoint(tmp_path)).step == 1
    write(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{"), "is damaged"),
        (lambda f: (f / "manifest.json").write_text(json.dumps({"step": 1})), "is damaged"),
        (lambda f: (f / "policy" / "model").unlink(), "lacks policy/model"),
        (lambda f: (f / "policy" / "model").write_text("weighty"), "policy/model does not match"),
        (lambda f: os.truncate(f / "state.json", 3), "state.json does not match"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    folder = write(tmp_path, 1)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint folder"):
        load_checkpoint(tmp_path / "nowhere")
