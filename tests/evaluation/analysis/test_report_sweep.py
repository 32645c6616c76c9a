"""The page of a sweep: the answer first, the paper only where its variants ran; the heat maps."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from xml.etree import ElementTree

import pytest

from evaluation.analysis.heatmap import cost_maps, pass_at_1_maps
from evaluation.analysis.report import ReportData, render_report
from evaluation.analysis.sweep import sweep_table
from evaluation.analysis.sweep_tables import SWEEP_NOTES
from tests.evaluation.analysis.sweep_cells import cell_of, sweep_cells
from tests.evaluation.analysis.test_report import CURVES, Page
from tests.evaluation.synthetic import PRESET

ENDPOINT = sweep_cells(("acme/model-7b",), n_tasks=30, cost=0.01)
TRAINED = sweep_cells(("base", "compactionrl"), seeds=(0, 1), n_tasks=30)


def page_of(cells, **change) -> str:
    return render_report(ReportData(**{"title": "Sweep", "preset": PRESET, "cells": cells, "sweep": True, **change}))


@pytest.fixture(scope="module")
def endpoint() -> str:
    return page_of(ENDPOINT)


@pytest.fixture(scope="module")
def trained() -> str:
    return page_of(TRAINED, curves=CURVES)


def texts(svg: str) -> list[str]:
    return [t.text for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text") if t.text]


def test_page_leads_with_the_answer_and_ends_with_every_cell(endpoint):
    lead = re.search(r'<p class="lead">(.*?)</p>', endpoint).group(1)
    assert "is best with pass@1" in lead
    headings = re.findall(r"<h2>(.*?)</h2>", endpoint)
    assert headings == [
        "Every setting against the best",
        "Each factor by itself",
        "pass@1 by window, cap and keep_recent",
        "Cost by window, cap and keep_recent",
        "Every cell",
        "How to read this",
    ]
    assert all(escape(note) in endpoint for note in SWEEP_NOTES)
    assert endpoint.count('<tr class="best">') == 1


def test_page_of_an_endpoint_shows_nothing_of_the_papers_variants(endpoint):
    for text in ("paper", "compactionrl", "30B", "training with compaction", "training seed: nothing"):
        assert text not in endpoint.split("</style>")[1].replace("one variant and training seed", "")


def test_page_of_the_papers_variants_shows_them_beside_the_paper_after_the_sweep(trained):
    headings = re.findall(r"<h2>(.*?)</h2>", trained)
    assert headings.index("This run beside the paper") > headings.index("Every setting against the best")
    assert "Training" in headings
    assert "Sweeps" not in headings
    assert "Cost by window, cap and keep_recent" not in headings
    assert trained.count('<p class="lead">') == 2


def test_a_model_of_the_users_own_is_not_put_beside_the_paper():
    table = page_of([*TRAINED, *ENDPOINT]).split("This run beside the paper")[1].split("</table>")[0]
    assert "compactionrl" in table
    assert "acme" not in table


def test_page_loads_nothing_from_elsewhere_and_ids_are_unique(endpoint, trained):
    for page in (endpoint, trained):
        found = Page(page)
        assert found.loads == []
        assert len(found.ids) == len(set(found.ids)) > 0
        assert not re.search(r"url\((?!#)", page)


def test_same_sweep_gives_the_same_page(endpoint):
    assert page_of(ENDPOINT) == endpoint


def test_model_names_are_escaped():
    page = page_of([cell_of([1, 0], variant='<b>"x"', cap=cap) for cap in (1, 3)])
    assert "<b>" not in page.split("How to read this")[0]
    assert 'x""' not in page


def test_sweep_without_any_reward_is_written():
    page = page_of([cell_of([None, None], cap=cap, ci_low=None, ci_high=None) for cap in (0, 3)])
    assert "nothing to compare" in page
    assert "<svg" not in page
    assert "nan" not in page.lower().replace("nanum", "")


def test_heat_map_has_a_square_per_setting_and_cap_0_once_per_window():
    rows = sweep_table(ENDPOINT)
    (drawn,) = pass_at_1_maps(rows)
    found = texts(drawn.svg)
    assert sum("±" in text for text in found) == len(rows) == 21
    assert [text for text in found if text.startswith("keep ")] == ["keep 0", "keep 1", "keep 2"]
    assert sum("★" in text for text in found) == 1
    assert sum("≈" in text for text in found) == sum(row.verdict == "inside the noise" for row in rows)


def test_heat_map_leaves_missing_settings_blank_and_hatches_incomplete_ones():
    rows = sweep_table(ENDPOINT)
    (whole,) = pass_at_1_maps(rows)
    (part,) = pass_at_1_maps([replace(rows[1], coverage=0.9), *rows[3:]])
    assert sum("±" in text for text in texts(part.svg)) == 19
    assert ("<pattern" in whole.svg, "<pattern" in part.svg) == (False, True)
    assert "currentColor" in part.svg
    assert "#010203" not in part.svg


def test_variants_share_one_scale():
    by_variant = {m.variant: m for m in pass_at_1_maps(sweep_table(TRAINED))}
    rows = {v: [r for r in sweep_table(TRAINED) if r.variant == v] for v in by_variant}
    assert list(by_variant) == ["base", "compactionrl"]
    ticks = [[t for t in texts(m.svg) if re.fullmatch(r"0\.\d", t)] for m in by_variant.values()]
    assert ticks[0] == ticks[1] != []
    assert pass_at_1_maps(rows["base"])[0].variant == "base"


def test_setting_without_a_score_says_so_in_the_map():
    cells = [cell_of([1, 0], cap=1), cell_of([0, 0], cap=2), cell_of([None, None], cap=3)]
    (drawn,) = pass_at_1_maps(sweep_table(cells))
    assert "no score" in texts(drawn.svg)


def test_cost_map_only_where_something_cost_something():
    assert len(cost_maps(sweep_table(ENDPOINT))) == 1
    assert cost_maps(sweep_table(sweep_cells(n_tasks=4, cost=0.0))) == []
    assert cost_maps(sweep_table(sweep_cells(n_tasks=4, cost=None))) == []
    assert pass_at_1_maps(sweep_table([cell_of([1, 0])])) == []
