"""Cells: each once, cap 0 under one name, and settings that are the cell's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction.settings import CompactionSettings
from evaluation.grid import Cell, format_tokens, greedy_cell, one_factor_cells, product_cells

BASE = CompactionSettings(window=65_536, cap=3, keep_recent=2)
sizes = st.lists(st.integers(1, 5), max_size=4)


def points(cells):
    return [(c.window, c.cap, c.keep_recent) for c in cells]


def test_one_factor_varies_one_at_a_time_around_the_presets_point():
    cells = one_factor_cells(BASE, (32_768, 65_536), (0, 1, 3), (0, 2), variant="base", seed=0)
    assert points(cells) == [
        (65_536, 3, 2),
        (32_768, 3, 2),
        (65_536, 0, None),
        (65_536, 1, 2),
        (65_536, 3, 0),
    ]


def test_at_cap_0_of_the_preset_keep_recent_makes_no_cells():
    base = CompactionSettings(window=1024, cap=0)
    cells = one_factor_cells(base, (512, 1024), (0,), (0, 1, 2), variant="base", seed=0)
    assert points(cells) == [(1024, 0, None), (512, 0, None)]


def test_product_has_every_combination_and_cap_0_once_per_window():
    cells = product_cells((512, 1024), (0, 1, 3), (0, 2), variant="base", seed=0)
    assert len(cells) == 2 * (1 + 2 * 2)
    assert points(cells)[:3] == [(512, 0, None), (512, 1, 0), (512, 1, 2)]


@given(sizes, sizes, sizes)
def test_no_cell_comes_twice_and_cap_0_has_no_keep_recent(windows, caps, keeps):
    caps = [cap - 1 for cap in caps]
    for cells in (
        one_factor_cells(BASE, windows, caps, keeps, variant="v", seed=1),
        product_cells(windows, caps, keeps, variant="v", seed=1),
    ):
        assert len(cells) == len(set(cells))
        assert all((cell.cap == 0) == (cell.keep_recent is None) for cell in cells)


def test_settings_of_a_cell_change_what_it_names_and_nothing_else():
    settings = Cell("base", 0, 81_920, 1, 0).settings(BASE)
    assert settings == BASE.model_copy(update={"window": 81_920, "cap": 1, "keep_recent": 0})
    assert Cell("base", 0, 65_536, 0, None).settings(BASE) == BASE.model_copy(update={"cap": 0})


def test_settings_of_a_cell_are_validated():
    with pytest.raises(ValueError, match="window"):
        Cell("base", 0, 0, 1, 0).settings(BASE)


def test_names_read_well_and_differ():
    cell = Cell("compactionrl", 2, 65_536, 3, 2)
    assert cell.name == "compactionrl · seed 2 · window 64k · cap 3 · keep 2"
    assert greedy_cell(cell).name == cell.name + " · greedy"
    assert Cell("base", 0, 500, 0, None).name == "base · seed 0 · window 500 · cap 0"


@pytest.mark.parametrize(("tokens", "text"), [(65_536, "64k"), (10_240, "10k"), (1000, "1,000"), (512, "512")])
def test_token_counts_read_as_the_paper_writes_them(tokens, text):
    assert format_tokens(tokens) == text


@pytest.mark.parametrize(("cap", "keep"), [(0, 2), (1, None)])
def test_a_cell_with_two_names_is_refused(cap, keep):
    with pytest.raises(ValueError, match="None at cap 0"):
        Cell("base", 0, 512, cap, keep)
