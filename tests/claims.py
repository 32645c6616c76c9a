"""Checks every inequality that the tiny reproduction claims, from its `--json` object alone.

    compactionrl reproduce --preset tiny --variants all --seeds 0,1,2 --json > r.json && python -m tests.claims r.json

One line per claim: PASS, FAIL, or REPORT for figures that are wanted but not claimed. A missing cell is a FAIL, never
skipped. Exit code 0 if no claim fails, 1 if one does, 2 if the file cannot be read.

The object holds `preset_point`: {window, cap, keep_recent, long_window}, the point its models were trained in, and
`results`:
a list of `evaluation.results.CellResult`. Cells pooled over seeds are clustered by (seed, task).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from evaluation.analysis.pooling import PresetPoint, compare_cells, pooled_interval, pooled_mean
from evaluation.analysis.statistics import Comparison
from evaluation.analysis.tables import format_difference, format_interval, format_score
from evaluation.grid import Cell
from evaluation.results import CellResult

SEEDS = (0, 1, 2)
VARIANTS = ("base", "compactionrl", "no-summary-loss", "no-compaction", "no-compaction-long", "segment-mean")
LEAST_TASKS = 400
LEAST_COVERAGE = 0.99
TEMPERATURE = 1.0

Status = Literal["PASS", "FAIL", "REPORT"]


@dataclass(frozen=True)
class Verdict:
    """What a claim came to. `holds` is None where the figures are only reported."""

    holds: bool | None
    figures: str

    @property
    def status(self) -> Status:
        return "REPORT" if self.holds is None else "PASS" if self.holds else "FAIL"


class MissingCell(Exception):
    """A claim needs a cell that the file does not hold."""


@dataclass(frozen=True)
class Evidence:
    """The cells of a run and where its preset stands."""

    cells: tuple[CellResult, ...]
    preset: PresetPoint

    def own(self, variant: str, *, greedy: bool = False) -> list[CellResult]:
        """The preset's own point."""
        return self.at(variant, self.preset.window, self.preset.cap, self.preset.keep_recent, greedy=greedy)

    def capped(self, variant: str, cap: int) -> list[CellResult]:
        """The preset's own window with at most `cap` compactions."""
        return self.at(variant, self.preset.window, cap, self.preset.keep_recent if cap else None)

    def long(self, variant: str) -> list[CellResult]:
        """The one long window without compaction."""
        if self.preset.long_window is None:
            raise MissingCell("preset.long_window is null: the window of no-compaction-long is not known")
        return self.at(variant, self.preset.long_window, 0, None)

    def at(
        self, variant: str, window: int, cap: int, keep_recent: int | None, *, greedy: bool = False
    ) -> list[CellResult]:
        """One cell per seed, in order of seeds. Raises MissingCell for any that is not there."""
        temperature = 0.0 if greedy else TEMPERATURE
        wanted = [Cell(variant, seed, window, cap, keep_recent, temperature) for seed in SEEDS]
        missing = [cell.name for cell in wanted if cell not in self._by_cell]
        if missing:
            raise MissingCell("missing: " + "; ".join(missing))
        return [self._by_cell[cell] for cell in wanted]

    @cached_property
    def _by_cell(self) -> dict[Cell, CellResult]:
        by_cell: dict[Cell, CellResult] = {}
        for result in self.cells:
            if result.cell in by_cell:
                raise ValueError(f"two results for {result.cell.name}; keep one")
            by_cell[result.cell] = result
        return by_cell


def every_cell_is_there(e: Evidence) -> Verdict:
    sampled = [c.cell for c in e.cells if not c.cell.greedy and not e.preset.is_long(c.cell)]
    points = {(c.window, c.cap, c.keep_recent) for c in sampled}
    for variant in VARIANTS:
        e.own(variant)
        for point in sorted(points, key=str):
            e.at(variant, *point)
    return Verdict(True, f"{len(VARIANTS)} variants × {len(SEEDS)} seeds × {len(points)} points of the sweep")


