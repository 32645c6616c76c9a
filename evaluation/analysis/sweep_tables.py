"""A sweep as text: the table for people, the same as CSV and Markdown, and the answers in sentences."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields

import numpy as np

from evaluation.analysis.comparison import Point
from evaluation.analysis.statistics import Comparison
from evaluation.analysis.sweep import ALPHA, Factor, FactorAnswer, FactorLevel, SweepRow, families
from evaluation.analysis.tables import format_difference, format_interval, format_p, format_score
from evaluation.grid import format_tokens

SWEEP_COLUMNS = (
    "variant",
    "window",
    "cap",
    "keep",
    "pass@1 [95%]",
    "± repeats",
    "scored",
    "against the best [95%]",
    "p adjusted",
    "verdict",
    "compacted",
    "compactions",
    "summary tokens",
    "commands (again)",
    "prompt tokens (cached)",
    "sampled tokens",
    "$ per trial",
    "$ per solved",
)
ANSWER_COLUMNS = ("variant", "window", "cap", "keep", "pass@1 [95%]", "against the best [95%]", "verdict", "scored")
"""Those of SWEEP_COLUMNS that answer the question and fit a terminal; the rest says why and at what price."""

TERMINAL_NOTE = (
    "“worse”: below the best by a paired test, corrected for the number of settings; else “inside the noise”. The best "
    "is chosen on the tasks that score it, so confirm it on others. sweep.md and the report say more."
)

SWEEP_NOTES = (
    "Verdict: a setting is “worse” where p of the paired test against the best setting of its variant, times the "
    "number of settings compared with it, is below 0.05 (so the truly best setting is called worse in fewer than 5 of "
    "100 sweeps), and “inside the noise” otherwise: not told apart by these tasks, which is not the same as equal.",
    "The best of many settings is chosen on the same tasks that score it: its pass@1 and its lead are too high by some "
    "luck, so confirm it on tasks that took no part in the choice. A setting with a score for fewer than 90% of the "
    "tasks that others have cannot be the best.",
    "Intervals are 95% bootstrap intervals over whole tasks (pairs of seed and task with several seeds), each by "
    "itself: among many settings some intervals of a difference leave out 0 by luck alone, so they give no verdict.",
    "“Compacted” is pass@1 of the trials that compacted or tried to; “again” counts commands run again, word for word, "
    "after a compaction; tokens, commands and compactions are means per trial.",
)
FACTOR_NOTE = (
    "Each value is averaged over the settings of the other factors that all values have (cap 0 stands for every "
    "keep_recent), on tasks with a score in all of them; differences are paired with the best value’s, verdicts as for "
    "settings. An average hides what depends on the other factors."
)


def format_sweep_row(row: SweepRow) -> tuple[str, ...]:
    """The row as text, in the order of SWEEP_COLUMNS."""
    return (
        row.variant + (" · greedy" if row.temperature == 0 else ""),
        format_tokens(row.window),
        str(row.cap),
        "–" if row.keep_recent is None else str(row.keep_recent),
        f"{format_score(row.pass_at_1)} {format_interval(row.interval)}".strip(),
        format_score(row.pass_at_1_std),
        f"{row.scored:,} / {row.n_trials:,}",
        _difference(row),
        format_p(row.p_adjusted),
        row.verdict or "–",
        format_score(row.pass_at_1_compacted),
        f"{row.compactions_per_rollout:.2f}",
        "–" if row.summary_tokens is None else f"{row.summary_tokens:,.0f}",
        f"{row.commands:.1f} ({row.repeated_commands:.1f})",
        f"{row.prompt_tokens:,.0f} ({row.cached_tokens:,.0f})",
        f"{row.generated_tokens:,.0f}",
        format_cost(row.cost_per_trial),
        format_cost(row.cost_per_solved),
    )


def answer_row(row: SweepRow) -> tuple[str, ...]:
    """The row as text, in the order of ANSWER_COLUMNS."""
    texts = dict(zip(SWEEP_COLUMNS, format_sweep_row(row), strict=True))
    return tuple(texts[column] for column in ANSWER_COLUMNS)


def format_cost(dollars: float | None) -> str:
    """Three digits that matter below a dollar, cents above."""
    if dollars is None:
        return "–"
    return f"{dollars:,.2f}" if dollars >= 1 else np.format_float_positional(dollars, 3, fractional=False, trim="-")


def sweep_csv(rows: Sequence[SweepRow]) -> str:
    """Raw numbers under the names of SweepRow's fields; empty where there is none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(SweepRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def sweep_markdown(rows: Sequence[SweepRow]) -> str:
    """The answers, the table and its notes."""
    lines = [
        *(f"{answer}\n" for answer in sweep_answers(rows)),
        _markdown_row(SWEEP_COLUMNS),
        _markdown_row(["---", *["--:"] * (len(SWEEP_COLUMNS) - 1)]),
        *(_markdown_row(format_sweep_row(row)) for row in rows),
        "",
        *(f"- {note}" for note in SWEEP_NOTES),
    ]
    return "\n".join(lines) + "\n"


