"""The command `sweep`: trained checkpoints or any endpoint, on the trail world or on real tasks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flows.cli_options import (
    JOB,
    MODEL,
    SWEPT,
    TASKS,
    ApiKeyEnv,
    BaseUrl,
    Concurrency,
    DatasetPath,
    DryRun,
    Force,
    Include,
    Job,
    Json,
    Limit,
    MaxCost,
    Overrides,
    Price,
    PromptPackFile,
    Repeats,
    SandboxChoice,
    Seeds,
    Variants,
    option,
    prices,
    text,
)

if TYPE_CHECKING:
    from flows.experiment import Experiment
    from flows.options import RunOptions


def sweep(
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            "-p",
            metavar="NAME",
            show_default=False,
            help="Name of a preset or path of a YAML file; default: tiny, or endpoint with [cyan]--engine openai[/].",
        ),
    ] = None,
    windows: Annotated[str | None, option("Windows in tokens: [cyan]32k,64k[/] (1k = 1,024).", SWEPT)] = None,
    caps: Annotated[str | None, option("Most compactions per rollout: [cyan]0,1,3[/]; 0 = one window.", SWEPT)] = None,
    keep_recent: Annotated[
        str | None, option("Turns kept verbatim after a compaction: [cyan]0,2[/].", SWEPT, "--keep-recent")
    ] = None,
    threshold: Annotated[str | None, option("Compact when fewer tokens than this are free.", SWEPT)] = None,
    max_response: Annotated[str | None, option("Most tokens of one action.", SWEPT, "--max-response")] = None,
    summary_cap: Annotated[str | None, option("Most tokens of a summary.", SWEPT, "--summary-cap")] = None,
    prompt_pack: PromptPackFile = None,
    temperature: Annotated[float | None, option("Sampling temperature; 0 = greedy.", SWEPT, min=0)] = None,
    variants: Variants = None,
    seeds: Seeds = None,
    dataset: DatasetPath = None,
    env: SandboxChoice = None,
    network: Annotated[
        Literal["task", "none"] | None, option("none: no network, whatever the task asks for.", TASKS)
    ] = None,
    include: Include = None,
    exclude: Annotated[str | None, option("Without tasks whose id fits a glob.", TASKS)] = None,
    limit: Limit = None,
    sample_seed: Annotated[
        int | None, option("Draw the tasks of --limit at random under this seed.", TASKS, "--sample-seed")
    ] = None,
    max_turns: Annotated[int | None, option("Most turns of a trial.", TASKS, "--max-turns", min=1)] = None,
    repeats: Repeats = None,
    engine: Annotated[
        Literal["torch", "vllm", "openai"] | None,
        option("torch, vllm: checkpoints of the preset; openai: an OpenAI-compatible endpoint.", MODEL),
    ] = None,
    base_url: BaseUrl = None,
    model: Annotated[
        str | None,
        option("Its name, as the endpoint lists it; with another engine a pretrained model's folder.", MODEL),
    ] = None,
    api_key_env: ApiKeyEnv = None,
    request_extra: Annotated[
        str | None,
        option("Further fields of each request, as JSON: [cyan]'{\"top_p\": 0.95}'[/].", MODEL, "--request-extra"),
    ] = None,
    tokenizer: Annotated[
        str | None, option("Folder of the model's tokenizer, where the server has none to ask.", MODEL)
    ] = None,
    reasoning: Annotated[
        Literal["keep", "drop", "count"] | None,
        option("Thinking beside the reply: sent back (keep), forgotten (drop), or only counted.", MODEL),
    ] = None,
    stream: Annotated[bool, option("Receive replies piece by piece.", MODEL, "--stream")] = False,
    price: Price = None,
    summary_model: Annotated[
        str | None, option("Another model that writes the summaries.", MODEL, "--summary-model")
    ] = None,
    summary_base_url: Annotated[
        str | None, option("Its address, if it is another.", MODEL, "--summary-base-url")
    ] = None,
    concurrency: Concurrency = None,
    job: Job = None,
    max_cost: MaxCost = None,
    max_tokens: Annotated[
        str | None, option("Tokens this command may spend, prompts included.", JOB, "--max-tokens")
    ] = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    json_output: Json = False,
    force: Force = False,
) -> None:
    """Evaluate every combination of window, cap and keep_recent.

    Without [cyan]--dataset[/] on the trail world, whose checkpoints are trained where they are missing. With it on real
    tasks in sandboxes: every trial is kept below jobs/, and the same command again runs what has no result yet.

    [bold]Examples[/]

    compactionrl sweep --windows 96,128,192 --caps 0,1,3 --keep-recent 0,2

    compactionrl sweep --dataset bench12 --env local --engine openai --base-url http://localhost:8000/v1
    --model qwen3-8b --windows 16k,32k --caps 0,1,3 --keep-recent 0,2 --repeats 3 --dry-run

    compactionrl sweep --dataset tasks/ --env docker --engine openai --base-url https://api.example.com/v1
    --model big --summary-model small --price 2,0.2,8 --max-cost 20
    """
    from flows.session import run_flow

    def flow(experiment: Experiment, options: RunOptions) -> dict[str, Any]:
        from flows.sweep import run_sweep

        return run_sweep(experiment, options)

    chosen = engine or ("openai" if base_url else None)
    served = chosen == "openai"
    endpoint = {
        "api_key_env": api_key_env,
        "request_extra": request_extra,
        "reasoning": reasoning,
        "stream": json.dumps(True) if stream else None,
        **prices(price),
    }
    flags = {
        "engine": chosen,
        "evaluation.windows": windows,
        "evaluation.caps": caps,
        "evaluation.keep_recents": keep_recent,
        "agent.compaction.threshold": threshold,
        "agent.compaction.max_response": max_response,
        "agent.compaction.summary_cap": summary_cap,
        "agent.compaction.prompt_pack": text(prompt_pack),
        "agent.temperature": temperature,
        "variants": variants,
        "seeds": seeds,
        "evaluation.dataset.path": text(dataset),
        "evaluation.dataset.sandbox.kind": env,
        "evaluation.dataset.sandbox.network": network,
        "evaluation.dataset.include": text(include),
        "evaluation.dataset.exclude": text(exclude),
        "evaluation.dataset.limit": limit,
        "evaluation.dataset.sample_seed": sample_seed,
        "evaluation.repeats": repeats,
        "agent.max_turns": max_turns,
        "endpoint.base_url": text(base_url),
        "endpoint.model": text(model) if served else None,
        "sft.model": None if served else text(model),
        "endpoint.tokenizer": text(tokenizer),
        **{f"endpoint.{name}": value for name, value in endpoint.items()},
        "job.concurrency": concurrency,
        "job.name": text(job),
        "job.max_cost": max_cost,
        "job.max_tokens": max_tokens,
    }
    if summary_model or summary_base_url:
        flags |= {
            "summary_endpoint.base_url": text(summary_base_url or base_url),
            "summary_endpoint.model": text(summary_model or model),
            **{f"summary_endpoint.{name}": value for name, value in endpoint.items()},
        }
    chosen_preset = preset or ("endpoint" if served else "tiny")
    raise typer.Exit(
        run_flow(flow, chosen_preset, overrides, flags, force=force, dry_run=dry_run, json_output=json_output)
    )
