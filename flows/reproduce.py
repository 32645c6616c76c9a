"""The flow `reproduce`: train the variants, evaluate them over one-factor sweeps, write the report."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compaction.files import write_durably
from evaluation.analysis.pooling import PresetPoint
from evaluation.results import CellResult
from flows.chain import Chain, in_order
from flows.costs import collect_costs, evaluation_costs
from flows.experiment import Experiment
from flows.options import RunOptions
from flows.pages import flow_run_page, mlflow_note, publish_mlflow_link, publish_result
from flows.pairing import pairing_warnings, write_cards
from flows.plan import Plan, Planned
from flows.runs import RunFolder
from flows.services import Home
from tasks.artifacts import PrefectProgress, Publisher
from tasks.caching import Manifest, StageStore, sha256_json
from tasks.cluster import Cluster
from tasks.errors import CommandError
from tasks.provenance import versions
from tasks.stages import StageRecord, StageRunner
from tasks.tracking import Tracker, git_state

if TYPE_CHECKING:
    from evaluation.analysis.plots import CurvePoint


def run_reproduce(experiment: Experiment, options: RunOptions) -> dict[str, Any]:
    """Runs (or with `options.dry_run` plans) the reproduction; the object is what `--json` prints."""
    if options.dry_run:
        return describe(Plan(experiment), options)
    from flows.deployments import reproduce, run_as_command

    return run_as_command(reproduce, experiment, options)


def describe(plan: Plan, options: RunOptions) -> dict[str, Any]:
    """The plan without running it: stages with cached / will run / why, cells, what it costs."""
    planned = plan.look_up(StageStore(options.home.stages), force=options.force)
    cells = [p.spec.label for p in planned if p.spec.stage == "evaluate"]
    trials = len(cells) * plan.n_tasks * plan.experiment.evaluation.repeats
    cost = {"trials": f"{trials:,}"} if plan.dataset is None else evaluation_costs(plan, options.home.jobs)
    collecting = {f"collect: {name}": text for name, text in collect_costs(plan, options.home.jobs).items()}
    return {
        "experiment": plan.experiment.config(),
        "stages": shown(planned),
        "cells": cells,
        "model": described_model(plan.experiment),
        "warnings": pairing_warnings(plan),
        "cost": collecting | cost | {"stages to run": str(sum(not p.cached for p in planned))},
    }


def described_model(experiment: Experiment) -> str | None:
    """What is trained, and from where; None where a model behind an endpoint is asked."""
    if experiment.sft is None or experiment.engine == "openai":
        return None
    model = experiment.sft.model
    if model is None:
        start = "a new tiny one"
    elif Path(model).expanduser().is_dir():
        start = model
    else:
        start = f"{model}, from the Hugging Face hub (there is no folder of that name here)"
    return f"{start}; {experiment.engine} samples"


def shown(planned: Sequence[Planned]) -> list[dict[str, Any]]:
    """Stages as a plan shows them."""
    return [{"name": p.spec.stage, "label": p.spec.label, "cached": p.cached, "why": p.why} for p in planned]


async def run_plan(plan: Plan, options: RunOptions) -> dict[str, Any]:
    """Runs the plan inside a Prefect flow run."""
    with opened_chain(plan, options) as (chain, run, publisher):
        await chain.run()
        result = _finish(plan, chain, run)
        assert options.services is not None
        publish_result(publisher, options.services, run, result)
        return result


@contextmanager
def opened_chain(plan: Plan, options: RunOptions) -> Iterator[tuple[Chain, RunFolder, Publisher]]:
    """The plan's chain, inside a Prefect flow run, with the MLflow run and the cluster that its stages use."""
    if options.services is None or options.run is None:
        raise ValueError("a run needs services and a run folder")
    from prefect.runtime import flow_run

    services, run, experiment = options.services, options.run, plan.experiment
    warnings = pairing_warnings(plan)
    for warning in warnings:
        options.progress.note(f"warning: {warning}")
    config = experiment.config()
    cluster = Cluster(services.ray_address, run.name, run.logs)
    artifacts = options.home.mlflow_artifacts if services.mlflow_is_ours else None
    flow_run_id = str(flow_run.id)
    tags = {"prefect_flow_run_id": flow_run_id, "run_folder": str(run.path), "warnings": "\n".join(warnings) or None}
    links = {
        "prefect_flow_run_url": flow_run_page(services, flow_run_id),
        "mlflow.note.content": mlflow_note(services, run, flow_run_id),
    }
    try:
        with (
            Publisher.open() as publisher,
            Tracker.open(
                services.mlflow_uri,
                preset=experiment.name,
                config=config,
                config_digest=sha256_json(config),
                artifacts=artifacts,
                name=run.name,
                tags=tags,
            ) as tracker,
        ):
            parent = tracker.parent
            ids = {"mlflow_run_id": parent.run_id, "mlflow_experiment_id": parent.experiment_id}
            run.update(**ids, prefect_flow_run_id=flow_run_id)
            parent.set_tags(links)
            publish_mlflow_link(publisher, services, run.record)
            runner = StageRunner(
                StageStore(options.home.stages),
                tracker,
                PrefectProgress(options.progress, publisher),
                cluster,
                asyncio.Semaphore(os.cpu_count() or 1),
                force=options.force,
                on_record=lambda records: run.update(stages=[asdict(r) for r in records]),
            )
            yield Chain(plan, runner, options.home.jobs), run, publisher
    finally:
        cluster.close()


