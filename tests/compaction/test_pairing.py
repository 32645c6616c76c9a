"""What must be kept beside a model, and how another setting is told from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compaction.pairing import PAIRING, Pairing, TrainedStage, pairing_differences, pairing_of, read_pairing
from compaction.pairing import write_pairing as write
from compaction.settings import AgentSettings, CompactionSettings
from compaction.summaries import load_prompt_pack

AGENT = AgentSettings()
STAGE = TrainedStage(stage="sft", data="what it read", steps=3, seed=1, settings={}, git_commit=None, versions={})
TRAINED = pairing_of(AGENT, "org/model", [STAGE])


def changed(**compaction: Any) -> AgentSettings:
    return AGENT.model_copy(update={"compaction": CompactionSettings(**compaction)})


def differences(agent: AgentSettings, **evaluated: list[int]) -> list[str]:
    """Evaluated at the agent's own point unless said otherwise."""
    point = {name: [getattr(agent.compaction, name)] for name in ("window", "cap", "keep_recent")}
    return pairing_differences(TRAINED, agent, point | evaluated)


def test_it_is_written_beside_the_weights_with_the_prompts_own_texts(tmp_path: Path) -> None:
    write(tmp_path, TRAINED)
    assert read_pairing(tmp_path) == TRAINED
    assert TRAINED.prompt_pack.resume == load_prompt_pack("nine-items").resume
    assert (TRAINED.window, TRAINED.threshold, TRAINED.keep_task) == (65_536, 10_240, False)


def test_a_model_that_says_nothing_has_none(tmp_path: Path) -> None:
    assert read_pairing(tmp_path) is None


@pytest.mark.parametrize(("text", "place"), [("{", "the file"), ('{"window": 3}', "scaffold")])
def test_a_damaged_one_is_named(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / PAIRING).write_text(text)
    with pytest.raises(ValueError, match=rf"{PAIRING} is no pairing \({place}: .*\); mend it, or remove it"):
        read_pairing(tmp_path)


def test_its_prompts_are_a_prompt_pack(tmp_path: Path) -> None:
    path = write(tmp_path, TRAINED)
    assert load_prompt_pack(str(path)) == load_prompt_pack("nine-items")
    assert differences(changed(prompt_pack=str(path))) == []


def test_the_same_setting_is_no_difference() -> None:
    assert differences(AGENT) == []
    assert differences(changed(max_response=512, summary_retries=0)) == []


@pytest.mark.parametrize(
    ("agent", "line"),
    [
        (AGENT.model_copy(update={"scaffold": "shell-line"}), "scaffold: trained with bash-block, here shell-line"),
        (AGENT.model_copy(update={"thinking": True}), "thinking: trained with None, here True"),
        (changed(threshold=500), "threshold: trained with 10240, here 500"),
        (changed(summary_cap=99), "summary_cap: trained with 4096, here 99"),
        (changed(keep_task=True), "keep_task: trained with False, here True"),
        (changed(window=32_768), "window: trained with 65536, here 32768"),
        (changed(cap=1), "cap: trained with 3, here 1"),
        (changed(keep_recent=0), "keep_recent: trained with 2, here 0"),
    ],
)
def test_each_difference_is_a_line(agent: AgentSettings, line: str) -> None:
    assert differences(agent) == [line]


def test_other_texts_of_the_prompt_pack_are_named(tmp_path: Path) -> None:
    pack = TRAINED.prompt_pack.model_copy(update={"name": "mine", "resume": "Go on: {summary}"})
    path = tmp_path / "mine.yaml"
    path.write_text(pack.model_dump_json())
    line = "prompt_pack: trained with pack nine-items, here mine; other texts: resume"
    assert differences(changed(prompt_pack=str(path))) == [line]


def test_what_is_swept_is_one_line() -> None:
    lines = differences(AGENT, window=[32_768, 65_536], cap=[0, 1, 3], keep_recent=[2])
    assert lines == ["swept beyond its training: window 32768 (trained with 65536); cap 0, 1 (trained with 3)"]
    assert differences(changed(threshold=500), cap=[0, 3]) == [
        "threshold: trained with 10240, here 500",
        "swept beyond its training: cap 0 (trained with 3)",
    ]


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match="windoww"):
        Pairing.model_validate(TRAINED.model_dump() | {"windoww": 3})
