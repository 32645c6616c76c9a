"""The command `collect`: trajectories of a stronger model, to fine-tune on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_options import (
    MODEL,
    ApiKeyEnv,
    BaseUrl,
    Concurrency,
    DatasetPath,
    DryRun,
    Include,
    Job,
    Json,
    Limit,
    MaxCost,
    Overrides,
    Preset,
    Price,
    Repeats,
    SandboxChoice,
    option,
    prices,
    text,
)

if TYPE_CHECKING:
    from flows.experiment import Experiment
    from flows.options import RunOptions

WINDOW = "The window it acts in"


def collect(
    preset: Preset = "collect",
    windows: Annotated[str | None, option("Its one size in tokens: [cyan]32k[/] (1k = 1,024).", WINDOW)] = None,
    caps: Annotated[int | None, option("Most compactions per trial; 0 = one window.", WINDOW, min=0)] = None,
    keep_recent: Annotated[
        int | None, option("Turns kept verbatim after a compaction.", WINDOW, "--keep-recent", min=0)
    ] = None,
    dataset: DatasetPath = None,
    env: SandboxChoice = None,
    include: Include = None,
    limit: Limit = None,
    repeats: Repeats = None,
    base_url: BaseUrl = None,
    model: Annotated[str | None, option("Its name, as the endpoint lists it.", MODEL)] = None,
    api_key_env: ApiKeyEnv = None,
    price: Price = None,
    concurrency: Concurrency = None,
    job: Job = None,
    max_cost: MaxCost = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Let a stronger model solve real tasks, and keep what it solved to fine-tune on.

    It acts as in a sweep, under one setting of the window: every trial is kept below jobs/, and the same command again
    runs what has no result yet. Solved trials (a reward of at least [cyan]collect.min_reward[/]) go into one Parquet
    file, which [cyan]sft.data[/] reads; the command to go on with is printed at the end.

    A preset or YAML file with [cyan]collect[/] and [cyan]sft.data: [{trajectories: collect}][/] does both in one
    `reproduce`.

    [bold]Examples[/]

    compactionrl collect --dataset bench12 --env local --base-url http://localhost:8000/v1 --model big
    --windows 16k --caps 3 --repeats 4 --dry-run

    compactionrl collect --dataset tasks/ --base-url https://api.example.com/v1 --model big --price 2,0.2,8
    --max-cost 20 --json > collected.json

    compactionrl collect --dataset tasks/ --base-url http://localhost:8000/v1 --model big
    --set collect.min_reward=0.5 --set collect.endpoint.tokenizer=models/big
    """
    from flows.session import run_flow

    def flow(experiment: Experiment, options: RunOptions) -> dict[str, Any]:
        from flows.collect import run_collect

        return run_collect(experiment, options)

    def show(console: Any, result: dict[str, Any], run: Any) -> None:
        from flows.collect import print_collected

        print_collected(console, result, run)

    flags = {
        "sft": "null",  # of a preset that trains too, this is the first stage alone
        "agent.compaction.window": windows,
        "agent.compaction.cap": caps,
        "agent.compaction.keep_recent": keep_recent,
        "collect.dataset.path": text(dataset),
        "collect.dataset.sandbox.kind": env,
        "collect.dataset.include": text(include),
        "collect.dataset.limit": limit,
        "collect.repeats": repeats,
        "collect.endpoint.base_url": text(base_url),
        "collect.endpoint.model": text(model),
        "collect.endpoint.api_key_env": api_key_env,
        **{f"collect.endpoint.{name}": value for name, value in prices(price).items()},
        "job.concurrency": concurrency,
        "job.name": text(job),
        "job.max_cost": max_cost,
    }
    raise typer.Exit(run_flow(flow, preset, overrides, flags, dry_run=dry_run, json_output=json_output, show=show))
