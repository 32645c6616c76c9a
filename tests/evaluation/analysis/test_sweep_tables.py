"""A sweep as text: raw CSV, the table for people, the sentences."""

from __future__ import annotations

import csv
import io
from dataclasses import fields, replace

import pytest

from evaluation.analysis.sweep import SweepRow, factor_answers, sweep_table
from evaluation.analysis.sweep_tables import (
    ANSWER_COLUMNS,
    SWEEP_COLUMNS,
    SWEEP_NOTES,
    answer_row,
    factor_lines,
    format_cost,
    format_sweep_row,
    sweep_answers,
    sweep_csv,
    sweep_markdown,
)
from tests.evaluation.analysis.sweep_cells import cell_of, sweep_cells


@pytest.fixture(scope="module")
def rows() -> list[SweepRow]:
    return sweep_table(sweep_cells(cost=0.01))


def test_csv_holds_raw_numbers_under_the_fields_names(rows):
    read = list(csv.DictReader(io.StringIO(sweep_csv(rows))))
    assert list(read[0]) == [f.name for f in fields(SweepRow)]
    assert len(read) == len(rows)
    for text, row in zip(read, rows, strict=True):
        for name, value in text.items():
            known = getattr(row, name)
            assert value == ("" if known is None else str(known))
    assert float(read[0]["pass_at_1"]) == rows[0].pass_at_1
    assert read[0]["keep_recent"] == ""


def test_row_as_text_has_a_text_for_every_column_and_the_answer_is_a_part_of_it(rows):
    for row in rows:
        texts = format_sweep_row(row)
        assert len(texts) == len(SWEEP_COLUMNS)
        assert all(texts)
        assert answer_row(row) == tuple(texts[SWEEP_COLUMNS.index(column)] for column in ANSWER_COLUMNS)


def test_where_nothing_was_solved_no_setting_is_called_best():
    answers = sweep_answers(sweep_table([cell_of([0.0, 0.0], cap=0, keep_recent=None), cell_of([0.0, 0.0])]))
    assert answers == ["no setting solved a task: there is nothing to choose by."]


def test_row_without_numbers_shows_dashes():
    (row,) = sweep_table([cell_of([None, None], cost=None, summary_tokens=None, pass_at_1_compacted=None)])
    texts = dict(zip(SWEEP_COLUMNS, format_sweep_row(replace(row, summary_tokens=None)), strict=True))
    assert {texts[name] for name in SWEEP_COLUMNS[4:] if name not in PER_TRIAL} == {"–", "0 / 2"}


PER_TRIAL = ("compactions", "commands (again)", "prompt tokens (cached)", "sampled tokens")


@pytest.mark.parametrize(
    ("dollars", "text"),
    [(None, "–"), (0.0, "0"), (1234.5, "1,234.50"), (0.25, "0.25"), (0.007684, "0.00768"), (0.0000012, "0.0000012")],
)
def test_cost_is_short_and_never_in_powers_of_ten(dollars, text):
    assert format_cost(dollars) == text


def test_markdown_holds_the_answers_the_table_and_every_note(rows):
    text = sweep_markdown([replace(row, variant="a|b") for row in rows])
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert {line.replace("\\|", "").count("|") for line in table} == {len(SWEEP_COLUMNS) + 1}
    assert all(note in text for note in SWEEP_NOTES)
    assert "is best with pass@1" in text.splitlines()[0]


def test_answer_names_the_best_how_many_are_close_and_the_cheapest_of_those():
    best = [1] * 19 + [0]
    cells = [
        cell_of(best, window=768, cost=20.0),
        cell_of([0, *best[1:]], window=512, cost=10.0),
        cell_of([1] * 4 + [0] * 16, window=384, cost=1.0),
    ]
    (text,) = sweep_answers(sweep_table(cells))
    assert text.startswith("window 768 · cap 3 · keep 1 is best with pass@1 0.950 [")
    assert "of the other 2 settings 1 are called worse and 1 inside the noise." in text
    assert "is window 512 · cap 3 · keep 1: −0.050 [−0.150, 0.000] for 50% less money per trial." in text


def test_without_prices_the_cheapest_is_that_with_the_fewest_tokens():
    best = [1] * 19 + [0]
    sizes = {"generated_tokens": 100.0, "cost": None}
    cells = [
        cell_of(best, window=768, prompt_tokens=900.0, **sizes),
        cell_of(best, window=384, prompt_tokens=1900.0, **sizes),
        cell_of([0, *best[1:]], window=512, prompt_tokens=400.0, **sizes),
    ]
    (text,) = sweep_answers(sweep_table(cells))
    assert text.startswith("window 384")
    assert "window 512 · cap 3 · keep 1: −0.050 [−0.150, 0.000] for 75% less prompt and sampled tokens" in text


def test_a_setting_that_scored_far_less_is_not_offered_as_the_cheapest():
    """By its own interval it is below the best, though the adjusted p calls it inside the noise."""
    cells = [cell_of([1] * 5 + [0] * 10, window=384), *(cell_of([1] * 10 + [0] * 5, window=w) for w in (512, 768))]
    cells += [cell_of([1] * 10 + [0] * 5, window=900 + i) for i in range(4)]
    cells[0] = cells[0].model_copy(update={"prompt_tokens": 1.0, "generated_tokens": 1.0})
    rows = sweep_table(cells)
    assert (rows[0].verdict, rows[0].difference_high < 0) == ("inside the noise", True)
    assert "window 384" not in sweep_answers(rows)[0]


def test_too_few_tasks_to_tell_anything_apart_are_said():
    cells = [cell_of([1, 1, 1, 1, 1]), *(cell_of([0, 0, 0, 0, 0], cap=cap) for cap in (1, 2))]
    assert "With so few tasks no setting could be told apart" in sweep_answers(sweep_table(cells))[0]
    assert sweep_answers(sweep_table(cells[:1])) == ["fewer than two settings have a score: nothing to compare."]


def test_factor_lines_are_short_sentences():
    cells = [
        cell_of([1] * 10 + [0], cap=3),
        cell_of([1] * 9 + [0, 0], cap=1),
        cell_of([0] * 11, cap=0),
        cell_of([1] * 10 + [0], cap=3, window=1024),
    ]
    assert factor_lines(factor_answers(cells)) == [
        "window: 512 is best; 1k is inside the noise (+0.00 [0.00, 0.00])",
        "cap: 3 is best; 1 is inside the noise (−0.09 [−0.27, 0.00]); 0 is worse (−0.91 [−1.00, −0.73])",
    ]


def test_factor_lines_name_the_variant_where_there_are_several():
    cells = [cell_of([1, 0], variant=v, cap=cap) for v in ("m", "base") for cap in (0, 3)]
    lines = factor_lines(factor_answers([*cells, *(c.model_copy(update={"temperature": 0.0}) for c in cells[2:])]))
    assert [line.split(":")[0] for line in lines] == ["base · cap", "base · greedy · cap", "m · cap"]


def test_a_factor_that_cannot_be_answered_says_so():
    cells = [cell_of([1, 0], window=384, cap=1), cell_of([1, 0], window=512, cap=3)]
    assert all("no answer" in line for line in factor_lines(factor_answers(cells)))
