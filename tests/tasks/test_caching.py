from __future__ import annotations

import asyncio
import errno
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import caching
from tasks.caching import (
    Hit,
    Miss,
    Produced,
    StageOutcome,
    StageSpec,
    StageStore,
    canonical_json,
    code_digest,
    describe_files,
    file_digest,
    is_disk_full,
)
from tasks.errors import CommandError

SPEC = StageSpec("ppo", "compactionrl/seed 0", {"ppo": {"steps": 40, "lr": 1e-4}}, {"checkpoint": "aa"})


def produce(folder: Path) -> Produced:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "weights.bin").write_bytes(b"weights")
    return Produced({"reward": 0.5}, 1.5, "run-1")


def make(
    store: StageStore,
    spec: StageSpec,
    body: Callable[[Path], Produced],
    *,
    force: bool = False,
    on_wait: Callable[[str], None] = lambda message: None,
) -> StageOutcome:
    """The store's coroutine, for bodies that await nothing."""

    async def awaited(folder: Path) -> Produced:
        return body(folder)

    return asyncio.run(store.run(spec, awaited, force=force, on_wait=on_wait))


@pytest.fixture
def store(tmp_path: Path) -> StageStore:
    return StageStore(tmp_path / "stages")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source tree of our own to change."""
    root = tmp_path / "sources"
    (root / "rl").mkdir(parents=True)
    (root / "rl" / "ppo.py").write_text("x = 1\n")
    (root / "rl" / "README.md").write_text("a\n")
    monkeypatch.setattr(caching, "SOURCES", root)
    code_digest.cache_clear()
    yield root
    code_digest.cache_clear()


def test_a_finished_stage_is_reused(store: StageStore) -> None:
    assert store.lookup(SPEC) == Miss("never run")
    first = make(store, SPEC, produce)
    assert (first.cached, first.why, first.result) == (False, "never run", {"reward": 0.5})
    again = make(store, SPEC, lambda folder: pytest.fail("ran twice"))
    assert again.cached
    assert again.folder == first.folder
    assert again.manifest.mlflow_run_id == "run-1"
    assert first.folder.name == f"ppo-{SPEC.digest[:16]}"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"settings": {"ppo": {"steps": 20, "lr": 1e-4}}}, "settings changed: ppo.steps 40 → 20"),
        ({"settings": {"ppo": {"steps": 40, "lr": 1e-4}, "new": 1}}, "settings changed: new (unset) → 1"),
        ({"parents": {"checkpoint": "bb"}}, "its input changed: checkpoint"),
        ({"label": "compactionrl/seed 1"}, "never run"),
        ({"stage": "sft"}, "never run"),
    ],
)
def test_a_miss_says_what_changed(store: StageStore, change: dict, why: str) -> None:
    make(store, SPEC, produce)
    assert store.lookup(replace(SPEC, **change)) == Miss(why)


def test_the_nearest_earlier_run_is_compared_with(store: StageStore) -> None:
    for steps, lr in ((40, 1e-4), (20, 1e-3), (20, 1e-4)):
        make(store, replace(SPEC, settings={"ppo": {"steps": steps, "lr": lr}}), produce)
    wanted = replace(SPEC, settings={"ppo": {"steps": 10, "lr": 1e-3}})
    assert store.lookup(wanted) == Miss("settings changed: ppo.steps 20 → 10")


def test_the_order_of_settings_does_not_matter(store: StageStore) -> None:
    make(store, SPEC, produce)
    assert isinstance(store.lookup(replace(SPEC, settings={"ppo": {"lr": 1e-4, "steps": 40}})), Hit)


def test_sources_count_and_other_files_do_not(store: StageStore, sources: Path) -> None:
    spec = replace(SPEC, packages=("rl",))
    make(store, spec, produce)
    (sources / "rl" / "README.md").write_text("b\n")
    code_digest.cache_clear()
    assert isinstance(store.lookup(spec), Hit)
    (sources / "rl" / "ppo.py").write_text("x = 2\n")
    code_digest.cache_clear()
    assert store.lookup(spec) == Miss("code changed")


def test_a_package_that_does_not_exist_is_an_error(sources: Path) -> None:
    with pytest.raises(ValueError, match="no sources at"):
        code_digest(("rll",))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b"weight"), "has 6 bytes, not 7"),
        (lambda path: path.write_bytes(b"WEIGHTS"), "has other contents"),
    ],
)
def test_damaged_files_make_the_stage_run_again(store: StageStore, damage, why: str) -> None:
    folder = make(store, SPEC, produce).folder
    damage(folder / "model" / "weights.bin")
    missed = store.lookup(SPEC)
    assert isinstance(missed, Miss)
    assert missed.why.startswith("files damaged: ")
    assert missed.why.endswith(why)
    assert not make(store, SPEC, produce).cached
    assert isinstance(store.lookup(SPEC), Hit)


def test_a_models_card_may_be_written_again_and_is_in_no_digest(store: StageStore) -> None:
    outcome = make(store, SPEC, produce)
    for text in ("a card", "with scores"):
        (outcome.folder / "model" / "README.md").write_text(text)
        assert isinstance(store.lookup(SPEC), Hit)
    assert describe_files(outcome.folder) == outcome.manifest.files


def test_a_damaged_manifest_makes_the_stage_run_again(store: StageStore) -> None:
    folder = make(store, SPEC, produce).folder
    (folder / "manifest.json").write_text('{"stage":')
    missed = store.lookup(SPEC)
    assert isinstance(missed, Miss)
    assert "manifest.json" in missed.why
    assert not make(store, SPEC, produce).cached


def test_force_runs_again_from_nothing(store: StageStore) -> None:
    make(store, SPEC, produce)
    store.work_folder(SPEC).mkdir(parents=True)
    (store.work_folder(SPEC) / "checkpoint").write_text("old")
    outcome = make(store, SPEC, produce, force=True)
    assert (outcome.cached, outcome.why) == (False, "forced")
    assert not (outcome.folder / "checkpoint").exists()
    assert not list((store.root / ".work").iterdir())


def test_a_failed_stage_is_not_done_and_continues_from_its_own_files(store: StageStore) -> None:
    def fail(folder: Path) -> Produced:
        (folder / "checkpoint-3").write_text("3")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        make(store, SPEC, fail)
    assert store.lookup(SPEC) == Miss("never run; continues what was begun")

    def resume(folder: Path) -> Produced:
        assert (folder / "checkpoint-3").read_text() == "3"
        return Produced({}, 0.0)

    assert not make(store, SPEC, resume).cached


def test_settings_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"lr": float("nan")})
    with pytest.raises(TypeError):
        canonical_json({"path": Path(".")})


def _slow(root: Path, out: Path) -> None:
    def slow(folder: Path) -> Produced:
        with (out / "made").open("a") as file:
            file.write("x")
        time.sleep(0.5)
        return produce(folder)

    waits: list[str] = []
    outcome = make(StageStore(root), SPEC, slow, on_wait=waits.append)
    (out / f"{os.getpid()}.json").write_text(json.dumps([outcome.cached, bool(waits)]))


def test_of_two_runs_at_once_one_makes_the_stage(store: StageStore, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_slow, args=(store.root, tmp_path)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert (tmp_path / "made").read_text() == "x"
    outcomes = [json.loads(path.read_text())[0] for path in tmp_path.glob("*.json")]
    assert sorted(outcomes) == [False, True, True]


def test_two_coroutines_of_one_run_make_a_stage_once(store: StageStore) -> None:
    made: list[Path] = []

    async def slow(folder: Path) -> Produced:
        made.append(folder)
        await asyncio.sleep(0.3)
        return produce(folder)

    async def both() -> list[StageOutcome]:
        return list(await asyncio.gather(store.run(SPEC, slow), store.run(SPEC, slow)))

    outcomes = asyncio.run(both())
    assert len(made) == 1
    assert sorted(outcome.cached for outcome in outcomes) == [False, True]


def test_a_stage_is_busy_while_it_is_made(store: StageStore) -> None:
    def look(folder: Path) -> Produced:
        assert store.is_busy(SPEC.folder_name)
        return Produced({}, 0.0)

    make(store, SPEC, look)
    assert not store.is_busy(SPEC.folder_name)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("(sqlite3.OperationalError) database or disk is full"),
    ],
)
def test_a_full_disk_is_one_clear_message_and_nothing_counts_as_done(store: StageStore, error: Exception) -> None:
    def fill(folder: Path) -> Produced:
        (folder / "half").write_text("half")
        raise RuntimeError("cannot save") from error

    with pytest.raises(CommandError, match=r"is full .* Nothing half-written counts as done"):
        make(store, SPEC, fill)
    assert isinstance(store.lookup(SPEC), Miss)


def test_a_stage_writing_to_a_device_without_space(store: StageStore) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")

    def fill(folder: Path) -> Produced:
        with open("/dev/full", "w") as file:
            file.write("x")
        return Produced({}, 0.0)

    with pytest.raises(CommandError, match="is full"):
        make(store, SPEC, fill)


def test_other_errors_are_not_taken_for_a_full_disk() -> None:
    assert not is_disk_full(OSError(errno.EACCES, "Permission denied"))


def test_large_files_are_sampled_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "WHOLE_DIGEST_BYTES", 1_000)
    path = tmp_path / "large"
    content = bytearray(10 * caching.BLOCK_BYTES)
    path.write_bytes(content)
    before = file_digest(path)
    assert before.startswith("sampled:")
    content[-1] = 1
    path.write_bytes(content)
    assert file_digest(path) != before