def _finish(plan: Plan, chain: Chain, run: RunFolder) -> dict[str, Any]:
    """results.json, the report, models' cards, and the object that the command prints."""
    from evaluation.analysis.tables import headline_metrics

    outcomes, parent = in_order(chain.results, plan), chain.runner.tracker.parent
    if not outcomes:
        raise chain.errors[0] if chain.errors else CommandError("nothing was evaluated; name at least one variant")
    result = {
        "status": "partial" if chain.errors else "ok",
        "errors": [f"{type(error).__name__}: {error}" for error in chain.errors],
        "warnings": pairing_warnings(plan),
        "results": [outcome.result for outcome in outcomes],
        "stages": [asdict(record) for record in chain.runner.records],
        "sweep": plan.full_product,
        "jobs": str(chain.jobs_folder) if plan.dataset else None,
        "preset_point": _point(plan.experiment).model_dump(),
        "provenance": provenance(plan),
        "mlflow_run_id": parent.run_id,
    }
    write_durably(run.results, json.dumps(result, indent=1, allow_nan=False))
    write_run_report(run, chain.runner.store.root)
    cells = [CellResult.model_validate(outcome.result) for outcome in outcomes]
    write_cards(plan, chain.runner.store, cells, run.name)
    for path in (run.report, run.results, *_write_tables(run, result)):
        parent.log_file(path)
    parent.log_step(0, headline_metrics(cells, _point(plan.experiment)))
    run.update(errors=result["errors"], status=result["status"])
    return result


def _write_tables(run: RunFolder, result: dict[str, Any]) -> list[Path]:
    """A sweep's table for people and for programs."""
    if not result["sweep"]:
        return []
    from evaluation.analysis.sweep import sweep_table
    from evaluation.analysis.sweep_tables import sweep_csv, sweep_markdown

    rows = sweep_table([CellResult.model_validate(cell) for cell in result["results"]])
    return [
        write_durably(run.path / "sweep.csv", sweep_csv(rows)),
        write_durably(run.path / "sweep.md", sweep_markdown(rows)),
    ]


def provenance(plan: Plan) -> dict[str, Any]:
    """What a result carries: config, seeds, commit, versions."""
    experiment = plan.experiment
    return {
        "preset": experiment.name,
        "seeds": ", ".join(str(seed) for seed in dict.fromkeys(seed for _, seed in plan.policies)),
        **git_state(Path(__file__).resolve().parents[1]),
        "config_digest": sha256_json(experiment.config()),
        "versions": versions(),
        "config": experiment.config(),
    }


def rebuild_report(home: Home, run: RunFolder) -> Path:
    """Writes report.html again from what the run left on disk. Raises CommandError where it has no results."""
    return write_run_report(run, home.stages)


def write_run_report(run: RunFolder, stages: Path) -> Path:
    """The report of a finished run, from its results.json and its stages' curves."""
    from evaluation.analysis.report import ReportData, write_report

    result = run.read_results()
    data = ReportData(
        title=run.name,
        preset=PresetPoint.model_validate(result["preset_point"]),
        cells=[CellResult.model_validate(cell) for cell in result["results"]],
        curves=read_curves(result["stages"], stages),
        provenance=result["provenance"],
        sweep=result["sweep"],
        links={
            "output folder": str(run.path),
            "MLflow run": result["mlflow_run_id"],
            "run again": str(run.record["command"]),
        },
    )
    return write_report(run.report, data)


def read_curves(records: Sequence[dict[str, Any]], stages: Path) -> list[CurvePoint]:
    """Training curves of the run's PPO stages; those whose folder was removed are left out."""
    from evaluation.analysis.plots import CurvePoint

    points = []
    for record in (StageRecord(**r) for r in records):
        manifest = Manifest.read(stages / record.folder)
        if record.name != "ppo" or manifest is None:
            continue
        variant, _, seed = record.label.rpartition(" seed ")
        curves = manifest.result["curves"]
        for step in range(len(next(iter(curves.values())))):
            values = {name: series[step] for name, series in curves.items()}
            points.append(CurvePoint(variant, int(seed), step + 1, values))
    return points


def _point(experiment: Experiment) -> PresetPoint:
    compaction = experiment.agent.compaction
    return PresetPoint(
        window=compaction.window,
        cap=compaction.cap,
        keep_recent=compaction.keep_recent,
        long_window=experiment.long_window if "no-compaction-long" in experiment.variants else None,
    )
