"""Means, intervals and paired tests. Pure functions of arrays and mappings; every random one takes a seed.

The unit that is resampled is always the task (or the seed and task): repeats of one task are not independent. Values
are scored ones only; nothing here turns an unscored trial into a 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

RESAMPLES = 10_000
LEVEL = 0.95
_BLOCK = 2_000_000
"""Most resampled values held at once: bounds memory at about 24 MB whatever the number of tasks."""
_FEW = 16
"""Up to so many distinct values, a resample is drawn as how often each occurs."""

Test = Literal["mcnemar", "sign-flip"]


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """a − b on the tasks that both have. Everything but the counts is None where they have none in common."""

    n_tasks: int
    n_only_one: int
    """Tasks that only one of the two has a score for: left out, so a gap in coverage shows."""
    mean_a: float | None
    mean_b: float | None
    difference: float | None
    interval: Interval | None
    p: float | None
    test: Test | None


def mean_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation (ddof 1); the deviation is None for one value, both for none."""
    if len(values) == 0:
        return None, None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def bootstrap_interval(values: Sequence[float] | np.ndarray, *, seed: int = 0) -> Interval | None:
    """Percentile bootstrap interval of the mean of `values` [n], one value per cluster (task).

    95%, 10,000 resamples. None for fewer than two values. Where all values are equal the interval is a point: it then
    says nothing about tasks not seen.
    """
    array = np.asarray(values, dtype=np.float64)
    n = len(array)
    if n < 2:
        return None
    means = _resampled_means(array, np.random.default_rng(seed))
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided p of the exact McNemar test: `only_a` pairs that a alone solved, `only_b` that b alone solved."""
    if only_a + only_b == 0:
        return 1.0
    return float(stats.binomtest(only_a, only_a + only_b, 0.5).pvalue)


def sign_flip_test(differences: Sequence[float] | np.ndarray, *, seed: int = 0) -> float:
    """Two-sided p of the hypothesis that each difference [n] is as likely with the other sign, by the mean.

    Exact while all 2^n sign patterns are at most 10,000, else 9,999 seeded random patterns and the observed one. Equal
    to scipy's `permutation_test` on pairs, at a fifth of its time for a thousand pairs. Ties (differences of 0) carry
    no information and are left out. 1.0 where none is left.
    """
    array = np.asarray(differences, dtype=np.float64)
    array = array[array != 0]
    n = len(array)
    if n == 0:
        return 1.0
    as_extreme = abs(array.sum()) * (1 - 1e-12)  # sums that differ by rounding alone are equal
    if 2**n <= RESAMPLES:
        patterns = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ array) >= as_extreme))
    rng = np.random.default_rng(seed)
    block = max(1, _BLOCK // n)
    hits = 1  # the observed pattern
    for start in range(0, RESAMPLES - 1, block):
        size = min(block, RESAMPLES - 1 - start)
        signs = rng.integers(0, 2, size=(size, n), dtype=np.int8) * 2.0 - 1.0
        hits += int((np.abs(signs @ array) >= as_extreme).sum())
    return hits / RESAMPLES


def compare(a: Mapping[str, float], b: Mapping[str, float], *, repeats: int, seed: int = 0) -> Comparison:
    """a − b, paired on common tasks: bootstrap interval over tasks, and a test.

    The test is exact McNemar at one repeat with rewards of 0 or 1, the sign-flip test on per-task means otherwise.

    Args:
        a: score per task (mean over its scored repeats), or any other per-task value, such as summary tokens
        b: the same of what a is compared with
        repeats: attempts per task behind the values (the larger of the two sides)
    """
    tasks = sorted(a.keys() & b.keys())
    n_only_one = len(a.keys() ^ b.keys())
    if not tasks:
        return Comparison(0, n_only_one, None, None, None, None, None, None)
    values_a = np.array([a[task] for task in tasks], dtype=np.float64)
    values_b = np.array([b[task] for task in tasks], dtype=np.float64)
    p, test = _paired_test(values_a, values_b, repeats, seed)
    return Comparison(
        n_tasks=len(tasks),
        n_only_one=n_only_one,
        mean_a=float(values_a.mean()),
        mean_b=float(values_b.mean()),
        difference=float((values_a - values_b).mean()),
        interval=bootstrap_interval(values_a - values_b, seed=seed),
        p=p,
        test=test,
    )


def _resampled_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Means [RESAMPLES] of n draws with replacement from values [n]."""
    n = len(values)
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) <= _FEW:  # rewards of 0 or 1, their differences: drawing counts is the same and much faster
        return rng.multinomial(n, counts / n, size=RESAMPLES) @ distinct / n
    means = np.empty(RESAMPLES)
    block = max(1, _BLOCK // n)
    for start in range(0, RESAMPLES, block):
        stop = min(start + block, RESAMPLES)
        means[start:stop] = values[rng.integers(0, n, size=(stop - start, n), dtype=np.int32)].mean(axis=1)
    return means


def _paired_test(a: np.ndarray, b: np.ndarray, repeats: int, seed: int) -> tuple[float, Test]:
    binary = bool(np.isin(a, (0.0, 1.0)).all() and np.isin(b, (0.0, 1.0)).all())
    if repeats == 1 and binary:
        return mcnemar_exact(int((a > b).sum()), int((b > a).sum())), "mcnemar"
    return sign_flip_test(a - b, seed=seed), "sign-flip"
