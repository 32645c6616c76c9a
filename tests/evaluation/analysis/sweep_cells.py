"""Cells of an imagined sweep with scores given by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from evaluation.grid import Cell, product_cells
from evaluation.results import CellResult
from tests.evaluation.synthetic import make_cell

WINDOWS, CAPS, KEEPS = (384, 512, 768), (0, 1, 3), (0, 1, 2)


def cell_of(
    scores: Sequence[float | None] | Mapping[str, float],
    *,
    variant: str = "m",
    seed: int = 0,
    window: int = 512,
    cap: int = 3,
    keep: int | None = 1,
    temperature: float = 1.0,
    **change: object,
) -> CellResult:
    """`scores` per task, None for a task without one; `change` replaces fields of the result."""
    by_task = dict(scores) if isinstance(scores, Mapping) else {f"t{i}": s for i, s in enumerate(scores)}
    known = {task: score for task, score in by_task.items() if score is not None}
    made = make_cell(Cell(variant, seed, window, cap, keep if cap else None, temperature), 0.5, n_tasks=len(by_task))
    own = {
        "task_scores": known,
        "pass_at_1": float(np.mean(list(known.values()))) if known else None,
        "scored": len(known),
        "errored": len(by_task) - len(known),
        "coverage": len(known) / len(by_task),
    }
    return made.model_copy(update=own | change)


def sweep_cells(
    variants: Sequence[str] = ("m",), seeds: Sequence[int] = (0,), n_tasks: int = 60, cost: float | None = 0.0
) -> list[CellResult]:
    """Every combination; cap 3 is far better than cap 0, everything else matters little. `cost` is dollars per trial
    and 1,000 tokens of window."""
    cells = []
    for variant in variants:
        for seed in seeds:
            for cell in product_cells(WINDOWS, CAPS, KEEPS, variant=variant, seed=seed):
                chance = {0: 0.25, 1: 0.65, 3: 0.75}[cell.cap] + {384: 0.0, 512: 0.02, 768: 0.04}[cell.window]
                made = make_cell(cell, chance, n_tasks=n_tasks)
                price = None if cost is None else cost * n_tasks * cell.window / 1000
                cells.append(made.model_copy(update={"cost": price}))
    return cells
