"""What `--dry-run` says of a sweep on real tasks: trials done and left, tokens, dollars."""

from __future__ import annotations

from pathlib import Path

from evaluation.estimate import TURN_TOKENS, TURNS, Tokens, assumed_tokens, measured_tokens
from evaluation.grid import Cell
from evaluation.job import Job
from flows.chain import Plan
from tasks.stages import explained


def job_costs(plan: Plan, jobs: Path) -> dict[str, str]:
    """Name → text, for the plan's end. Raises UserError where a task has changed since its trials ran."""
    cells = [cell for variant, seed in plan.policies for cell in plan.cells(variant, seed)]
    left: dict[Cell, int] = {}
    done = []
    for cell in cells:
        job = plan.job(cell)
        trials = job.trials()
        with explained(cell.name):
            finished = Job(job.folder(jobs), job.decides(), trials, concurrency=1, attempts=1).finished()
        left[cell] = len(trials) - len(finished)
        done += list(finished.values())
    measured = measured_tokens(done)
    compaction = plan.experiment.agent.compaction
    turns = min(TURNS, plan.experiment.agent.max_turns)
    each = {cell: measured or assumed_tokens(cell.settings(compaction), turns) for cell in cells}
    basis = (
        f"as {len(done):,} finished trials took"
        if measured
        else f"if a trial has {turns} turns of {TURN_TOKENS} tokens"
    )
    prompt, sampled = (sum(left[c] * getattr(each[c], name) for c in cells) for name in ("prompt", "completion"))
    return {
        "trials": f"{sum(left.values()):,} to run, {len(done):,} done",
        "tokens": f"about {_tokens(prompt)} prompt and {_tokens(sampled)} sampled ({basis})",
        "cost": _dollars(plan, {c: (left[c], each[c]) for c in cells}),
    }


def _tokens(n: float) -> str:
    return f"{n / 1e6:,.1f} M" if n >= 1e6 else f"{n / 1e3:,.1f} k"


def _dollars(plan: Plan, trials: dict[Cell, tuple[int, Tokens]]) -> str:
    endpoint = plan.experiment.endpoint
    if endpoint is None:
        return "this machine's time"
    if not endpoint.priced:
        return "unknown: give prices with --price INPUT,CACHED,OUTPUT (US dollars per million tokens)"

    def total(cached: bool) -> float:
        return sum(
            n * (endpoint.cost(round(t.prompt), round(t.repeated) if cached else 0, round(t.completion)) or 0.0)
            for n, t in trials.values()
        )

    return f"about ${total(True):,.2f} if the server caches every window, ${total(False):,.2f} if it caches none"
