"""The paper's numbers, to stand beside a run's (arXiv 2607.05378, Tables 2, 3, 4 and 8, Figure 4).

They are directions, not targets: another model, other tasks, another scale.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Literal

import yaml
from pydantic import Field, model_validator

from compaction.settings import Settings

Model = Literal["30b", "106b"]
Benchmark = Literal["swe", "tb"]

OWN_WINDOW: dict[Model, int] = {"30b": 65_536, "106b": 81_920}
"""The window each model was trained in with compaction, in tokens."""
LONG_WINDOW: dict[Model, int] = {"30b": 131_072, "106b": 163_840}
"""The one long window each model was trained in without compaction, in tokens (Table 4; 30b only in v1)."""


class PaperScore(Settings):
    """One published pass@1."""

    table: int | None = Field(description="table of the paper; null for v1's fuller tables")
    variant: str = Field(description="our name of the row")
    model: Model = Field(description="30b: GLM-4.7-Flash; 106b: GLM-4.5-Air-SFT")
    benchmark: Benchmark = Field(description="swe: SWE-bench Verified; tb: Terminal-Bench 2.0")
    window: int = Field(description="window of the evaluation, in tokens")
    cap: int = Field(description="most compactions in the evaluation")
    keep_recent: int | None = Field(default=None, description="turns kept; 2 where not given, null at cap 0")
    pass_at_1: float = Field(ge=0, le=1, description="mean over the paper's runs")
    source: Literal["v1", "v2"] = Field(default="v2", description="version of the paper that has the number")

    @model_validator(mode="before")
    @classmethod
    def _two_turns_kept_unless_said(cls, data: dict[str, object]) -> dict[str, object]:
        if data.get("cap") != 0:
            return {"keep_recent": 2, **data}
        return data


class SummaryLength(Settings):
    """Mean summary length before and after training (Figure 4), in tokens."""

    variant: str
    start: float
    end: float


class Paper(Settings):
    """All that the report shows of the paper."""

    scores: tuple[PaperScore, ...]
    summary_lengths: tuple[SummaryLength, ...]
    findings: dict[str, str]

    def score(
        self, variant: str, model: Model, benchmark: Benchmark, *, window: int, cap: int, keep_recent: int | None = 2
    ) -> float | None:
        """A published pass@1, None where the paper has none."""
        keep_recent = keep_recent if cap else None
        for row in self.scores:
            point = (row.variant, row.model, row.benchmark, row.window, row.cap, row.keep_recent)
            if point == (variant, model, benchmark, window, cap, keep_recent):
                return row.pass_at_1
        return None

    def gain(self, variant: str, model: Model, benchmark: Benchmark = "swe", *, long: bool = False) -> float | None:
        """pass@1 above the untrained model's in the same evaluation: the model's own window with three compactions, or
        (`long`) the one long window without. None where the paper lacks either."""
        window, cap = (LONG_WINDOW[model], 0) if long else (OWN_WINDOW[model], 3)
        trained = self.score(variant, model, benchmark, window=window, cap=cap)
        base = self.score("base", model, benchmark, window=window, cap=cap)
        return None if trained is None or base is None else trained - base

    def direction(self, variant: str, *, long: bool = False) -> str:
        """The paper's gain over base on SWE-bench Verified in points, at 30B and 106B, such as `+5.5 / +6.6`.
        Empty for base and for variants that the paper does not have."""
        gains = [self.gain(variant, model, long=long) for model in OWN_WINDOW]
        if variant == "base" or all(gain is None for gain in gains):
            return ""
        return " / ".join("–" if gain is None else f"{100 * gain:+.1f}" for gain in gains).replace("-", "−")


@lru_cache(maxsize=1)
def load_paper() -> Paper:
    """The table shipped with the package."""
    text = files("evaluation.analysis").joinpath("paper.yaml").read_text(encoding="utf-8")
    return Paper.model_validate(yaml.safe_load(text))
