"""The paper's table: complete, unambiguous, and the gains that follow from it."""

from __future__ import annotations

from collections import Counter

import pytest

from evaluation.analysis.paper import load_paper


def test_no_score_is_published_twice():
    points = Counter((s.variant, s.model, s.benchmark, s.window, s.cap, s.keep_recent) for s in load_paper().scores)
    assert max(points.values()) == 1


def test_keep_recent_is_null_exactly_at_cap_0():
    assert all((s.keep_recent is None) == (s.cap == 0) for s in load_paper().scores)


@pytest.mark.parametrize(
    ("variant", "model", "benchmark", "gain"),
    [
        ("compactionrl", "30b", "swe", 0.055),
        ("compactionrl", "106b", "swe", 0.066),
        ("compactionrl", "106b", "tb", 0.049),
        ("no-summary-loss", "30b", "swe", 0.040),
        ("no-compaction", "30b", "swe", -0.023),
        ("no-compaction-long", "106b", "swe", 0.030),
        ("segment-mean", "106b", "swe", 0.002),
        ("base", "106b", "swe", 0.0),
    ],
)
def test_gain_over_base_under_compaction(variant, model, benchmark, gain):
    assert load_paper().gain(variant, model, benchmark) == pytest.approx(gain)


def test_gain_in_the_long_window():
    assert load_paper().gain("no-compaction-long", "106b", long=True) == pytest.approx(0.045)
    assert load_paper().gain("no-compaction-long", "30b", long=True) == pytest.approx(0.055)
    assert load_paper().gain("compactionrl", "30b", long=True) is None


def test_every_row_of_table_8_is_there():
    paper = load_paper()
    by_window = [paper.score("compactionrl", "106b", "swe", window=w, cap=3) for w in (32_768, 65_536, 81_920)]
    by_cap = [paper.score("compactionrl", "106b", "swe", window=81_920, cap=c) for c in (0, 1, 3)]
    by_keep = [paper.score("compactionrl", "106b", "swe", window=81_920, cap=3, keep_recent=k) for k in (0, 2)]
    assert by_window == [0.630, 0.655, 0.664]
    assert by_cap == [0.591, 0.653, 0.664]
    assert by_keep == [0.660, 0.664]


def test_direction_names_both_models_and_nothing_where_the_paper_has_nothing():
    assert load_paper().direction("compactionrl") == "+5.5 / +6.6"
    assert load_paper().direction("no-compaction") == "−2.3 / +2.7"
    assert load_paper().direction("segment-mean") == "– / +0.2"
    assert load_paper().direction("no-compaction-long", long=True) == "+5.5 / +4.5"
    assert load_paper().direction("base") == load_paper().direction("grpo") == ""
