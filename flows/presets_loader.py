"""Presets: YAML files under a folder, overridden by `a.b=c`, checked against a settings model.

Every mistake becomes one message that names the place, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from tasks.errors import UserError

Model = TypeVar("Model", bound=BaseModel)
SIZE = re.compile(r"\s*(\d+)\s*([kKmM])\s*")
SIZE_UNITS = {"k": 1_024, "m": 1_024**2}
INTEGER_ERRORS = ("int_parsing", "int_type", "int_from_float")


def load_settings(model: type[Model], folder: Path, name_or_path: str, overrides: Sequence[str] = ()) -> Model:
    """Read a preset (`extends: other` takes another one as its base), apply overrides, validate. Raises UserError."""
    content = read_preset(folder, name_or_path)
    for override in overrides:
        _apply(content, override)
    return validate(model, content, where=f"preset {name_or_path}")


def preset_names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_preset(folder: Path, name_or_path: str, _chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    path = _find(folder, name_or_path)
    if path in _chain:
        raise UserError(f"preset {name_or_path}: `extends` goes in a circle: {' → '.join(p.stem for p in _chain)}")
    content = _read_yaml(path)
    base = content.pop("extends", None)
    if base is None:
        return content
    return _merged(read_preset(folder, str(base), (*_chain, path)), content)


def validate(model: type[Model], content: Mapping[str, Any], *, where: str) -> Model:
    """Validate with sizes such as 64k read where the model wants an integer. Raises UserError."""
    content = dict(content)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        if not _read_sizes(content, error):
            raise UserError(_describe(model, error, where)) from error
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise UserError(_describe(model, error, where)) from error


def parse_size(text: str) -> int:
    """64k = 65,536 tokens, 1m = 1,048,576, plain digits as they are. Raises UserError."""
    if text.strip().isdigit():
        return int(text)
    if match := SIZE.fullmatch(text):
        return int(match[1]) * SIZE_UNITS[match[2].lower()]
    raise UserError(f"{text!r} is not a size: write tokens as 2048 or 64k (= 65,536)")


def _find(folder: Path, name_or_path: str) -> Path:
    if name_or_path in preset_names(folder):
        return folder / f"{name_or_path}.yaml"
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path.resolve()
    names = preset_names(folder)
    raise UserError(
        f"no preset {name_or_path!r}{_did_you_mean(name_or_path, names)}; presets: {', '.join(names)}; "
        f"or give the path of a YAML file"
    )


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with two surprises less: 1e-4 is a number, and a key that stands twice is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the preset {path}: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"the preset {path} is not valid YAML: {_one_line(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"the preset {path} holds a {type(content).__name__}; it must be a mapping of settings")
    return content


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _apply(content: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"--set {override!r}: write it as key.key=value, for example --set ppo.steps=20")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: the value is not valid YAML: {_one_line(error)}") from error
    place = content
    for depth, key in enumerate(keys[:-1], start=1):
        if place.get(key) is None:
            place[key] = {}
        if not isinstance(place[key], dict):
            raise UserError(f"--set {override!r}: {'.'.join(keys[:depth])} is {place[key]!r}, which holds no keys")
        place[key] = dict(place[key])
        place = place[key]
    place[keys[-1]] = value


def _read_sizes(content: dict[str, Any], error: ValidationError) -> bool:
    """Replace sizes that pydantic wanted as integers, in place. True if any was replaced."""
    replaced = False
    for problem in error.errors():
        value = problem["input"]
        if problem["type"] in INTEGER_ERRORS and isinstance(value, str) and SIZE.fullmatch(value):
            replaced |= _replace(content, problem["loc"], parse_size(value))
    return replaced


def _replace(content: Any, loc: tuple[int | str, ...], value: int) -> bool:
    """Set the value at `loc`, copying on the way down; a comma list counts as the list it stands for."""
    *path, last = _settings_path(loc)
    for key in path:
        child = content[key]
        if isinstance(child, str):
            child = [part.strip() for part in child.split(",")]
        content[key] = list(child) if isinstance(child, (list, tuple)) else dict(child)
        content = content[key]
    content[last] = value
    return True


def _describe(model: type[BaseModel], error: ValidationError, where: str) -> str:
    problems = error.errors()
    elements = {problem["loc"][:-1] for problem in problems if problem["loc"]}
    lines = [
        _describe_one(model, problem)
        for problem in problems
        if not (problem["type"] == "too_short" and problem["loc"] in elements)  # short only because an element is wrong
    ]
    if len(lines) == 1:
        return f"{where}: {lines[0]}"
    return "\n  ".join([f"{where}: {len(lines)} mistakes", *lines])


def _describe_one(model: type[BaseModel], problem: Any) -> str:
    loc = tuple(problem["loc"])
    name = ".".join(str(part) for part in _settings_path(loc)) or "settings"
    if problem["type"] == "extra_forbidden":
        owner = _model_at(model, loc[:-1])
        allowed = sorted(owner.model_fields) if owner else []
        prefix = "".join(f"{part}." for part in _settings_path(loc)[:-1])
        nearest = _did_you_mean(str(loc[-1]), allowed, prefix)
        return f"unknown key {name}{nearest}; allowed: {', '.join(allowed)}"
    if problem["type"] == "missing":
        return f"{name} is missing{_meaning(model, loc)}"
    if problem["type"] == "literal_error":
        allowed = [str(value) for value in _literals(model, loc)]
        given = problem["input"]
        return f"{name} is {given!r}{_did_you_mean(str(given), allowed)}; allowed: {', '.join(allowed)}"
    message = problem["msg"].removeprefix("Value error, ")
    if isinstance(problem["input"], (dict, BaseModel)) and problem["type"] == "value_error":
        return f"{name}: {message}"
    return f"{name} is {problem['input']!r}: {message}{_meaning(model, loc)}"


def _meaning(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    fields = [part for part in loc if isinstance(part, str)]
    owner = _model_at(model, tuple(fields[:-1])) if fields else None
    field = owner.model_fields.get(fields[-1]) if owner else None
    return f" ({field.description})" if field and field.description else ""


def _did_you_mean(given: str, allowed: Sequence[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _settings_path(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Without the names of models, which pydantic puts behind a setting that may hold one of several."""
    *path, last = loc or ("",)
    return (*(part for part in path if isinstance(part, int) or not part[:1].isupper()), last) if loc else ()


def _model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The settings model that a path of keys leads to; where it may be one of several, the one named next."""
    among = [model]
    for part in loc:
        if isinstance(part, int):
            continue
        named = [each for each in among if each.__name__ == part]
        field = among[0].model_fields.get(part)
        among = named or (list(_models(field.annotation)) if field else [])
        if not among:
            return None
    return among[0]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def _literals(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[Any]:
    fields = [part for part in loc if isinstance(part, str)]
    owner = _model_at(model, tuple(fields[:-1]))
    field = owner.model_fields.get(fields[-1]) if owner else None
    return list(_literal_values(field.annotation)) if field else []


def _literal_values(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
        return
    for argument in typing.get_args(annotation):
        yield from _literal_values(argument)
