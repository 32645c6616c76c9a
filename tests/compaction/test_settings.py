from __future__ import annotations

import pytest
from pydantic import ValidationError

from compaction.settings import AgentSettings, CompactionSettings


def test_defaults_are_the_papers_30b_setting():
    settings = CompactionSettings()
    assert (settings.window, settings.threshold, settings.max_response) == (65_536, 10_240, 10_240)
    assert (settings.cap, settings.keep_recent, settings.keep_task) == (3, 2, False)
    assert AgentSettings().max_turns == 250
    assert AgentSettings().temperature == 1.0


def test_unknown_keys_are_refused():
    with pytest.raises(ValidationError, match="windoww"):
        CompactionSettings.model_validate({"windoww": 5})


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        CompactionSettings().window = 5  # type: ignore[misc]


@pytest.mark.parametrize("change", [{"window": 0}, {"cap": -1}, {"keep_recent": -1}, {"summary_cap": 0}])
def test_sizes_out_of_range_are_refused(change: dict[str, int]):
    with pytest.raises(ValidationError):
        CompactionSettings.model_validate(change)


def test_a_smallest_response_above_the_largest_is_refused_with_both_values():
    with pytest.raises(ValidationError, match=r"min_response=20 .* max_response=10"):
        CompactionSettings.model_validate({"min_response": 20, "max_response": 10})


def test_settings_round_trip_through_json():
    settings = AgentSettings.model_validate({"temperature": 0.1, "compaction": {"cap": 0, "keep_recent": 0}})
    assert AgentSettings.model_validate_json(settings.model_dump_json()) == settings