def enough_tasks(e: Evidence) -> Verdict:
    fewest = min(cell.n_tasks for variant in VARIANTS for cell in e.own(variant))
    return Verdict(fewest >= LEAST_TASKS, f"fewest {fewest} ≥ {LEAST_TASKS}")


def trials_are_scored(e: Evidence) -> Verdict:
    worst = min(e.cells, key=lambda cell: cell.coverage)
    figures = f"lowest coverage {worst.coverage:.4f} ≥ {LEAST_COVERAGE} ({worst.cell.name})"
    return Verdict(worst.coverage >= LEAST_COVERAGE, figures)


def scores_agree_with_tasks(e: Evidence) -> Verdict:
    wrong = [cell.cell.name for cell in e.cells if not _agrees(cell)]
    return Verdict(not wrong, f"{len(e.cells)} cells" if not wrong else "not in " + "; ".join(wrong))


def base_is_at_least(e: Evidence) -> Verdict:
    score = _mean(e.own("base"))
    return Verdict(score >= 0.15, f"{_row(e.own('base'))} ≥ 0.15")


def base_is_at_most(e: Evidence) -> Verdict:
    score = _mean(e.own("base"))
    return Verdict(score <= 0.50, f"{_row(e.own('base'))} ≤ 0.50")


def base_is_above_its_cap_0(e: Evidence) -> Verdict:
    gain = compare_cells(e.own("base"), e.capped("base", 0))
    return Verdict(_difference(gain) > 0, f"{format_difference(gain)} > 0")


def trained_is_above_base_on_every_seed(e: Evidence) -> Verdict:
    gains = list(_gains_by_seed(e, "compactionrl"))
    return Verdict(all(_difference(g) > 0 for g in gains), f"{_by_seed(gains)}; each > 0")


def trained_interval_is_above_015_on_every_seed(e: Evidence) -> Verdict:
    gains = list(_gains_by_seed(e, "compactionrl"))
    pooled = _gain(e, "compactionrl")
    figures = f"{_by_seed(gains)}; pooled {format_difference(pooled)}; each lower end > 0.15"
    return Verdict(all(_low(g) > 0.15 for g in [*gains, pooled]), figures)


def trained_mean_gain_is_large(e: Evidence) -> Verdict:
    gains = [_difference(g) for g in _gains_by_seed(e, "compactionrl")]
    return Verdict(float(np.mean(gains)) >= 0.25, f"{np.mean(gains):+.3f} ≥ 0.25")


def masked_gains_less_than_half(e: Evidence) -> Verdict:
    masked, trained = _gain(e, "no-summary-loss"), _gain(e, "compactionrl")
    half = _difference(trained) / 2
    return Verdict(_difference(masked) < half, f"{format_difference(masked)} < half of the trained gain, {half:.3f}")


def long_gains_in_its_own_window(e: Evidence) -> Verdict:
    gain = compare_cells(e.long("no-compaction-long"), e.long("base"))
    return Verdict(_low(gain) > 0, f"{format_difference(gain)} over base there; lower end > 0")


def long_is_below_trained_under_compaction(e: Evidence) -> Verdict:
    lead = compare_cells(e.own("compactionrl"), e.own("no-compaction-long"))
    return Verdict(_low(lead) > 0, f"compactionrl ahead by {format_difference(lead)}; lower end > 0")


def no_compaction(e: Evidence) -> Verdict:
    single = compare_cells(e.capped("no-compaction", 0), e.capped("base", 0))
    own = format_difference(_gain(e, "no-compaction"))
    return Verdict(None, f"under compaction {own} over base; in one window {format_difference(single)}")


def cap_0_is_below_cap_1(e: Evidence) -> Verdict:
    step = compare_cells(e.capped("compactionrl", 1), e.capped("compactionrl", 0))
    return Verdict(_difference(step) > 0, f"cap 1 − cap 0 = {format_difference(step)} > 0")


