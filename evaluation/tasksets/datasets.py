"""Sets of task folders: the shipped one, a folder, a list file, Harbor's registry.json; chosen from, and written out.

Beside its task folders a set may hold `image/Dockerfile` and `image/TAG`: the image that its tasks start from, built
once under that tag where the Docker engine lacks it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from compaction.protocols import EnvironmentFailure
from evaluation.settings import SandboxSettings
from evaluation.tasksets.task_folder import FolderTask, TaskFolder, TaskFolderError, folder_checksum, load_task_folder

SHIPPED = {"bench12": Path(__file__).parent / "bench12"}
"""Task sets that come with the package, by name"""

_TASK_FILES = ("task.toml", "instruction.md", "tests/test.sh")
"""A folder with one of these is meant as a task, be it broken"""
_SHOWN = 10

_README = """\
# {name}

{count} tasks as folders in Harbor's format, written by compactionrl. The commands below are for the folder that holds
this one.
{images}
Run them in compactionrl with `--dataset {folder}`, or with Harbor (Python 3.12 or newer, `pip install harbor`):

    harbor run -p {folder} -a oracle -n 2 --yes
{network}"""
_IMAGE_NOTE = """
The tasks start from an image of their own. Build it once, before anything else:

    docker build -t {tag} {context}
"""
_NETWORK_NOTE = """
The tasks declare `network_mode = "no-network"`. Harbor enforces that with helper images from a registry and refuses the
tasks where it cannot get them. There, say so to Harbor in another way:

    sed -i.bak 's/^network_mode = "no-network"/network_mode = "public"/' {folder}/*/task.toml
    echo 'services: {{main: {{init: true, network_mode: none}}}}' > no-network.yaml
    harbor run -p {folder} -a oracle -n 2 --yes --extra-docker-compose no-network.yaml
"""


class DatasetError(ValueError):
    """A set of tasks that cannot be used as asked for; the message says what was looked for and what to do."""


@dataclass(frozen=True)
class Dataset:
    """Tasks of one set, by id."""

    name: str
    tasks: tuple[FolderTask, ...]
    digest: str
    """Of the chosen tasks' contents and of the images they start from"""
    images: Mapping[str, Path]
    """Images the set brings along: tag to the folder that it is built from"""


def load_dataset(
    where: str,
    *,
    sandbox: SandboxSettings,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    limit: int | None = None,
    sample_seed: int | None = None,
) -> Dataset:
    """The tasks of a set that the patterns on their ids choose (those of `include`, all if there are none, without
    those of `exclude`), at most `limit` of them: the first by id, or with `sample_seed` the first of an order drawn
    from it, so that a smaller sample is a part of every larger one.

    `where` is a shipped name, a folder of task folders, one task folder, a list file (a path a line, relative to it) or
    `registry.json[:NAME[@VERSION]]`. Raises DatasetError for a set that is not there, is empty, names a task twice or
    holds broken ones that are chosen: all of them in one message.
    """
    if limit is not None and limit < 1:
        raise DatasetError(f"limit is {limit}: must be at least 1")
    name, folders = _find(where)
    loaded: dict[str, TaskFolder] = {}
    broken: list[str] = []
    for folder in folders:
        try:
            task = load_task_folder(folder)
        except TaskFolderError as error:
            if _chosen(folder.name, include, exclude):
                broken.append(str(error))
            continue
        if task.name in loaded:
            raise DatasetError(
                f"dataset {where}: two tasks have the id {task.name!r}: {loaded[task.name].path} and {task.path}; "
                "rename one ([task] name, or its folder)"
            )
        loaded[task.name] = task
    if broken:
        raise DatasetError(_all_broken(where, broken))
    ids = sorted(id for id in loaded if _chosen(id, include, exclude))
    if not ids:
        raise DatasetError(_nothing_left(where, loaded, include, exclude))
    if sample_seed is not None:
        random.Random(sample_seed).shuffle(ids)
    tasks = [loaded[id] for id in sorted(ids[:limit])]
    images = _images(task.path for task in tasks)
    return Dataset(name, tuple(FolderTask(task, sandbox) for task in tasks), _digest(tasks, images), images)


def ensure_images(dataset: Dataset) -> list[str]:
    """Builds the images that a set brings along where the Docker engine lacks them; returns the tags built.

    Raises EnvironmentFailure of class environment_start where no engine answers, environment_build where a build fails.
    """
    if not dataset.images:
        return []
    import docker
    from docker.errors import BuildError, DockerException, ImageNotFound

    try:
        client = docker.from_env(timeout=600)
    except (DockerException, OSError) as error:
        raise EnvironmentFailure(
            f"dataset {dataset.name}: no Docker engine answers: {error}; start one, or use the local sandbox",
            "environment_start",
        ) from error
    built = []
    try:
        for tag, context in dataset.images.items():
            try:
                client.images.get(tag)
            except ImageNotFound:
                client.images.build(path=str(context), tag=tag, rm=True)
                built.append(tag)
    except (DockerException, OSError) as error:
        log = "".join(step.get("stream", "") for step in error.build_log) if isinstance(error, BuildError) else ""
        raise EnvironmentFailure(
            f"dataset {dataset.name}: the image {tag} cannot be built from {context}: "
            f"{' '.join([str(error), log.strip()[-500:]]).strip()}",
            "environment_build",
        ) from error
    finally:
        client.close()
    return built


def export_dataset(where: str, folder: str | Path) -> Path:
    """Copies a set with its image and a README to a new or empty folder, which it returns.

    Raises DatasetError for a set that cannot be loaded or is made of several with images of their own, FileExistsError
    where something is in the folder.
    """
    target = Path(folder).absolute()
    dataset = load_dataset(where, sandbox=SandboxSettings())
    if len(dataset.images) > 1:
        raise DatasetError(
            f"dataset {where}: has several images ({_some(list(dataset.images))}); export its sets singly"
        )
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; name a new folder")
    for context in dataset.images.values():
        _copy(context, target / "image")
    for task in dataset.tasks:
        _copy(task.folder.path, target / task.id)
    (target / "README.md").write_text(_readme(dataset, target.name), encoding="utf-8")
    return target


def _readme(dataset: Dataset, folder: str) -> str:
    isolated = any(task.folder.network == "no-network" for task in dataset.tasks)
    return _README.format(
        name=dataset.name,
        count=len(dataset.tasks),
        folder=folder,
        images="".join(_IMAGE_NOTE.format(tag=tag, context=f"{folder}/image") for tag in dataset.images),
        network=_NETWORK_NOTE.format(folder=folder) if isolated else "",
    )


def _copy(source: Path, target: Path) -> None:
    """With scripts executable again: a wheel does not keep that, and other tools may expect it."""
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for script in (target / "tests/test.sh", target / "solution/solve.sh"):
        if script.is_file():
            script.chmod(0o755)


# Where the task folders are


def _find(where: str) -> tuple[str, list[Path]]:
    """Name and task folders of a set."""
    if where in SHIPPED:
        return where, _folders_in(SHIPPED[where], where)
    path = Path(where).expanduser()
    if path.is_dir():
        name = path.resolve().name
        return (name, [path]) if _is_task(path) else (name, _folders_in(path, where))
    registry = re.fullmatch(r"(.*\.json)(?::([^@]*)(?:@(.*))?)?", where)
    if registry and Path(registry[1]).expanduser().is_file():
        return _registered(Path(registry[1]).expanduser(), registry[2] or None, registry[3] or None)
    if path.is_file():
        return path.stem, _listed(path)
    near = difflib.get_close_matches(where, SHIPPED, n=1, cutoff=0.5)
    raise DatasetError(
        f"no dataset {where!r}{f'; did you mean {near[0]}?' if near else ''}: it is neither a shipped one "
        f"({', '.join(SHIPPED)}) nor a folder, a list file or a registry.json here"
    )


def _is_task(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TASK_FILES)


def _folders_in(folder: Path, where: str) -> list[Path]:
    found = sorted(child for child in folder.iterdir() if child.is_dir() and _is_task(child))
    if not found:
        raise DatasetError(f"dataset {where}: no task folder in {folder} (one with a task.toml)")
    return found


def _listed(file: Path) -> list[Path]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise DatasetError(f"dataset {file}: is no list of task folders: not UTF-8 (byte {error.start})") from None
    paths = [file.parent / Path(line).expanduser() for line in lines if line and not line.startswith("#")]
    if not paths:
        raise DatasetError(f"dataset {file}: the list names no task folder")
    return paths


def _registered(file: Path, name: str | None, version: str | None) -> tuple[str, list[Path]]:
    """Name and local task folders of one dataset of a registry."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8-sig"))
        known = [(str(entry["name"]), str(entry.get("version", "")), list(entry["tasks"])) for entry in entries]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DatasetError(
            f"registry {file}: is not a list of datasets with name, version and tasks ({type(error).__name__}: {error})"
        ) from None
    fitting = [entry for entry in known if name in (None, entry[0]) and version in (None, entry[1])]
    if len(fitting) != 1:
        wanted = f"{name or 'any'}{f'@{version}' if version else ''}"
        choices = ", ".join(f"{entry[0]}@{entry[1]}" for entry in known) or "none"
        problem = "is not there" if not fitting else "is more than one dataset"
        raise DatasetError(f"registry {file}: {wanted} {problem}; write {file}:NAME@VERSION with one of: {choices}")
    found_name, found_version, tasks = fitting[0]
    if not tasks:
        raise DatasetError(f"registry {file}: {found_name}@{found_version} lists no task")
    return f"{found_name}@{found_version}" if found_version else found_name, _local(file, tasks)


def _local(file: Path, tasks: Iterable[Any]) -> list[Path]:
    paths, remote = [], []
    for task in tasks:
        if not isinstance(task, Mapping) or not isinstance(task.get("path"), str):
            raise DatasetError(f"registry {file}: the task {task!r} has no path")
        path = file.parent / task["path"]
        if task.get("git_url") and not path.is_dir():
            commit = task.get("git_commit_id") or "HEAD"
            remote.append(f"{task['path']} (git clone {task['git_url']}, git checkout {commit})")
        paths.append(path)
    if remote:
        raise DatasetError(
            f"registry {file}: {len(remote)} tasks are in git repositories and nothing is fetched here; clone the "
            f"repository and give the folder of the tasks, or the registry inside the clone: {_some(remote)}"
        )
    return paths


# What is chosen


def _chosen(id: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    wanted = not include or any(fnmatchcase(id, pattern) for pattern in include)
    return wanted and not any(fnmatchcase(id, pattern) for pattern in exclude)


def _all_broken(where: str, broken: Sequence[str]) -> str:
    if len(broken) == 1:
        return f"dataset {where}: {broken[0]}"
    return "\n  ".join([f"dataset {where}: {len(broken)} tasks are broken", *_first(broken)])


def _nothing_left(where: str, loaded: Mapping[str, TaskFolder], include: Sequence[str], exclude: Sequence[str]) -> str:
    patterns = " and ".join(
        f"{word} {', '.join(given)}" for word, given in (("include", include), ("exclude", exclude)) if given
    )
    return f"dataset {where}: none of its {len(loaded)} tasks is left after {patterns}; ids: {_some(sorted(loaded))}"


def _first(texts: Sequence[str]) -> Iterator[str]:
    yield from texts[:_SHOWN]
    if len(texts) > _SHOWN:
        yield f"and {len(texts) - _SHOWN} more"


def _some(texts: Sequence[str]) -> str:
    return ", ".join(_first(texts))


# What it is made of


def _images(tasks: Iterable[Path]) -> dict[str, Path]:
    """The images beside the task folders, by tag."""
    images: dict[str, Path] = {}
    for parent in dict.fromkeys(task.parent for task in tasks):
        context = parent / "image"
        if not ((context / "Dockerfile").is_file() and (context / "TAG").is_file()):
            continue
        tag = (context / "TAG").read_text(encoding="utf-8").strip()
        if images.setdefault(tag, context) != context:
            raise DatasetError(
                f"the image {tag} is described twice: {images[tag]} and {context}; rename one in its TAG"
            )
    return images


def _digest(tasks: Iterable[TaskFolder], images: Mapping[str, Path]) -> str:
    parts = [f"{task.name} {task.checksum}" for task in tasks]
    parts += [f"image {tag} {folder_checksum(context)}" for tag, context in sorted(images.items())]
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()
