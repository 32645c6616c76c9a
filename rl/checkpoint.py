"""Checkpoints: a folder that is either whole or not there (design "Async", last line).

    checkpoints/
        step-00000010/
            policy/        an ordinary checkpoint folder
            trainer.pt     critic, both optimisers, RNG
            state.json     what the loop needs besides: data cursor, queue, …
            manifest.json  size and SHA-256 of every other file; written last

All files are written to a temporary folder beside it, synced, and renamed in one step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.errors import CheckpointError

MANIFEST = "manifest.json"
_STATE = "state.json"
_TEMPORARY = ".writing-"


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint."""

    folder: Path
    step: int
    state: dict[str, Any]


@contextmanager
def new_checkpoint(root: Path, step: int, state: Mapping[str, Any], *, keep: int = 2) -> Iterator[Path]:
    """A folder to write into; on leaving it becomes `root/step-…` whole, or nothing at all.

    `state` is free-form JSON. Afterwards only the newest `keep` checkpoints stay. Raises CheckpointError where the disk
    refuses; earlier checkpoints are then untouched.
    """
    folder = checkpoint_folder(root, step)
    temporary = root / f"{_TEMPORARY}{folder.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        yield temporary
        (temporary / _STATE).write_text(json.dumps(state))
        _seal(temporary, step)
        if folder.exists():
            # A resumed run repeats its step: the old one goes first, the one before it is still there.
            shutil.rmtree(folder)
        os.replace(temporary, folder)
        _sync(root)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"could not write checkpoint {folder}: {error}. Earlier checkpoints are untouched; free space or fix the "
            "folder's rights, then resume"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in _checkpoints(root)[:-keep]:
        shutil.rmtree(old)


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def latest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint below `root`, or None."""
    found = _checkpoints(root)
    return found[-1] if found else None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Check every file against the manifest. Raises CheckpointError naming what is wrong."""
    manifest_path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}; give a folder that holds {MANIFEST}")
    if not manifest_path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a checkpoint, or an incomplete one; use another")
    try:
        manifest = json.loads(manifest_path.read_text())
        expected = dict(manifest["files"])
        step = int(manifest["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest_path} is damaged ({error}); use another checkpoint") from error
    for name, entry in expected.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder} lacks {name}; use another checkpoint")
        if path.stat().st_size != entry["bytes"] or _digest(path) != entry["sha256"]:
            raise CheckpointError(f"checkpoint {folder}: {name} does not match its manifest; use another checkpoint")
    return Checkpoint(folder, step, json.loads((folder / _STATE).read_text()))


def _checkpoints(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))


def _seal(folder: Path, step: int) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _sync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": files}, indent=1))
    _sync(manifest)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
