"""The claims hold on a run as the paper tells it, and each fails on a run that breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from evaluation.grid import Cell
from evaluation.results import CellResult
from tests.claims import CLAIMS, Evidence, check, main
from tests.evaluation.synthetic import PAPER_LIKE, PRESET, make_cell, make_cells

Cells = list[CellResult]


@pytest.fixture(scope="module")
def cells() -> Cells:
    return make_cells()


def own(variant: str, greedy: bool = False) -> Callable[[Cell], bool]:
    return lambda c: c.variant == variant and PRESET.is_at(c) and c.greedy == greedy


def at_cap(variant: str, cap: int) -> Callable[[Cell], bool]:
    return lambda c: c.variant == variant and PRESET.is_at(c, cap=cap) and not c.greedy


def long(variant: str) -> Callable[[Cell], bool]:
    return lambda c: c.variant == variant and PRESET.is_long(c)


def of_seed(seed: int, where: Callable[[Cell], bool]) -> Callable[[Cell], bool]:
    return lambda c: c.seed == seed and where(c)


def scored(where: Callable[[Cell], bool], probability: float, **how: object) -> Callable[[Cells], Cells]:
    """The cells `where`, run again with another pass@1."""
    return lambda cells: [make_cell(c.cell, probability, **how) if where(c.cell) else c for c in cells]


def summaries(variant: str, tokens: float) -> Callable[[Cells], Cells]:
    world = replace(PAPER_LIKE, summary_tokens={**PAPER_LIKE.summary_tokens, variant: tokens})
    return scored(own(variant), PAPER_LIKE.own[variant], world=world)


def without(where: Callable[[Cell], bool]) -> Callable[[Cells], Cells]:
    return lambda cells: [c for c in cells if not where(c.cell)]


def changed(where: Callable[[Cell], bool], **update: object) -> Callable[[Cells], Cells]:
    return lambda cells: [c.model_copy(update=update) if where(c.cell) else c for c in cells]


def both(*mutations: Callable[[Cells], Cells]) -> Callable[[Cells], Cells]:
    def apply(cells: Cells) -> Cells:
        for mutation in mutations:
            cells = mutation(cells)
        return cells

    return apply


MUTANTS: dict[str, tuple[Callable[[Cells], Cells], set[str]]] = {
    "a cell of base's sweep missing": (
        without(lambda c: c.variant == "base" and c.seed == 0 and c.window == 768),
        {"every variant and seed has every cell of the sweep"},
    ),
    "399 tasks": (scored(of_seed(0, own("no-compaction")), 0.36, n_tasks=399), {"test tasks"}),
    "five trials in 400 unscored": (
        scored(lambda c: c.variant == "segment-mean" and c.seed == 2 and c.window == 768, 0.7, errored=5),
        {"trials with a reward"},
    ),
    "a score that its tasks do not have": (
        changed(of_seed(1, at_cap("segment-mean", 1)), pass_at_1=0.99),
        {"pass@1 is the mean of the tasks' scores"},
    ),
    "weak base": (both(scored(own("base"), 0.14), scored(own("no-summary-loss"), 0.30)), {"base is not too weak"}),
    "strong base": (both(scored(own("base"), 0.51), scored(own("compactionrl"), 0.85)), {"base is not too strong"}),
    "base no better than in one window": (scored(at_cap("base", 0), 0.40), {"base is above its own cap 0"}),
    "one seed did not learn": (
        scored(of_seed(1, own("compactionrl")), 0.33),
        {"compactionrl is above base on every seed", "compactionrl over base, intervals"},
    ),
    "one seed learned little": (
        scored(of_seed(1, own("compactionrl")), 0.51),
        {"compactionrl over base, intervals"},
    ),
    "gain of 0.24": (
        both(scored(own("compactionrl"), 0.57), scored(own("no-summary-loss"), 0.40)),
        {"compactionrl over base, mean over seeds"},
    ),
    "masked gains more than half": (scored(own("no-summary-loss"), 0.56), {"no-summary-loss gains less than half"}),
    "no gain in the long window": (
        scored(long("no-compaction-long"), 0.46),
        {"no-compaction-long gains in its own window"},
    ),
    "the long variant as good under compaction": (
        scored(own("no-compaction-long"), 0.73),
        {"no-compaction-long is below compactionrl under compaction"},
    ),
    "cap 0 above cap 1": (scored(at_cap("compactionrl", 0), 0.60), {"trained: cap 0 < cap 1"}),
    "cap 1 above the preset's": (scored(at_cap("compactionrl", 1), 0.80), {"trained: cap 1 < the preset's cap"}),
    "no other window": (without(lambda c: c.window not in (512, 2048)), {"trained: window row with intervals"}),
    "a window without an interval": (
        changed(lambda c: c.variant == "compactionrl" and c.window == 384, ci_low=None, ci_high=None),
        {"trained: window row with intervals"},
    ),
    "no other keep_recent": (
        without(lambda c: c.keep_recent in (0, 2)),
        {"trained: keep_recent row with intervals"},
    ),
    "trained summaries as long as base's": (summaries("compactionrl", 31.0), {"summaries grow when trained"}),
    "masked summaries grow as well": (
        summaries("no-summary-loss", 40.0),
        {"summaries grow less than half of that when masked"},
    ),
    "greedy base strong": (scored(own("base", greedy=True), 0.65), {"greedy base is not too strong"}),
    "greedy trained no better": (
        scored(own("compactionrl", greedy=True), 0.40),
        {"greedy compactionrl is above greedy base"},
    ),
    "no greedy base": (
        without(own("base", greedy=True)),
        {"greedy base is not too strong", "greedy compactionrl is above greedy base"},
    ),
    "base not evaluated in the long window": (
        without(long("base")),
        {"no-compaction-long gains in its own window"},
    ),
    "no segment-mean on one seed": (
        without(of_seed(2, own("segment-mean"))),
        {"every variant and seed has every cell of the sweep", "test tasks", "segment-mean below compactionrl"},
    ),
    "the preset's cells sampled at another temperature": (
        changed(of_seed(0, own("no-compaction")), temperature=0.7),
        {"every variant and seed has every cell of the sweep", "test tasks", "no-compaction"},
    ),
}


def failures(cells: Cells) -> set[str]:
    return {name for name, verdict in check(Evidence(tuple(cells), PRESET)) if verdict.status == "FAIL"}


def test_a_run_as_the_paper_tells_it_passes(cells):
    statuses = {name: verdict.status for name, verdict in check(Evidence(tuple(cells), PRESET))}
    reported = {"no-compaction", "segment-mean below compactionrl"}
    assert {name for name, status in statuses.items() if status == "REPORT"} == reported
    assert {name for name, status in statuses.items() if status == "PASS"} == set(statuses) - reported


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_run_fails_exactly_the_claims_it_breaks(cells, mutant):
    mutation, expected = MUTANTS[mutant]
    assert failures(mutation(cells)) == expected


def test_every_claim_can_fail(cells):
    assert {name for name, _ in CLAIMS} == set.union(*(expected for _, expected in MUTANTS.values()))


def test_reported_figures_fail_nothing_whatever_they_are(cells):
    assert failures(scored(own("segment-mean"), 0.99)(cells)) == set()


def test_a_preset_of_one_compaction_cannot_show_that_more_help(cells):
    evidence = Evidence(tuple(cells), PRESET.model_copy(update={"cap": 1}))
    failed = {name for name, verdict in check(evidence) if verdict.status == "FAIL"}
    assert "trained: cap 1 < the preset's cap" in failed


def test_command_prints_one_line_per_claim_and_exits_by_them(cells, tmp_path, capsys):
    path = tmp_path / "r.json"
    for run, code in ((cells, 0), (MUTANTS["weak base"][0](cells), 1)):
        write(path, run)
        assert main([str(path)]) == code
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(CLAIMS) + 1
        assert any(line.startswith("FAIL") for line in lines) == (code == 1)


def test_missing_seed_is_named_and_fails(cells, tmp_path, capsys):
    path = tmp_path / "r.json"
    write(path, [c for c in cells if c.seed != 2])
    assert main([str(path)]) == 1
    assert "missing: base · seed 2 · window 512 · cap 3 · keep 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"results": [], "preset_point": {"window": 8, "cap": 1, "keep_recent": 0}}', '{"results": [{}]}'],
)
def test_a_file_that_is_no_run_is_refused(tmp_path, capsys, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_two_results_of_one_cell_are_refused(cells, tmp_path, capsys):
    path = tmp_path / "r.json"
    write(path, [*cells, cells[0]])
    assert main([str(path)]) == 2
    assert "two results for base · seed 0" in capsys.readouterr().err


def write(path, cells: Cells) -> None:
    data = {"preset_point": PRESET.model_dump(), "results": [cell.model_dump() for cell in cells]}
    path.write_text(json.dumps(data, allow_nan=False))
