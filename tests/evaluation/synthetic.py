"""Cell results of an imagined run, made through `summarize_cell` from imagined trials: no model, real arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compaction.settings import CompactionSettings
from evaluation.analysis.pooling import PresetPoint
from evaluation.grid import Cell, greedy_cell, one_factor_cells
from evaluation.results import CellResult, summarize_cell
from evaluation.trial import TrialResult

PRESET = PresetPoint(window=512, cap=3, keep_recent=1, long_window=2048)
BASE = CompactionSettings(
    window=512, cap=3, keep_recent=1, threshold=64, max_response=64, min_response=8, summary_cap=96
)


@dataclass(frozen=True)
class World:
    """How good each variant is where, and how long its summaries are."""

    own: dict[str, float]
    """pass@1 at the preset's own point"""
    by_cap: dict[int, float]
    """factor on it at other caps"""
    greedy: dict[str, float]
    long: dict[str, float]
    """pass@1 in the one long window"""
    summary_tokens: dict[str, float]


PAPER_LIKE = World(
    own={
        "base": 0.33,
        "compactionrl": 0.74,
        "no-summary-loss": 0.45,
        "no-compaction": 0.36,
        "no-compaction-long": 0.42,
        "segment-mean": 0.68,
    },
    by_cap={0: 0.4, 1: 0.75},
    greedy={"base": 0.41, "compactionrl": 0.80},
    long={"base": 0.45, "no-compaction-long": 0.70},
    summary_tokens={"base": 31.0, "compactionrl": 44.0, "no-summary-loss": 29.0},
)


def make_cells(world: World = PAPER_LIKE, seeds: tuple[int, ...] = (0, 1, 2), n_tasks: int = 400) -> list[CellResult]:
    """The one-factor sweep of every variant and seed, greedy cells, and the long window where the world has it."""
    cells = []
    for variant in world.own:
        for seed in seeds:
            sweep = one_factor_cells(
                BASE, windows=(384, 512, 768), caps=(0, 1, 3), keep_recents=(0, 1, 2), variant=variant, seed=seed
            )
            if variant in world.greedy:
                sweep.append(greedy_cell(sweep[0]))
            if variant in world.long:
                sweep.append(Cell(variant, seed, 2048, 0, None))
            cells += [make_cell(cell, _probability(world, cell), world, n_tasks) for cell in sweep]
    return cells


def make_cell(
    cell: Cell, probability: float, world: World = PAPER_LIKE, n_tasks: int = 400, repeats: int = 1, errored: int = 0
) -> CellResult:
    """`probability` is met exactly by the number of solved trials; which tasks are solved is drawn. The first
    `errored` trials have no reward."""
    rng = np.random.default_rng([sum(cell.name.encode()), cell.seed, cell.window, cell.cap, cell.keep_recent or 0])
    solved = np.zeros(n_tasks * repeats, dtype=bool)
    solved[: round(probability * len(solved))] = True
    rng.shuffle(solved)
    trials = []
    for i in range(n_tasks * repeats):
        compactions = int(min(cell.cap, rng.integers(0, 4)))
        tokens = rng.normal(world.summary_tokens.get(cell.variant, 35.0), 6, size=compactions)
        trials.append(
            TrialResult(
                key=cell.trial_key("trail/test", f"trail-{i // repeats}", i % repeats),
                seed=cell.seed,
                temperature=cell.temperature,
                reward=None if i < errored else float(solved[i]),
                error_class="environment" if i < errored else None,
                stop_reason="finished" if solved[i] or rng.random() < 0.5 else "context_full",
                compactions=compactions,
                compacted=compactions > 0,
                summary_tokens=tuple(int(max(1, t)) for t in tokens),
                rejected_summaries=0,
                turns=int(rng.integers(6, 24)),
                commands=int(rng.integers(6, 24)),
                repeated_commands=0,
                generated_tokens=int(rng.integers(100, 400)),
                prompt_tokens=int(rng.integers(2_000, 6_000)),
                cached_tokens=1_000,
                cost=0.0,
                count_source="exact",
            )
        )
    return summarize_cell(cell, trials)


def _probability(world: World, cell: Cell) -> float:
    if PRESET.is_long(cell):
        return world.long[cell.variant]
    if cell.greedy:
        return world.greedy[cell.variant]
    own = world.own[cell.variant] + 0.01 * (cell.seed - 1)
    if cell.cap != PRESET.cap:
        return own * world.by_cap[cell.cap]
    return own * {384: 0.8, 512: 1.0, 768: 1.1}[cell.window] * {0: 0.9, 1: 1.0, 2: 0.97}[cell.keep_recent or 0]
