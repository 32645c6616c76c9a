"""Cells of several seeds as one: which cell is the preset's, what is paired with what."""

from __future__ import annotations

import pytest

from evaluation.analysis.pooling import compare_cells, own_cells, pooled, pooled_interval, pooled_mean
from evaluation.grid import Cell
from tests.evaluation.synthetic import PRESET, make_cell


def cell(variant="base", seed=0, window=512, cap=3, keep=1, temperature=1.0, p=0.5, n_tasks=20):
    return make_cell(Cell(variant, seed, window, cap, keep, temperature), p, n_tasks=n_tasks)


def test_the_presets_own_cells_are_found_among_others():
    cells = [
        cell(seed=1),
        cell(seed=0),
        cell(window=768),
        cell(cap=1),
        cell(cap=0, keep=None),
        cell(keep=2),
        cell(temperature=0.0),
        cell(variant="compactionrl"),
        cell(window=2048, cap=0, keep=None),
    ]
    assert own_cells(cells, PRESET, "base") == [cells[1], cells[0]]
    assert own_cells(cells, PRESET, "base", greedy=True) == [cells[6]]
    assert [c for c in cells if PRESET.is_long(c.cell)] == [cells[8]]
    assert [c for c in cells if PRESET.is_at(c.cell, cap=0)] == [cells[4]]


def test_one_cell_twice_is_refused():
    with pytest.raises(ValueError, match="two results for base · seed 0"):
        own_cells([cell(), cell()], PRESET, "base")


def test_pooled_units_are_seed_and_task():
    cells = [cell(seed=0, p=0.5), cell(seed=1, p=1.0)]
    values = pooled(cells)
    assert len(values) == 40
    assert "1/trail-3" in values
    assert pooled_mean(cells) == pytest.approx(0.75)
    interval = pooled_interval(cells)
    assert interval.low < 0.75 < interval.high
    assert pooled_mean([]) is None
    assert pooled_interval([]) is None


def test_seeds_are_paired_with_their_own_base():
    trained = [cell("compactionrl", seed, p=p) for seed, p in ((0, 0.6), (1, 0.8))]
    base = [cell("base", seed, p=p) for seed, p in ((0, 0.5), (1, 0.3))]
    result = compare_cells(trained, base)
    assert (result.n_tasks, result.n_only_one) == (40, 0)
    assert result.difference == pytest.approx((0.1 + 0.5) / 2)
    assert result.test == "mcnemar"


def test_a_base_of_one_seed_is_compared_with_every_seed():
    trained = [cell("compactionrl", seed, p=0.8) for seed in (3, 4)]
    result = compare_cells(trained, [cell("base", 0, p=0.5)])
    assert (result.n_tasks, result.difference) == (40, pytest.approx(0.3))


def test_seeds_that_only_one_side_has_are_left_out_and_counted():
    trained = [cell("compactionrl", seed) for seed in (0, 1, 2)]
    result = compare_cells(trained, [cell("base", seed) for seed in (0, 1)])
    assert (result.n_tasks, result.n_only_one) == (40, 20)


def test_summary_lengths_are_paired_on_tasks_where_both_compacted():
    long, short = cell("compactionrl", p=0.5), cell("base", p=0.5)
    both = long.task_summary_tokens.keys() & short.task_summary_tokens.keys()
    result = compare_cells([long], [short], "task_summary_tokens")
    assert result.n_tasks == len(both) < 20
    expected = sum(long.task_summary_tokens[t] - short.task_summary_tokens[t] for t in both) / len(both)
    assert result.difference == pytest.approx(expected)
    assert result.test == "sign-flip"
