"""Statistics of a sweep as data: every setting against the best one, and what each factor does by itself.

A family is one variant at one temperature: settings are compared within it only. Units are (training seed, task), as in
`pooling`: repeats of a task are one unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from evaluation.analysis.comparison import Point, Points, by_point, in_order
from evaluation.analysis.pooling import pooled, pooled_interval, pooled_mean
from evaluation.analysis.statistics import Comparison, Interval, bootstrap_interval, compare, mean_std
from evaluation.results import CellResult

Factor = Literal["window", "cap", "keep_recent"]
Verdict = Literal["best", "inside the noise", "worse"]
FACTORS: tuple[Factor, ...] = ("window", "cap", "keep_recent")
ALPHA = 0.05
ENOUGH = 0.9
"""Share of the family's most scored tasks that a setting needs a score for to be the best, or part of a factor's means:
a few lucky tasks make no best setting, and a mean over settings is over the tasks that all of them have."""

Name = TypeVar("Name")


@dataclass(frozen=True)
class SweepRow:
    """A variant in one setting, training seeds pooled. Scores in [0, 1], sizes in tokens; None where there is nothing
    to say. The fields' names are the headers of the CSV."""

    variant: str
    window: int
    cap: int
    keep_recent: int | None
    temperature: float
    """0 = greedy; greedy settings are compared among themselves."""
    seeds: int
    repeats: int
    n_tasks: int
    """Tasks with a score, each counted once however many seeds."""
    n_trials: int
    scored: int
    errored: int
    coverage: float
    """Share of trials that have a reward."""
    pass_at_1: float | None
    ci_low: float | None
    ci_high: float | None
    """The 95% bootstrap interval of pass@1, clustered by task (and seed)."""
    pass_at_1_std: float | None
    """Sample standard deviation over repeats, the root mean square of the seeds'; None for one repeat."""
    verdict: Verdict | None
    """None where the family has no second setting with a score, or no task in common with the best."""
    difference: float | None
    """pass@1 − the best setting's, on the (seed, task) that both have a score for; None for the best itself."""
    difference_low: float | None
    difference_high: float | None
    """The 95% bootstrap interval of the difference, not adjusted."""
    p: float | None
    """Of that comparison alone: exact McNemar, or sign-flip."""
    p_adjusted: float | None
    """Times the number of settings compared with the best, at most 1: Bonferroni."""
    pass_at_1_compacted: float | None
    """Of the scored trials that compacted or tried to."""
    compacted_share: float
    compactions_per_rollout: float
    summary_tokens: float | None
    """Mean over tasks of the task's mean summary length."""
    commands: float
    """Per trial."""
    repeated_commands: float
    """Per trial: commands run again after a compaction, word for word."""
    prompt_tokens: float
    """Per trial, cached ones included."""
    cached_tokens: float
    generated_tokens: float
    cost_per_trial: float | None
    """US dollars; None where a price is unknown."""
    cost_per_solved: float | None
    """US dollars of all trials over the sum of rewards; None where nothing was solved."""

    @property
    def point(self) -> Point:
        return Point(self.variant, self.window, self.cap, self.keep_recent, self.temperature)

    @property
    def interval(self) -> Interval | None:
        return None if self.ci_low is None or self.ci_high is None else Interval(self.ci_low, self.ci_high)

    @property
    def difference_interval(self) -> Interval | None:
        low, high = self.difference_low, self.difference_high
        return None if low is None or high is None else Interval(low, high)


@dataclass(frozen=True)
class Standing:
    """One of several settings (or levels of a factor) against the best of them."""

    verdict: Verdict | None
    comparison: Comparison | None = None
    """Minus the best, paired; None for the best itself."""
    p_adjusted: float | None = None


@dataclass(frozen=True)
class FactorLevel:
    """One value of a factor, averaged over settings of the other factors."""

    value: int
    pass_at_1: float | None
    interval: Interval | None
    standing: Standing


