"""The part of a Dockerfile that needs no image: FROM, WORKDIR, ENV and COPY of plain paths. The rest is refused."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from compaction.protocols import EnvironmentFailure

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclass
class Layout:
    """What a Dockerfile leaves: files below `place`, a working directory, variables."""

    place: Callable[[PurePosixPath], Path]
    """Where a path of the sandbox is on this machine. Raises EnvironmentFailure where it may not be written."""
    environment: dict[str, str] = field(default_factory=dict)
    workdir: PurePosixPath = field(default_factory=lambda: PurePosixPath("/"))


def lay_out(dockerfile: Path, layout: Layout) -> None:
    """Does what the file says. Raises EnvironmentFailure, with the line, for what needs an image."""
    if (dockerfile.parent / ".dockerignore").exists():
        raise _refused(f"{dockerfile.parent}/.dockerignore is not supported")
    stages = 0
    for number, name, rest in _instructions(dockerfile.read_text("utf-8")):
        where = f"{dockerfile} line {number}"
        stages += name == "FROM"
        if stages > 1:
            raise _refused(f"{where}: a second FROM is not supported")
        step = _STEPS.get(name)
        if step is None:
            raise _refused(f"{where}: {name} is not supported")
        try:
            step(layout, dockerfile.parent, rest)
        except (OSError, ValueError) as error:
            raise _refused(f"{where}: {name} {rest}: {error}") from None


def _refused(what: str) -> EnvironmentFailure:
    return EnvironmentFailure(f"{what} without a container; use --env docker", "environment_start")


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, name, the rest) of each, lines that end in a backslash joined."""
    began, gathered = 0, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("#"):
            continue
        began = began if gathered else number
        gathered += line.strip() if not gathered else " " + line.strip()
        if gathered.endswith("\\"):
            gathered = gathered[:-1].rstrip() or " "
            continue
        name, _, rest = gathered.strip().partition(" ")
        if name:
            yield began, name.upper(), rest.strip()
        gathered = ""


def _from(layout: Layout, folder: Path, rest: str) -> None:
    """The machine's own tools stand in for the image."""


def _workdir(layout: Layout, folder: Path, rest: str) -> None:
    layout.workdir = _absolute(layout, _expanded(rest, layout.environment))
    if layout.workdir != PurePosixPath("/"):
        layout.place(layout.workdir).mkdir(parents=True, exist_ok=True)


def _env(layout: Layout, folder: Path, rest: str) -> None:
    words = shlex.split(rest)
    if not words:
        raise ValueError("a name and a value are needed")
    if "=" not in words[0]:  # the old form: one name, the rest is its value
        name, _, value = rest.partition(" ")
        words = [f"{name}={value.strip()}"]
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} has no value")
        layout.environment[name] = _expanded(value, layout.environment)


def _copy(layout: Layout, folder: Path, rest: str) -> None:
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    words = [_expanded(word, layout.environment) for word in words]
    option = next((word for word in words if word.startswith("--")), None)
    if option is not None:
        raise ValueError(f"{option} is not supported")
    if len(words) < 2:
        raise ValueError("a source and a destination are needed")
    *sources, destination = words
    target = layout.place(_absolute(layout, destination))
    into = destination.endswith(("/", "/.")) or destination == "." or len(sources) > 1 or target.is_dir()
    for name in sources:
        if any(c in name for c in "*?["):
            raise ValueError(f"the pattern {name} is not supported, only plain paths")
        source = (folder / name.lstrip("/")).resolve()
        if not source.is_relative_to(folder.resolve()):
            raise ValueError(f"{name} is outside the environment folder")
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        else:
            place = target / source.name if into else target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)


_STEPS: Mapping[str, Callable[[Layout, Path, str], None]] = {
    "FROM": _from,
    "WORKDIR": _workdir,
    "ENV": _env,
    "COPY": _copy,
}


def _absolute(layout: Layout, path: str) -> PurePosixPath:
    joined = layout.workdir / path
    if ".." in joined.parts:
        raise ValueError(f"`..` in {path} is not supported")
    return joined


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}` replaced, as far as the file has set them."""
    return _VARIABLE.sub(lambda found: environment.get(found[1] or found[2], ""), text)