def cap_1_is_below_the_presets(e: Evidence) -> Verdict:
    if e.preset.cap <= 1:
        return Verdict(False, f"the preset's cap is {e.preset.cap}, not above 1")
    step = compare_cells(e.own("compactionrl"), e.capped("compactionrl", 1))
    return Verdict(_difference(step) > 0, f"cap {e.preset.cap} − cap 1 = {format_difference(step)} > 0")


def window_row_has_intervals(e: Evidence) -> Verdict:
    p = e.preset
    windows = _values(e, lambda c: c.window, lambda c: (c.cap, c.keep_recent) == (p.cap, p.keep_recent))
    return _interval_row([(value, e.at("compactionrl", value, p.cap, p.keep_recent)) for value in windows])


def keep_recent_row_has_intervals(e: Evidence) -> Verdict:
    p = e.preset
    kept = _values(e, lambda c: c.keep_recent or 0, lambda c: (c.window, c.cap) == (p.window, p.cap))
    return _interval_row([(value, e.at("compactionrl", p.window, p.cap, value)) for value in kept])


def trained_summaries_grow(e: Evidence) -> Verdict:
    change = _summary_change(e, "compactionrl")
    return Verdict(_low(change) > 0, f"{format_difference(change, 1)} tokens; lower end > 0")


def masked_summaries_grow_less_than_half(e: Evidence) -> Verdict:
    masked, trained = _summary_change(e, "no-summary-loss"), _summary_change(e, "compactionrl")
    half = _difference(trained) / 2
    figures = f"{format_difference(masked, 1)} tokens < half of the trained change, {half:.1f}"
    return Verdict(_difference(masked) < half, figures)


def greedy_base_is_at_most(e: Evidence) -> Verdict:
    score = _mean(e.own("base", greedy=True))
    return Verdict(score <= 0.60, f"{_row(e.own('base', greedy=True))} ≤ 0.60")


def greedy_trained_is_above_base(e: Evidence) -> Verdict:
    gain = compare_cells(e.own("compactionrl", greedy=True), e.own("base", greedy=True))
    return Verdict(_difference(gain) > 0, f"{format_difference(gain)} > 0")


def segment_mean_against_trained(e: Evidence) -> Verdict:
    lead = compare_cells(e.own("compactionrl"), e.own("segment-mean"))
    return Verdict(None, f"compactionrl − segment-mean = {format_difference(lead)} (wanted: above 0)")


CLAIMS: tuple[tuple[str, Callable[[Evidence], Verdict]], ...] = (
    ("every variant and seed has every cell of the sweep", every_cell_is_there),
    ("test tasks", enough_tasks),
    ("trials with a reward", trials_are_scored),
    ("pass@1 is the mean of the tasks' scores", scores_agree_with_tasks),
    ("base is not too weak", base_is_at_least),
    ("base is not too strong", base_is_at_most),
    ("base is above its own cap 0", base_is_above_its_cap_0),
    ("compactionrl is above base on every seed", trained_is_above_base_on_every_seed),
    ("compactionrl over base, intervals", trained_interval_is_above_015_on_every_seed),
    ("compactionrl over base, mean over seeds", trained_mean_gain_is_large),
    ("no-summary-loss gains less than half", masked_gains_less_than_half),
    ("no-compaction-long gains in its own window", long_gains_in_its_own_window),
    ("no-compaction-long is below compactionrl under compaction", long_is_below_trained_under_compaction),
    ("no-compaction", no_compaction),
    ("trained: cap 0 < cap 1", cap_0_is_below_cap_1),
    ("trained: cap 1 < the preset's cap", cap_1_is_below_the_presets),
    ("trained: window row with intervals", window_row_has_intervals),
    ("trained: keep_recent row with intervals", keep_recent_row_has_intervals),
    ("summaries grow when trained", trained_summaries_grow),
    ("summaries grow less than half of that when masked", masked_summaries_grow_less_than_half),
    ("greedy base is not too strong", greedy_base_is_at_most),
    ("greedy compactionrl is above greedy base", greedy_trained_is_above_base),
    ("segment-mean below compactionrl", segment_mean_against_trained),
)