@dataclass(frozen=True)
class FactorAnswer:
    """What one factor does in one family, everything else equal."""

    variant: str
    temperature: float
    factor: Factor
    settings: int
    """Settings of the other factors that exist at every level: what each level is the mean over. With 0 the levels
    cannot be compared, and there are none."""
    levels: tuple[FactorLevel, ...]
    """From the highest pass@1 down."""


def sweep_table(cells: Sequence[CellResult]) -> list[SweepRow]:
    """One row per variant and setting: variants in the house's order, then by window, cap and kept turns.

    Raises ValueError where one cell comes twice.
    """
    points = by_point(cells)
    standings: dict[Point, Standing] = {}
    for family in _families(points).values():
        values = {point: pooled(group) for point, group in family.items()}
        standings |= rank(values, repeats=_repeats(family))
    return [_row(point, points[point], standings[point]) for point in in_order(points)]


def factor_answers(cells: Sequence[CellResult]) -> list[FactorAnswer]:
    """Per family and factor with more than one level: the levels' means over the settings of the other factors that
    every level has. Cap 0 stands for every keep_recent: nothing is kept where nothing is compacted.

    A (seed, task) counts for a level where it has a score in all of those settings.
    """
    return [
        answer
        for family in _families(by_point(cells)).values()
        for factor in FACTORS
        if (answer := _factor_answer(family, factor))
    ]


def rank(values: Mapping[Name, Mapping[str, float]], *, repeats: int) -> dict[Name, Standing]:
    """Each against the best by mean score, the first of equals among those with ENOUGH scores; `values` are scores per
    (seed, task).

    p is multiplied by the number of others (Bonferroni). Whichever turns out best, the truly best setting is then
    called worse with a chance below 5%: for that one of the others would have to beat it at 5% divided by their number.
    """
    scored = {name: scores for name, scores in values.items() if scores}
    standings = {name: Standing(None) for name in values}
    if len(scored) < 2:
        return standings
    if not any(score for scores in scored.values() for score in scores.values()):
        return standings  # nothing was solved: there is no best
    best = max(_well_scored(scored), key=lambda name: float(np.mean(list(scored[name].values()))))
    for name in scored:
        comparison = compare(values[name], values[best], repeats=repeats)
        p = None if comparison.p is None else min(1.0, comparison.p * (len(scored) - 1))
        standings[name] = Standing(_verdict(comparison, p), comparison, p)
    return standings | {best: Standing("best")}


def _well_scored(values: Mapping[Name, Mapping[str, float]]) -> list[Name]:
    most = max(map(len, values.values()))
    return [name for name, scores in values.items() if scores and len(scores) >= ENOUGH * most]


def families(rows: Sequence[SweepRow]) -> dict[tuple[str, float], list[SweepRow]]:
    """Rows by variant and temperature, in the rows' order."""
    groups: dict[tuple[str, float], list[SweepRow]] = defaultdict(list)
    for row in rows:
        groups[row.variant, row.temperature].append(row)
    return dict(groups)


def _families(points: Points) -> dict[tuple[str, float], Points]:
    groups: dict[tuple[str, float], Points] = defaultdict(dict)
    for point in in_order(points):
        groups[point.variant, point.temperature][point] = points[point]
    return dict(groups)


def _repeats(points: Points) -> int:
    return max(cell.repeats for group in points.values() for cell in group)


def _verdict(comparison: Comparison, p_adjusted: float | None) -> Verdict | None:
    if comparison.difference is None or p_adjusted is None:
        return None
    return "worse" if p_adjusted < ALPHA and comparison.difference < 0 else "inside the noise"