def sweep_answers(rows: Sequence[SweepRow]) -> list[str]:
    """Per variant: the best setting, how many are not told apart from it, and the cheapest of those."""
    groups = families(rows)
    return [_answer(group, prefix=len(groups) > 1) for group in groups.values()]


def factor_lines(answers: Sequence[FactorAnswer]) -> list[str]:
    """One sentence per factor: `cap: 3 is best; 1 is inside the noise (−0.02 [−0.06, 0.01]); 0 is worse (…)`. Named by
    variant where there are several."""
    several = len({(answer.variant, answer.temperature) for answer in answers}) > 1
    told = [a for a in answers if any(level.standing.verdict for level in a.levels)]
    return [(f"{_family(a.variant, a.temperature)} · " if several else "") + _factor_line(a) for a in told]


def _answer(rows: Sequence[SweepRow], *, prefix: bool) -> str:
    name = f"{_family(rows[0].variant, rows[0].temperature)}: " if prefix else ""
    best = next((row for row in rows if row.verdict == "best"), None)
    if best is None and sum(row.pass_at_1 is not None for row in rows) > 1:
        return f"{name}no setting solved a task: there is nothing to choose by."
    if best is None:
        return f"{name}fewer than two settings have a score: nothing to compare."
    others = [row for row in rows if row is not best]
    close = [row for row in others if row.verdict == "inside the noise"]
    score = f"{format_score(best.pass_at_1)} {format_interval(best.interval)}".strip()
    worse = sum(row.verdict == "worse" for row in others)
    text = (
        f"{name}{setting(best.point)} is best with pass@1 {score}; of the other {len(others)} settings {worse} are "
        f"called worse and {len(close)} inside the noise."
    )
    least = 2.0 ** (1 - best.n_tasks * best.seeds)  # p of a setting that loses every task
    if least * len(others) >= ALPHA:
        return f"{text} With so few tasks no setting could be told apart from the best."
    return text + _cheapest(best, close)


def _cheapest(best: SweepRow, close: Sequence[SweepRow]) -> str:
    """In dollars where all have a price, else in tokens. Only settings whose own interval reaches 0: no verdict is not
    yet a reason to choose a setting that scored far less."""
    rows = [best, *(row for row in close if row.difference_high is not None and row.difference_high >= 0)]
    dollars = [row.cost_per_trial for row in rows]
    tokens = [row.prompt_tokens + row.generated_tokens for row in rows]
    prices = [d for d in dollars if d] if all(dollars) else tokens
    cheapest = prices.index(min(prices))
    if cheapest == 0:
        return ""
    saved = 1 - prices[cheapest] / prices[0]
    unit = "money" if all(dollars) else "prompt and sampled tokens"
    row = rows[cheapest]
    return (
        f" The cheapest whose difference to it has an interval around 0 is {setting(row.point)}: {_difference(row)} "
        f"for {saved:.0%} less {unit} per trial."
    )


def setting(point: Point) -> str:
    """For people, without the temperature: `window 64k · cap 3 · keep 2`."""
    return Point(point.variant, point.window, point.cap, point.keep_recent, 1.0).setting


def _factor_line(answer: FactorAnswer) -> str:
    if not answer.levels:
        return f"{answer.factor}: no answer, no setting of the other factors was evaluated at all its values"
    return f"{answer.factor}: " + "; ".join(_level(answer.factor, level) for level in answer.levels)


def _level(factor: Factor, level: FactorLevel) -> str:
    value = format_tokens(level.value) if factor == "window" else str(level.value)
    standing = level.standing
    if standing.verdict is None:
        return f"{value} has no score to compare"
    if standing.comparison is None:
        return f"{value} is best"
    return f"{value} is {standing.verdict} ({format_difference(standing.comparison, digits=2)})"


def _family(variant: str, temperature: float) -> str:
    return f"{variant} · greedy" if temperature == 0 else variant


def _difference(row: SweepRow) -> str:
    return format_difference(
        Comparison(0, 0, None, None, row.difference, row.difference_interval, row.p, None), digits=3
    )


def _markdown_row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
