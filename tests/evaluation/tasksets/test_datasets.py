"""Where tasks come from, which are chosen, and that whatever is wrong is said at once."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from compaction.protocols import EnvironmentFailure
from evaluation.settings import SandboxKind, SandboxSettings
from evaluation.tasksets.datasets import Dataset, DatasetError, ensure_images, export_dataset, load_dataset
from evaluation.tasksets.harbor_export import export_trail
from evaluation.tasksets.trail import TrailSettings
from tests.evaluation.tasksets.folders import make_folder

pytest_plugins = ["tests.docker_engine"]

SANDBOX = SandboxSettings(kind="local")


def load(where: object, **choice: Any) -> Dataset:
    return load_dataset(str(where), sandbox=SANDBOX, **choice)


def ids(dataset: Dataset) -> list[str]:
    return [task.id for task in dataset.tasks]


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    for name in "cabfde":
        make_folder(tmp_path / "letters" / name)
    return tmp_path / "letters"


# Where tasks come from


def test_the_shipped_set_has_its_image() -> None:
    dataset = load("bench12")
    assert (dataset.name, len(dataset.tasks)) == ("bench12", 12)
    assert [path.name for path in dataset.images.values()] == ["image"]
    assert all(task.sandbox == SANDBOX for task in dataset.tasks)


def test_a_folder_of_task_folders_and_a_single_one(letters: Path) -> None:
    (letters / "image").mkdir()
    (letters / "README.md").touch()
    assert (load(letters).name, ids(load(letters))) == ("letters", list("abcdef"))
    assert ids(load(letters / "c")) == ["c"]
    assert load(letters / "c").name == "c"


def test_a_list_file_names_folders_relative_to_itself(letters: Path) -> None:
    (letters.parent / "some.txt").write_text(f"# two of them\r\n\r\nletters/b\r\n{letters / 'e'}\r\n")
    dataset = load(letters.parent / "some.txt")
    assert (dataset.name, ids(dataset)) == ("some", ["b", "e"])


def registry(letters: Path, *entries: tuple[str, str, list[dict[str, str]]]) -> Path:
    file = letters.parent / "registry.json"
    file.write_text(json.dumps([{"name": n, "version": v, "description": "", "tasks": t} for n, v, t in entries]))
    return file


def test_a_registry_names_datasets_by_name_and_version(letters: Path) -> None:
    one, two = [{"name": "a", "path": "letters/a"}], [{"name": "b", "path": "letters/b"}]
    file = registry(letters, ("x", "1.0", one), ("x", "2.0", two), ("y", "1.0", two))
    assert (load(f"{file}:x@1.0").name, ids(load(f"{file}:x@1.0"))) == ("x@1.0", ["a"])
    assert ids(load(f"{file}:y")) == ["b"]
    assert ids(load(registry(letters, ("x", "1.0", one)))) == ["a"]
    file = registry(letters, ("x", "1.0", one), ("x", "2.0", two))
    for where, said in ((file, "any is more than one"), (f"{file}:x", "x is more than one"), (f"{file}:z", "z is not")):
        with pytest.raises(DatasetError, match=rf"{said}.*x@1.0, x@2.0"):
            load(where)


def test_tasks_in_git_must_be_cloned(letters: Path) -> None:
    remote = {"name": "q", "path": "tasks/q", "git_url": "https://git.example/repo", "git_commit_id": "abc123"}
    with pytest.raises(DatasetError, match=r"1 tasks are in git .*tasks/q \(git clone .*repo, git checkout abc123\)"):
        load(registry(letters, ("x", "1", [remote])))
    make_folder(letters.parent / "tasks/q")  # the registry lies in the clone
    assert ids(load(registry(letters, ("x", "1", [remote])))) == ["q"]


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"name": "x"}]', '[{"name": "x", "tasks": [{"name": "a"}]}]'])
def test_a_registry_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "registry.json").write_text(text)
    with pytest.raises(DatasetError, match=r"registry .*registry\.json: "):
        load(tmp_path / "registry.json")


@pytest.mark.parametrize(
    ("where", "said"),
    [("bench-12", "did you mean bench12"), ("nowhere/at/all", "neither a shipped one"), ("gone.json:x", "neither")],
)
def test_what_is_not_there_is_said_with_what_was_looked_for(where: str, said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        load(where)


def test_empty_sets_say_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"no task folder in .*empty"):
        load(tmp_path / "empty")
    (tmp_path / "list.txt").write_text("# nothing\n")
    with pytest.raises(DatasetError, match="names no task folder"):
        load(tmp_path / "list.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="not UTF-8"):
        load(tmp_path / "binary")


# Which are chosen


def test_patterns_choose_by_id(letters: Path) -> None:
    assert ids(load(letters, include=["[a-c]", "f"], exclude=["b"])) == ["a", "c", "f"]
    with pytest.raises(DatasetError, match=r"none of its 6 tasks is left after include z\*; ids: a, b, c, d, e, f"):
        load(letters, include=["z*"])
    with pytest.raises(DatasetError, match="limit is 0"):
        load(letters, limit=0)


def test_a_limit_takes_the_first_or_a_seeded_sample(letters: Path) -> None:
    assert ids(load(letters, limit=2)) == ["a", "b"]
    assert ids(load(letters, limit=99)) == list("abcdef")
    samples = {tuple(ids(load(letters, limit=3, sample_seed=seed))) for seed in range(8)}
    assert len(samples) > 1
    for seed in range(4):
        small, large = (ids(load(letters, limit=n, sample_seed=seed)) for n in (2, 4))
        assert set(small) < set(large)
        assert large == ids(load(letters, limit=4, sample_seed=seed))


def test_the_digest_is_of_the_chosen_contents_and_the_image(letters: Path) -> None:
    digests = [load(letters).digest, load(letters, limit=2).digest]
    shutil.copytree(letters, letters.parent / "elsewhere")
    assert load(letters.parent / "elsewhere").digest == digests[0]
    (letters / "f" / "instruction.md").write_text("Something else.\n")
    digests.append(load(letters).digest)
    assert load(letters, limit=2).digest == digests[1]
    make_image(letters, "FROM a\n")
    digests.append(load(letters).digest)
    make_image(letters, "FROM b\n")
    digests.append(load(letters).digest)
    assert len(set(digests)) == 5


# What is wrong


def test_two_tasks_with_one_id_are_refused_with_both_folders(letters: Path) -> None:
    make_folder(letters / "z", '[task]\nname = "org/c"\n')
    with pytest.raises(DatasetError, match=rf"two tasks have the id 'c': {letters}/c and {letters}/z"):
        load(letters)


def test_all_broken_tasks_are_in_one_message(letters: Path) -> None:
    for n in range(13):
        make_folder(letters / f"broken{n:02d}", "[environment]\ngpus = 1\n")
    with pytest.raises(DatasetError) as caught:
        load(letters)
    first, *rest = str(caught.value).splitlines()
    assert "13 tasks are broken" in first
    assert [line.split("/")[-1].split(":")[0] for line in rest[:-1]] == [f"broken{n:02d}" for n in range(10)]
    assert rest[-1].strip() == "and 3 more"
    assert ids(load(letters, exclude=["broken*"])) == list("abcdef")


def test_a_broken_task_beside_good_ones_is_not_left_out(letters: Path) -> None:
    (letters / "c" / "tests/test.sh").unlink()
    with pytest.raises(DatasetError, match=r"letters/c: tests/test.sh is missing"):
        load(letters)
    (letters.parent / "list.txt").write_text("letters/a\nletters/nope\n")
    with pytest.raises(DatasetError, match=r"letters/nope does not exist"):
        load(letters.parent / "list.txt")


# Images


def make_image(folder: Path, dockerfile: str, tag: str = "compactionrl-tests:1") -> None:
    (folder / "image").mkdir(exist_ok=True)
    (folder / "image/Dockerfile").write_text(dockerfile)
    (folder / "image/TAG").write_text(f"{tag}\n")


def test_images_are_found_beside_the_tasks(letters: Path) -> None:
    assert load(letters).images == {}
    make_image(letters, "FROM a\n")
    assert load(letters / "c").images == {"compactionrl-tests:1": letters / "image"}
    make_folder(letters.parent / "more/x")
    make_image(letters.parent / "more", "FROM a\n")
    (letters.parent / "list.txt").write_text("letters/a\nmore/x\n")
    with pytest.raises(DatasetError, match="compactionrl-tests:1 is described twice"):
        load(letters.parent / "list.txt")


def test_a_missing_image_is_built_once(letters: Path, docker_engine: Any) -> None:
    tag = f"compactionrl-tests:{os.getpid()}"
    make_image(letters, "FROM local/debian\nRUN echo built > /built\n", tag)
    dataset = load(letters)
    try:
        assert ensure_images(dataset) == [tag]
        assert ensure_images(dataset) == []
    finally:
        docker_engine.images.remove(tag, force=True)
    assert ensure_images(load(letters.parent / "letters" / "c")) == [tag]
    docker_engine.images.remove(tag, force=True)
    (letters / "image/Dockerfile").write_text("FROM local/debian\nRUN echo alas; exit 3\n")
    with pytest.raises(EnvironmentFailure, match=rf"(?s)image {tag} cannot be built.*alas") as caught:
        ensure_images(dataset)
    assert caught.value.error_class == "environment_build"


def test_no_engine_is_said(letters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_image(letters, "FROM a\n")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{letters}/no.sock")
    with pytest.raises(EnvironmentFailure, match="no Docker engine answers"):
        ensure_images(load(letters))


def test_without_images_no_engine_is_asked(letters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{letters}/no.sock")
    assert ensure_images(load(letters)) == []


# Written out


def test_the_shipped_set_is_written_out_whole(tmp_path: Path) -> None:
    target = export_dataset("bench12", tmp_path / "mine")
    shipped, copy = load("bench12"), load(target)
    assert (ids(copy), copy.digest) == (ids(shipped), shipped.digest)
    assert all(os.access(task.folder.path / "tests/test.sh", os.X_OK) for task in copy.tasks)
    readme = (target / "README.md").read_text()
    assert "docker build -t compactionrl-bench12:1 mine/image" in readme
    assert "harbor run -p mine" in readme
    assert "no-network.yaml" in readme
    with pytest.raises(FileExistsError, match="not empty"):
        export_dataset("bench12", target)


def test_a_set_without_image_and_with_network_says_nothing_of_them(letters: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    readme = (export_dataset(str(letters), tmp_path / "new") / "README.md").read_text()
    assert "docker build" not in readme
    assert "no-network" not in readme


def test_sets_with_images_of_their_own_are_not_mixed(letters: Path, tmp_path: Path) -> None:
    make_image(letters, "FROM a\n")
    make_folder(tmp_path / "more/x")
    make_image(tmp_path / "more", "FROM a\n", "another:1")
    (tmp_path / "list.txt").write_text("letters/a\nmore/x\n")
    with pytest.raises(DatasetError, match="several images"):
        export_dataset(str(tmp_path / "list.txt"), tmp_path / "new")


def test_trail_tasks_are_a_dataset(tmp_path: Path) -> None:
    target = export_trail(tmp_path / "trail", TrailSettings(), "test", 3, seed=2, base_image="local/debian")
    dataset = load(target)
    assert ids(dataset) == [f"trail-test-2-{n}" for n in range(3)]
    for task in dataset.tasks:
        assert task.limits.max_turns == TrailSettings().max_turns
        assert [note.split()[0] for note in task.folder.notes] == ["environment.storage_mb"]
        steps = [line.split()[0] for line in task.folder.dockerfile.read_text().splitlines()]
        assert set(steps) <= {"FROM", "ENV", "WORKDIR", "COPY"}
        assert "FROM local/debian\n" in task.folder.dockerfile.read_text()


@pytest.mark.parametrize("kind", ["docker", "local"])
def test_trail_tasks_run_in_both_sandboxes(tmp_path: Path, kind: SandboxKind, request: pytest.FixtureRequest) -> None:
    if kind == "docker":
        request.getfixturevalue("docker_engine")
    elif sys.platform != "linux" or shutil.which("bwrap") is None:
        pytest.skip("the local sandbox needs Linux with bubblewrap")
    target = export_trail(tmp_path / "trail", TrailSettings(), "test", 1, base_image="local/debian")
    (task,) = load_dataset(str(target), sandbox=SandboxSettings(kind=kind)).tasks

    async def grades() -> list[float]:
        environment: Any = task.open()
        try:
            await environment.start()
            before = await environment.grade()
            await environment.solve()
            return [before, await environment.grade()]
        finally:
            await environment.stop()

    assert asyncio.run(grades()) == [0.0, 1.0]
