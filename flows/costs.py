"""What `--dry-run` says of a sweep on real tasks: trials done and left, tokens, dollars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compaction.engines.endpoint_settings import EndpointSettings
from evaluation.estimate import TURN_TOKENS, TURNS, Tokens, assumed_tokens, measured_tokens
from evaluation.grid import Cell
from evaluation.job import Job
from flows.plan import Plan
from tasks.evaluate_job import CellJob
from tasks.stages import explained


def evaluation_costs(plan: Plan, jobs: Path) -> dict[str, str]:
    """Name → text, for the plan's end. Raises UserError where a task has changed since its trials ran."""
    cells = [cell for variant, seed in plan.policies for cell in plan.cells(variant, seed)]
    return _job_costs([plan.job(cell) for cell in cells], plan.experiment.endpoint, jobs)


def collect_costs(plan: Plan, jobs: Path) -> dict[str, str]:
    """The same of the stronger model's trials; nothing where none is asked."""
    settings, job = plan.experiment.collect, plan.collect_job
    return {} if settings is None or job is None else _job_costs([job], settings.endpoint, jobs)


def _job_costs(cells: Sequence[CellJob], endpoint: EndpointSettings | None, jobs: Path) -> dict[str, str]:
    left: dict[Cell, int] = {}
    done = []
    for job in cells:
        trials = job.trials()
        with explained(job.cell.name):
            finished = Job(job.folder(jobs), job.decides(), trials, concurrency=1, attempts=1).finished()
        left[job.cell] = len(trials) - len(finished)
        done += list(finished.values())
    measured = measured_tokens(done)
    agent = cells[0].agent
    turns = min(TURNS, agent.max_turns)
    each = {cell: measured or assumed_tokens(cell.settings(agent.compaction), turns) for cell in left}
    basis = (
        f"as {len(done):,} finished trials took"
        if measured
        else f"if a trial has {turns} turns of {TURN_TOKENS} tokens"
    )
    prompt, sampled = (sum(left[c] * getattr(each[c], name) for c in left) for name in ("prompt", "completion"))
    return {
        "trials": f"{sum(left.values()):,} to run, {len(done):,} done",
        "tokens": f"about {_tokens(prompt)} prompt and {_tokens(sampled)} sampled ({basis})",
        "cost": _dollars(endpoint, [(left[c], each[c]) for c in left]),
    }


def _tokens(n: float) -> str:
    return f"{n / 1e6:,.1f} M" if n >= 1e6 else f"{n / 1e3:,.1f} k"


def _dollars(endpoint: EndpointSettings | None, trials: Sequence[tuple[int, Tokens]]) -> str:
    if endpoint is None:
        return "this machine's time"
    if not endpoint.priced:
        return "unknown: give prices with --price INPUT,CACHED,OUTPUT (US dollars per million tokens)"

    def total(cached: bool) -> float:
        return sum(
            n * (endpoint.cost(round(t.prompt), round(t.repeated) if cached else 0, round(t.completion)) or 0.0)
            for n, t in trials
        )

    return f"about ${total(True):,.2f} if the server caches every window, ${total(False):,.2f} if it caches none"