def _factor_answer(family: Points, factor: Factor) -> FactorAnswer | None:
    enough = _well_scored({point: pooled(cells) for point, cells in family.items()})
    by_level = _contexts({point: family[point] for point in enough}, factor)
    if len(by_level) < 2:
        return None
    variant, temperature = next((point.variant, point.temperature) for point in family)
    shared = set.intersection(*(set(contexts) for contexts in by_level.values()))
    values = {
        level: _mean_by_task([pooled(contexts[context]) for context in shared])
        for level, contexts in by_level.items()
        if shared
    }
    standings = rank(values, repeats=_repeats(family) * len(shared))
    levels = [
        FactorLevel(
            value=level,
            pass_at_1=mean_std(list(scores.values()))[0],
            interval=bootstrap_interval(list(scores.values())),
            standing=standings[level],
        )
        for level, scores in values.items()
    ]
    levels.sort(key=lambda level: (level.pass_at_1 is None, -(level.pass_at_1 or 0.0), level.value))
    return FactorAnswer(variant, temperature, factor, len(shared), tuple(levels))


Context = tuple[int | None, ...]
"""Values of the other two factors"""


def _contexts(family: Points, factor: Factor) -> dict[int, dict[Context, list[CellResult]]]:
    """level → setting of the other factors → cells."""
    keeps = sorted({point.keep_recent for point in family if point.keep_recent is not None})
    by_level: dict[int, dict[Context, list[CellResult]]] = defaultdict(dict)
    for point, cells in family.items():
        if factor == "window":
            by_level[point.window][point.cap, point.keep_recent] = cells
        elif factor == "cap":
            for keep in keeps if point.cap == 0 else [point.keep_recent]:
                by_level[point.cap][point.window, keep] = cells
        elif point.keep_recent is not None:
            by_level[point.keep_recent][point.window, point.cap] = cells
    return dict(sorted(by_level.items()))


def _mean_by_task(settings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Per (seed, task) the mean over settings, for those that have a score in all."""
    common = set.intersection(*(set(scores) for scores in settings))
    return {task: float(np.mean([scores[task] for scores in settings])) for task in sorted(common)}


def _row(point: Point, cells: Sequence[CellResult], standing: Standing) -> SweepRow:
    trials = sum(cell.n_trials for cell in cells)
    scored = sum(cell.scored for cell in cells)
    interval = pooled_interval(cells)
    stds = [cell.pass_at_1_std for cell in cells if cell.pass_at_1_std is not None]
    comparison = standing.comparison
    difference = comparison.interval if comparison else None
    costs = [cell.cost for cell in cells if cell.cost is not None]
    cost = sum(costs) if len(costs) == len(cells) else None
    solved = sum((cell.pass_at_1 or 0.0) * cell.scored for cell in cells)

    def per_trial(name: str) -> float:
        return float(sum(getattr(cell, name) * cell.n_trials for cell in cells)) / trials

    return SweepRow(
        variant=point.variant,
        window=point.window,
        cap=point.cap,
        keep_recent=point.keep_recent,
        temperature=point.temperature,
        seeds=len(cells),
        repeats=max(cell.repeats for cell in cells),
        n_tasks=len({task for cell in cells for task in cell.task_scores}),
        n_trials=trials,
        scored=scored,
        errored=trials - scored,
        coverage=scored / trials,
        pass_at_1=pooled_mean(cells),
        ci_low=interval.low if interval else None,
        ci_high=interval.high if interval else None,
        pass_at_1_std=float(np.sqrt(np.mean(np.square(stds)))) if stds else None,
        verdict=standing.verdict,
        difference=comparison.difference if comparison else None,
        difference_low=difference.low if difference else None,
        difference_high=difference.high if difference else None,
        p=comparison.p if comparison else None,
        p_adjusted=standing.p_adjusted,
        pass_at_1_compacted=mean_std([c.pass_at_1_compacted for c in cells if c.pass_at_1_compacted is not None])[0],
        compacted_share=per_trial("compacted_share"),
        compactions_per_rollout=per_trial("compactions_per_rollout"),
        summary_tokens=pooled_mean(cells, "task_summary_tokens"),
        commands=per_trial("commands"),
        repeated_commands=per_trial("repeated_commands"),
        prompt_tokens=per_trial("prompt_tokens"),
        cached_tokens=per_trial("cached_tokens"),
        generated_tokens=per_trial("generated_tokens"),
        cost_per_trial=None if cost is None else cost / trials,
        cost_per_solved=cost / solved if cost is not None and solved else None,
    )