def check(evidence: Evidence) -> list[tuple[str, Verdict]]:
    """Every claim with its verdict, in order."""
    return [(name, _verdict(claim, evidence)) for name, claim in CLAIMS]


def read_evidence(path: Path) -> Evidence:
    """Raises ValueError with one message for a file that is not a `--json` object of a run."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        cells = tuple(CellResult.model_validate(result) for result in data["results"])
        evidence = Evidence(cells, PresetPoint.model_validate(data["preset_point"]))
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"{path} is not the --json object of a run: {type(error).__name__}: {error}") from error
    if not cells:
        raise ValueError(f"{path} holds no results")
    return evidence


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m tests.claims r.json", file=sys.stderr)
        return 2
    try:
        verdicts = check(read_evidence(Path(arguments[0])))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for name, verdict in verdicts:
        print(f"{verdict.status:6} {name}: {verdict.figures}")
    failed = sum(verdict.status == "FAIL" for _, verdict in verdicts)
    print(f"{failed} of {len(verdicts)} failed" if failed else f"all {len(verdicts)} hold or are reported")
    return 1 if failed else 0


def _verdict(claim: Callable[[Evidence], Verdict], evidence: Evidence) -> Verdict:
    try:
        return claim(evidence)
    except MissingCell as missing:
        return Verdict(False, str(missing))


def _gain(e: Evidence, variant: str) -> Comparison:
    return compare_cells(e.own(variant), e.own("base"))


def _gains_by_seed(e: Evidence, variant: str) -> Iterator[Comparison]:
    for trained, base in zip(e.own(variant), e.own("base"), strict=True):
        yield compare_cells([trained], [base])


def _summary_change(e: Evidence, variant: str) -> Comparison:
    return compare_cells(e.own(variant), e.own("base"), "task_summary_tokens")


def _mean(cells: Sequence[CellResult]) -> float:
    mean = pooled_mean(cells)
    if mean is None:
        raise MissingCell(f"no scored trial in {cells[0].cell.name}")
    return mean


def _difference(comparison: Comparison) -> float:
    if comparison.difference is None:
        raise MissingCell("no task that both sides have a value for")
    return comparison.difference


def _low(comparison: Comparison) -> float:
    if comparison.interval is None:
        raise MissingCell(f"no interval from {comparison.n_tasks} common tasks")
    return comparison.interval.low


def _agrees(cell: CellResult) -> bool:
    scores = list(cell.task_scores.values())
    if cell.pass_at_1 is None or not scores:
        return cell.pass_at_1 is None and not scores
    return abs(cell.pass_at_1 - float(np.mean(scores))) < 1e-9


def _values(e: Evidence, value: Callable[[Cell], int], belongs: Callable[[Cell], bool]) -> list[int]:
    return sorted({value(c.cell) for c in e.cells if not c.cell.greedy and c.cap > 0 and belongs(c.cell)})


def _interval_row(row: Sequence[tuple[int, list[CellResult]]]) -> Verdict:
    figures = ", ".join(f"{value}: {_row(cells)}" for value, cells in row)
    if len(row) < 2:
        return Verdict(False, f"only one value: {figures}")
    return Verdict(all(cell.interval for _, cells in row for cell in cells), figures)


def _row(cells: Sequence[CellResult]) -> str:
    return f"{format_score(pooled_mean(cells))} {format_interval(pooled_interval(cells))}"


def _by_seed(gains: Sequence[Comparison]) -> str:
    return ", ".join(f"seed {seed} {format_difference(gain)}" for seed, gain in zip(SEEDS, gains, strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
