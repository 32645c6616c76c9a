"""Cells of an evaluation: one checkpoint under one setting of the window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from compaction.settings import CompactionSettings
from evaluation.trial import TrialKey


@dataclass(frozen=True)
class Cell:
    """One variant of one training seed, evaluated in one setting. Raises ValueError where keep_recent is not None
    exactly at cap 0, so that the single-window setting has one name."""

    variant: str
    seed: int
    """Training seed of the checkpoint."""
    window: int
    """C, in tokens"""
    cap: int
    keep_recent: int | None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if (self.cap == 0) != (self.keep_recent is None):
            raise ValueError(
                f"cap={self.cap} with keep_recent={self.keep_recent}: keep_recent is None at cap 0, a number else"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def name(self) -> str:
        """For people: `compactionrl · seed 0 · window 64k · cap 3 · keep 2`."""
        keep = "" if self.keep_recent is None else f" · keep {self.keep_recent}"
        greedy = " · greedy" if self.greedy else ""
        return f"{self.variant} · seed {self.seed} · window {format_tokens(self.window)} · cap {self.cap}{keep}{greedy}"

    def settings(self, base: CompactionSettings) -> CompactionSettings:
        """`base` with this cell's window, cap and keep_recent (at cap 0 `base`'s own: nothing reads it)."""
        keep = base.keep_recent if self.keep_recent is None else self.keep_recent
        return CompactionSettings(**{**dict(base), "window": self.window, "cap": self.cap, "keep_recent": keep})

    def trial_key(self, dataset: str, task: str, repeat: int) -> TrialKey:
        """Name of one trial of this cell."""
        return TrialKey(
            dataset=dataset,
            task=task,
            variant=self.variant,
            window=self.window,
            cap=self.cap,
            keep_recent=self.keep_recent,
            repeat=repeat,
        )


def one_factor_cells(
    base: CompactionSettings,
    windows: Sequence[int] = (),
    caps: Sequence[int] = (),
    keep_recents: Sequence[int] = (),
    *,
    variant: str,
    seed: int,
    temperature: float = 1.0,
) -> list[Cell]:
    """`base`'s own point, then each factor varied alone around it. The own point comes first; no cell comes twice."""
    points = [(base.window, base.cap, base.keep_recent)]
    points += [(window, base.cap, base.keep_recent) for window in windows]
    points += [(base.window, cap, base.keep_recent) for cap in caps]
    points += [(base.window, base.cap, keep) for keep in keep_recents]
    return _cells(points, variant, seed, temperature)


def product_cells(
    windows: Sequence[int],
    caps: Sequence[int],
    keep_recents: Sequence[int],
    *,
    variant: str,
    seed: int,
    temperature: float = 1.0,
) -> list[Cell]:
    """Every combination, window by window; cap 0 once per window."""
    return _cells(product(windows, caps, keep_recents), variant, seed, temperature)


def greedy_cell(cell: Cell) -> Cell:
    """The same cell at temperature 0."""
    return replace(cell, temperature=0.0)


def format_tokens(tokens: int) -> str:
    """65,536 as `64k`, 10,240 as `10k`; other sizes in full, such as `1,000`."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"


def _cells(points: Iterable[tuple[int, int, int]], variant: str, seed: int, temperature: float) -> list[Cell]:
    cells = (Cell(variant, seed, window, cap, keep if cap else None, temperature) for window, cap, keep in points)
    return list(dict.fromkeys(cells))
