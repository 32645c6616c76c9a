from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from compaction.settings import Settings
from flows.experiment import ALL_VARIANTS, PRESETS, load_experiment
from flows.presets_loader import load_settings, parse_size, preset_names
from tasks.errors import UserError


class Inner(Settings):
    steps: int = Field(10, ge=0, description="policy updates")
    rate: float = Field(1e-3, description="learning rate")
    kind: Literal["token", "segment"] = "token"


class Outer(Settings):
    name: str
    ppo: Inner = Inner()
    windows: Annotated[tuple[int, ...], Field(description="windows in tokens")] = ()
    optional: Inner | None = None


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text("name: tiny\nppo:\n  steps: 4\n  rate: 1e-4\n")
    (tmp_path / "smoke.yaml").write_text("extends: tiny\nname: smoke\nppo:\n  steps: 1\n")
    return tmp_path


def load(presets: Path, *overrides: str, name: str = "tiny") -> Outer:
    return load_settings(Outer, presets, name, overrides)


def refused(presets: Path, *overrides: str, name: str = "tiny") -> str:
    with pytest.raises(UserError) as caught:
        load(presets, *overrides, name=name)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_preset_takes_what_it_does_not_say_from_the_one_it_extends(presets: Path) -> None:
    smoke = load(presets, name="smoke")
    assert (smoke.name, smoke.ppo.steps, smoke.ppo.rate) == ("smoke", 1, 1e-4)


def test_a_file_by_its_path_may_extend_a_preset(presets: Path, tmp_path: Path) -> None:
    own = tmp_path / "own" / "mine.yaml"
    own.parent.mkdir()
    own.write_text("extends: tiny\nname: mine\n")
    assert load(presets, name=str(own)).ppo.steps == 4


@pytest.mark.parametrize(
    ("override", "value"),
    [("ppo.steps=20", 20), ("ppo.steps=2k", 2_048), ("ppo.steps= 1m ", 1_048_576), ("ppo.steps='7'", 7)],
)
def test_overrides_hold_yaml_values_and_sizes(presets: Path, override: str, value: int) -> None:
    assert load(presets, override).ppo.steps == value


def test_sizes_are_read_inside_lists_and_only_where_an_integer_is_wanted(presets: Path) -> None:
    settings = load(presets, "windows=[64k, 10k, 5]", "name=10k")
    assert settings.windows == (65_536, 10_240, 5)
    assert settings.name == "10k"


def test_the_last_override_wins_and_makes_missing_tables(presets: Path) -> None:
    settings = load(presets, "optional.steps=1", "optional.steps=2")
    assert settings.optional is not None
    assert settings.optional.steps == 2


def test_an_unknown_key_is_refused_with_the_nearest_and_all_allowed(presets: Path) -> None:
    message = refused(presets, "ppo.stpes=3")
    assert message == "preset tiny: unknown key ppo.stpes; did you mean ppo.steps?; allowed: kind, rate, steps"
    assert "did you mean ppo?" in refused(presets, "pppo.steps=3")
    assert "optional.stps; did you mean optional.steps?" in refused(presets, "optional.stps=1")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("ppo.steps=-1", ["ppo.steps is -1", "greater than or equal to 0", "policy updates"]),
        ("ppo.steps=3x", ["ppo.steps is '3x'", "valid integer"]),
        ("ppo.kind=tokn", ["ppo.kind is 'tokn'", "did you mean token?", "allowed: token, segment"]),
        ("ppo", ["write it as key.key=value"]),
        ("=3", ["write it as key.key=value"]),
        ("ppo.=3", ["write it as key.key=value"]),
        ("ppo.steps=[1", ["not valid YAML"]),
        ("name.x=1", ["name is 'tiny', which holds no keys"]),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(presets: Path, override: str, parts: list[str]) -> None:
    message = refused(presets, override)
    assert all(part in message for part in parts), message


def test_several_mistakes_are_listed_together(presets: Path) -> None:
    message = refused(presets, "ppo.steps=-1", "windos=3")
    assert message.startswith("preset tiny: 2 mistakes\n  ")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: [", "not valid YAML"),
        ("- a", "must be a mapping"),
        ("name: a\nname: b", "key 'name' stands twice"),
        ("extends: bad", "goes in a circle"),
        ("extends: tinny", "did you mean tiny?"),
        ("name:", "name is None"),
        ("ppo: {}", "name is missing"),
    ],
)
def test_a_broken_preset_is_one_message(presets: Path, text: str, part: str) -> None:
    (presets / "bad.yaml").write_text(text)
    assert part in refused(presets, name="bad")


def test_an_unknown_preset_names_the_nearest(presets: Path) -> None:
    assert refused(presets, name="tny").startswith("no preset 'tny'; did you mean tiny?; presets: smoke, tiny")


def test_plain_sizes() -> None:
    assert [parse_size(text) for text in ("512", "64k", "10K", "1m")] == [512, 65_536, 10_240, 1_048_576]
    with pytest.raises(UserError, match="'many' is not a size"):
        parse_size("many")


@pytest.mark.parametrize("name", preset_names(PRESETS))
def test_every_shipped_preset_loads(name: str) -> None:
    asked = {"endpoint": ENDPOINT, "collect": COLLECT}.get(name, [])
    assert load_experiment(name, asked).name == name


ENDPOINT = ["endpoint.base_url=http://localhost:1/v1", "endpoint.model=m", "evaluation.dataset.path=bench12"]
COLLECT = [f"collect.{asked}" for asked in (*ENDPOINT[:2], "dataset.path=bench12")]


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("endpoint", ENDPOINT[2:], "engine openai needs an endpoint: --base-url"),
        ("endpoint", ENDPOINT[:2], "engine openai is evaluated on real tasks: --dataset bench12"),
        ("tiny", ENDPOINT[:2], "an endpoint is given, but engine is torch"),
        ("endpoint", ["engine=torch"], "engine torch trains a model and needs sft"),
        ("endpoint", ["engine=openia", *ENDPOINT], "did you mean openai"),
        ("endpoint", [*ENDPOINT, "agent.thinking=false"], "say it to the server: endpoint.request_extra"),
    ],
)
def test_who_acts_is_asked_for_with_the_flag_that_is_missing(preset: str, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_experiment(preset, overrides)


def test_a_record_holds_what_the_experiment_reads_and_nothing_else() -> None:
    config = load_experiment("endpoint", ENDPOINT).config()
    assert config["endpoint"]["model"] == "m"
    assert {"sft", "ppo", "trainer", "variants", "seeds"}.isdisjoint(config)
    assert "endpoint" not in load_experiment("tiny").config()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["variants=all", "seeds=0,1,2"], {"variants": ALL_VARIANTS, "seeds": (0, 1, 2)}),
        (["variants=base,supo", "seeds=3"], {"variants": ("base", "supo"), "seeds": (3,)}),
        (["variants=[base]", "seeds=[4, 5]"], {"variants": ("base",), "seeds": (4, 5)}),
    ],
)
def test_lists_may_be_written_as_on_a_command_line(overrides: list[str], expected: dict[str, Any]) -> None:
    experiment = load_experiment("smoke", overrides)
    assert {name: getattr(experiment, name) for name in expected} == expected


def test_a_misspelt_variant_is_one_mistake() -> None:
    with pytest.raises(UserError, match=r"variants\.0 is 'compactionlr'; did you mean compactionrl\?") as caught:
        load_experiment("smoke", ["variants=compactionlr"])
    assert "mistakes" not in str(caught.value)
