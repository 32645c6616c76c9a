"""The flow `collect`: a stronger model solves real tasks, and what it solved becomes a file to fine-tune on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compaction.files import write_durably
from compaction.settings import AgentSettings
from flows.chain import Chain
from flows.costs import collect_costs
from flows.experiment import PRESETS, Experiment
from flows.options import RunOptions
from flows.output import STATUS_TEXT, print_places
from flows.plan import Plan, look_up
from flows.presets_loader import read_preset, validate
from flows.reproduce import opened_chain, shown
from flows.runs import COLLECTED, RunFolder
from flows.session import in_home
from tasks.caching import StageOutcome, StageStore
from tasks.collect import SUMMARY, TRAJECTORIES, CollectSettings
from tasks.errors import UserError

STUDENT = "collect"
"""The preset that the printed next command starts from: it sweeps nothing"""
STEPS, TOKENS_PER_STEP = 200, 16_384
"""Of the fine-tuning in that command: a start, to be changed"""


def run_collect(experiment: Experiment, options: RunOptions) -> dict[str, Any]:
    """Runs (or with `options.dry_run` plans) the stage `collect` alone; the object is what `--json` prints."""
    _settings(experiment)
    if options.dry_run:
        plan = Plan(experiment)
        stages = [spec for spec in (plan.collect(),) if spec is not None]
        planned = look_up(stages, StageStore(options.home.stages), force=options.force)
        costs = collect_costs(plan, options.home.jobs)
        return {"experiment": experiment.config(), "stages": shown(planned), "cost": costs}
    from flows.deployments import collect, run_as_command

    return run_as_command(collect, experiment, options)


async def collect_trajectories(experiment: Experiment, options: RunOptions) -> dict[str, Any]:
    """Runs the stage inside a Prefect flow run, and leaves its files in the run's folder."""
    settings = _settings(experiment)
    with opened_chain(Plan(experiment), options) as (chain, run, _):
        outcome = await chain.collect()
        assert outcome is not None, "the experiment collects"
        result = _result(experiment, settings, chain, outcome, run)
        for path in (run.path / TRAJECTORIES, run.path / SUMMARY):
            chain.runner.tracker.parent.log_file(path)
        run.update(errors=result["errors"], status=result["status"])
        return result


def _settings(experiment: Experiment) -> CollectSettings:
    if experiment.collect is None:
        raise UserError("nobody is asked: give --dataset bench12 --base-url http://HOST:PORT/v1 --model NAME")
    return experiment.collect


def _result(
    experiment: Experiment, settings: CollectSettings, chain: Chain, outcome: StageOutcome, run: RunFolder
) -> dict[str, Any]:
    for name in (TRAJECTORIES, SUMMARY):
        shutil.copy(outcome.folder / name, run.path / name)
    job = chain.plan.collect_job
    assert job is not None, "the experiment collects"
    result = {
        "status": "partial" if outcome.unfinished else "ok",
        "errors": [f"CommandError: {outcome.unfinished}"] if outcome.unfinished else [],
        "summary": outcome.result,
        "trajectories": str(run.path / TRAJECTORIES),
        "jobs": str(job.folder(chain.jobs)),
        "stages": [asdict(record) for record in chain.runner.records],
        "next": next_command(experiment, settings, run),
        "mlflow_run_id": chain.runner.tracker.parent.run_id,
    }
    write_durably(run.path / COLLECTED, json.dumps(result, indent=1, allow_nan=False))
    return result


def next_command(experiment: Experiment, settings: CollectSettings, run: RunFolder) -> str:
    """Fine-tunes a student on the file, under the agent's settings that it was made with, and evaluates it on the same
    tasks."""
    dataset = settings.dataset
    preset = validate(AgentSettings, read_preset(PRESETS, STUDENT)["agent"], where=f"preset {STUDENT}")
    values: dict[str, Any] = {
        "sft.data": [{"trajectories": str(run.path / TRAJECTORIES), "min_reward": settings.min_reward}],
        "sft.sft.stages": [{"steps": STEPS, "tokens_per_step": TOKENS_PER_STEP}],
        **dict(_different(experiment.agent.model_dump(mode="json"), preset.model_dump(mode="json"), "agent.")),
        **{f"{place}.path": dataset.path for place in ("dataset", "evaluation.dataset")},
        **{f"{place}.sandbox.kind": dataset.sandbox.kind for place in ("dataset", "evaluation.dataset")},
    }
    words = [word for name, value in values.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    fine_tuned = ["--model", "STUDENT", "--variants", "base"]  # no reinforcement learning behind it
    return in_home(["compactionrl", "reproduce", "--preset", STUDENT, *fine_tuned, *words])


def _different(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names that are not the same in both."""
    for name, value in mine.items():
        if isinstance(value, dict):
            yield from _different(value, theirs[name], f"{prefix}{name}.")
        elif value != theirs[name]:
            yield f"{prefix}{name}", value


def print_collected(console: Console, result: Mapping[str, Any], run: RunFolder) -> None:
    """What was tried and kept, what it took, and how to train on it."""
    table = Table("", "", title="Trajectories", title_justify="left", show_header=False)
    for name, text in _rows(result["summary"]):
        table.add_row(name, text)
    console.print(table)
    places = {"file": result["trajectories"], "trials": result["jobs"], "folder": str(run.path)}
    places |= {f"open {name}": text for name, text in result["open"].items()}
    places["resume" if result["status"] != "ok" else "run again"] = str(run.record["command"])
    console.print(STATUS_TEXT["ok"] if result["status"] == "ok" else "[yellow]partly done: some trials are missing[/]")
    print_places(console, result["errors"], places)
    console.print(
        "Fine-tune on them (STUDENT is a pretrained model's folder; evaluation.dataset.path may name tasks it has not "
        "seen):",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"  {escape(result['next'])}", highlight=False, soft_wrap=True)


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    s, cost = summary, summary["cost"]
    yield "tried", f"{s['tried']:,} of {s['trials']:,} trials, {s['without_reward']:,} without a reward"
    yield "solved", f"{s['solved']:,} trials, {s['tasks_solved']:,} tasks"
    yield "kept", f"{s['kept']:,} trajectories, {s['kept_compacted']:,} of them compacted"
    yield (
        "tokens",
        f"{s['prompt_tokens']:,} prompt ({s['cached_tokens']:,} cached), {s['generated_tokens']:,} sampled",
    )
    yield "cost", "unknown: a price or the server's counts are missing" if cost is None else f"${cost:,.2f}"
