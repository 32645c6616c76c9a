"""The page, its figures and the headline table: complete, self-contained, the same for the same data."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from evaluation.analysis import plots
from evaluation.analysis.plots import CurvePoint
from evaluation.analysis.report import ReportData, render_report, write_report
from evaluation.analysis.tables import RESULT_COLUMNS, format_p, format_row, headline_metrics, result_table, variants_in
from evaluation.grid import Cell
from tests.evaluation.synthetic import PRESET, make_cell, make_cells

CURVES = [
    CurvePoint(variant, seed, step, {plots.REWARD: 0.3 + 0.1 * step, plots.SUMMARY_TOKENS: None if step == 0 else 30.0})
    for variant in ("compactionrl", "no-summary-loss")
    for seed in (0, 1)
    for step in range(4)
]


@pytest.fixture(scope="module")
def cells():
    return make_cells(n_tasks=40, seeds=(0, 1))


@pytest.fixture(scope="module")
def page(cells):
    return render_report(data(cells))


def data(cells, **change) -> ReportData:
    fields = {
        "title": "Tiny reproduction",
        "preset": PRESET,
        "cells": cells,
        "curves": CURVES,
        "provenance": {"git commit": "0123abc", "configuration": {"ppo": {"steps": 4}}, "note": None},
        "links": {"MLflow": "http://127.0.0.1:5000", "output": "runs/x"},
    }
    return ReportData(**{**fields, **change})


class Page(HTMLParser):
    """Collects ids and everything that could load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.loads += [f"{tag} {name}={attributes[name]}" for name in ("src", "srcset") if name in attributes]
        if tag in ("link", "script", "iframe", "object", "embed"):
            self.loads.append(tag)
        if tag != "a":
            hrefs = [v for k, v in attributes.items() if k in ("href", "xlink:href") and not v.startswith("#")]
            self.loads += hrefs


def test_page_loads_nothing_from_elsewhere(page):
    assert Page(page).loads == []
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_ids_of_all_figures_together_are_unique(page):
    ids = Page(page).ids
    assert ids
    assert len(ids) == len(set(ids))


def test_same_data_gives_the_same_page(cells, page):
    assert render_report(data(cells)) == page


def test_page_shows_every_variant_setting_and_caution(page, cells):
    for text in (*variants_in(cells), "0123abc", "&#34;steps&#34;: 4", "http://127.0.0.1:5000", "runs/x"):
        assert text in page
    assert page.count("<svg") == 7
    assert "have no reward" not in page


def test_page_of_one_factor_sweeps_has_no_part_of_a_full_sweep(page):
    for text in ("Every setting against the best", "Each factor by itself", "keep_recent</h2>"):
        assert text not in page
    assert "This run beside the paper" in page
    assert "<h2>Sweeps</h2>" in page


def test_every_cell_shows_commands_tokens_and_cost(page):
    for column in ("commands (again)", "prompt tokens (cached)", "sampled tokens", "cost, $"):
        assert f"<th>{column}</th>" in page


def test_unscored_trials_are_said_on_top(cells):
    broken = make_cell(Cell("base", 0, 512, 3, 1), 0.5, n_tasks=40, errored=3)
    page = render_report(data([broken], curves=()))
    assert "3 of 40 trials have no reward" in page
    assert "(92.5% scored)" in page
    assert "one training seed" in page


def test_text_from_outside_is_escaped(cells):
    page = render_report(data(cells[:1], title="<b>x</b>", provenance={"<i>": "<script>"}, curves=()))
    assert "<b>x</b>" not in page
    assert "<script>" not in page
    assert "<i>" not in page


def test_report_of_a_cell_without_any_reward_is_written(tmp_path):
    cell = make_cell(Cell("base", 0, 512, 3, 1), 0.5, n_tasks=3, errored=3)
    path = write_report(tmp_path / "runs" / "report.html", data([cell], curves=()))
    assert "NaN" not in path.read_text()
    assert "nan" not in path.read_text()


def test_figures_are_well_formed_and_take_the_pages_colour(cells):
    rows = result_table(cells, PRESET)
    figures = [
        plots.pass_at_1_bars(rows),
        plots.compacted_split(rows),
        plots.training_curves(CURVES, plots.REWARD, "reward"),
        *(plots.sweep_figure(cells, PRESET, factor) for factor in ("window", "cap", "keep_recent")),
    ]
    for svg in figures:
        root = ElementTree.fromstring(svg)
        assert root.get("width") is None
        assert root.get("viewBox")
        assert "currentColor" in svg
        assert "#010203" not in svg


def test_figures_without_data_are_left_out(cells):
    assert plots.training_curves(CURVES, "train/nothing", "x") is None
    assert plots.training_curves([], plots.REWARD, "x") is None
    assert plots.sweep_figure(cells[:1], PRESET, "window") is None
    assert plots.pass_at_1_bars([]) is plots.compacted_split([]) is None


def test_seeds_that_stopped_at_different_steps_are_drawn():
    uneven = [*CURVES, CurvePoint("compactionrl", 2, 9, {plots.REWARD: 0.5})]
    assert plots.training_curves(uneven, plots.REWARD, "reward")


def test_headline_rows_are_the_presets_point_and_the_long_window(cells):
    rows = result_table(cells, PRESET)
    assert [(row.variant, row.long) for row in rows] == [
        ("base", False),
        ("compactionrl", False),
        ("no-summary-loss", False),
        ("no-compaction", False),
        ("no-compaction-long", False),
        ("segment-mean", False),
        ("base", True),
        ("no-compaction-long", True),
    ]
    trained, long = rows[1], rows[7]
    assert trained.pass_at_1 == pytest.approx(0.74, abs=0.02)
    assert trained.gain.difference == pytest.approx(0.41, abs=0.02)
    assert trained.gain.n_tasks == 80
    assert trained.seeds == 2
    assert trained.paper == "+5.5 / +6.6"
    assert long.gain.difference == pytest.approx(0.25)
    assert rows[0].gain is None
    assert rows[0].paper == ""


def test_headline_metrics_are_the_tables_numbers(cells):
    metrics, rows = headline_metrics(cells, PRESET), result_table(cells, PRESET)
    assert metrics["pass_at_1/compactionrl"] == rows[1].pass_at_1
    assert metrics["gain/compactionrl"] == rows[1].gain.difference
    assert metrics["gain_long/no-compaction-long"] == rows[7].gain.difference
    assert metrics["gain/base"] is None
    assert len(metrics) == 2 * len(rows)


def test_row_as_text_has_a_text_for_every_column(cells):
    for row in result_table(cells, PRESET):
        texts = format_row(row)
        assert len(texts) == len(RESULT_COLUMNS)
        assert all(texts)
    assert format_row(result_table(cells, PRESET)[1])[1] == "512 × 4"


def test_small_p_is_not_rounded_to_zero():
    assert (format_p(0.0001), format_p(0.0416), format_p(None)) == ("< 0.001", "0.042", "–")


def test_variants_come_in_the_houses_order_then_by_name(cells):
    extra = [make_cell(Cell(name, 0, 512, 3, 1), 0.5, n_tasks=2) for name in ("zeta", "supo", "alpha", "base")]
    assert variants_in(extra) == ["base", "supo", "alpha", "zeta"]
