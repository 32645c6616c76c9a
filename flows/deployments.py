"""The flows as Prefect knows them: at module level, with flat parameters that its UI makes a form of.

The command line runs these very flows and hands over what it has opened (run folder, progress, services); a run that
Prefect starts, from its UI, a schedule or a work pool, opens the same by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Annotated, Any, Literal

from prefect import Flow, flow
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import Field

from evaluation.settings import DatasetSettings, SandboxKind
from evaluation.tasksets.datasets import SHIPPED
from flows.cli_options import overrides_of, text
from flows.collect import collect_trajectories
from flows.experiment import Experiment, Variant
from flows.options import RunOptions
from flows.plan import Plan
from flows.reproduce import run_plan
from flows.session import Request, Terminated, deployed_run, portable_file, portable_folder
from tasks.errors import CommandError
from tasks.stages import failed

COMMAND: ContextVar[tuple[Experiment, RunOptions] | None] = ContextVar("COMMAND", default=None)
"""What the command line has opened; None in a run that Prefect started"""
Sandbox = Literal["", SandboxKind]
Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


def _run_name() -> str:
    """The run folder's name; a run that Prefect started keeps the one it has there."""
    command = COMMAND.get()
    return command[1].run.name if command and command[1].run else str(flow_run.name)


@flow(flow_run_name=_run_name, persist_result=False)
async def reproduce(
    preset: str = "tiny",
    variants: tuple[Variant, ...] = (),
    seeds: tuple[int, ...] = (),
    model: str = "",
    engine: str = "",
    dataset: str = "",
    env: Sandbox = "",
    prompt_pack: str = "",
    overrides: tuple[str, ...] = (),
    force: bool = False,
) -> Any:
    """Train the variants, evaluate them over one-factor sweeps and write the report.

    Args:
        preset: Name of a preset (tiny, smoke) or path of a YAML file.
        variants: Policies to compare; none = those of the preset.
        seeds: Training seeds; none = those of the preset.
        model: Pretrained model to start from: folder of a checkpoint, or name on the hub; none = the preset's.
        engine: What samples: torch or vllm; none = the preset's.
        dataset: Real tasks to train and evaluate on instead of the trail world; none = the preset's.
        env: Sandbox of real tasks: docker, or local (bubblewrap); none = the preset's, else docker.
        prompt_pack: Summary instruction and resume text: a name, or a file; none = the preset's.
        overrides: Settings to change, each as KEY=VALUE, for example ppo.steps=20.
        force: Run every stage again, finished or not.
    """
    started = {"sft.model": model, "engine": engine, "agent.compaction.prompt_pack": prompt_pack}
    tasks = tasks_of("dataset", dataset, env) | tasks_of("evaluation.dataset", dataset, env)
    flags = (*flags_of(variants=variants, seeds=seeds), *texts_of(started | tasks))
    request = Request("reproduce", preset, flags, overrides, force)
    return await _run(request, _planned(Plan))


@flow(flow_run_name=_run_name, persist_result=False)
async def sweep(
    preset: str = "tiny",
    windows: tuple[Size, ...] = (),
    caps: tuple[Count, ...] = (),
    keep_recent: tuple[Count, ...] = (),
    variants: tuple[Variant, ...] = (),
    seeds: tuple[int, ...] = (),
    dataset: str = "",
    env: Sandbox = "",
    base_url: str = "",
    model: str = "",
    overrides: tuple[str, ...] = (),
    force: bool = False,
) -> Any:
    """Evaluate every combination of window, cap and keep_recent.

    Args:
        preset: Name of a preset (tiny, smoke; endpoint for a model behind base_url) or path of a YAML file.
        windows: Windows in tokens; none = those of the preset.
        caps: Most compactions per rollout, 0 = a single window; none = those of the preset.
        keep_recent: Numbers of recent turns kept verbatim; none = those of the preset.
        variants: Policies to compare; none = those of the preset.
        seeds: Training seeds; none = those of the preset.
        dataset: Real tasks: bench12, a folder of task folders, a list file, registry.json; none = the preset's.
        env: Sandbox of real tasks: docker, or local (bubblewrap); none = the preset's, else docker.
        base_url: Address of an OpenAI-compatible endpoint; none = the preset's. Its key stays in the environment.
        model: The model's name there.
        overrides: Settings to change, each as KEY=VALUE, for example evaluation.n_tasks=100.
        force: Run every stage again, finished or not.
    """
    axes = {"evaluation.windows": windows, "evaluation.caps": caps, "evaluation.keep_recents": keep_recent}
    endpoint = {"endpoint.base_url": base_url, "endpoint.model": model, "engine": "openai" if base_url else ""}
    texts = texts_of(tasks_of("evaluation.dataset", dataset, env) | endpoint)
    flags = (*flags_of(variants=variants, seeds=seeds, **axes), *texts)
    request = Request("sweep", preset, flags, overrides, force)
    return await _run(request, _planned(partial(Plan, full_product=True)))


@flow(flow_run_name=_run_name, persist_result=False)
async def collect(preset: str = "collect", overrides: tuple[str, ...] = (), force: bool = False) -> Any:
    """Let a stronger model solve real tasks, and keep what it solved to fine-tune on.

    Args:
        preset: Name of a preset or path of a YAML file; it may hold collect.
        overrides: Settings to change, each as KEY=VALUE, for example collect.repeats=4.
        force: Write the file again from the trials that are there.
    """
    return await _run(Request("collect", preset, ("sft=null",), overrides, force), collect_trajectories)


def flags_of(**values: tuple[Any, ...]) -> tuple[str, ...]:
    """Parameters that were filled in, as overrides."""
    return tuple(f"{name}={','.join(map(str, value))}" for name, value in values.items() if value)


def texts_of(values: dict[str, str]) -> list[str]:
    """Settings that are texts, as overrides; empty ones are left out."""
    return overrides_of(**{name: text(value) for name, value in values.items() if value})


def tasks_of(setting: str, dataset: str, env: str) -> dict[str, str]:
    """A set of real tasks and its sandbox."""
    return {f"{setting}.path": dataset, f"{setting}.sandbox.kind": env}


Work = Callable[[Experiment, RunOptions], Awaitable[dict[str, Any]]]
"""What a flow does once everything is open"""


def _planned(make_plan: Callable[[Experiment], Plan]) -> Work:
    async def work(experiment: Experiment, options: RunOptions) -> dict[str, Any]:
        return await run_plan(make_plan(experiment), options)

    return work


async def _run(request: Request, work: Work) -> Any:
    """The work's result. What is no bug ends the run as Failed with one message, as the command line would print it."""
    try:
        if command := COMMAND.get():
            result = await work(*command)
        else:
            with deployed_run(request) as (experiment, options):
                result = await work(experiment, options)
    except CommandError as error:
        return failed(error)
    if result["status"] == "partial":
        return Completed(name="PartiallyCompleted", message="; ".join(result["errors"]), data=result)
    return result


def run_as_command(prefect_flow: Flow[..., Any], experiment: Experiment, options: RunOptions) -> dict[str, Any]:
    """Run a flow with what the command line has opened. Its parameters say what was asked for, as the form would."""
    parameters = _parameters(prefect_flow, experiment)
    token = COMMAND.set((experiment, options))
    try:
        result: dict[str, Any] = asyncio.run(
            prefect_flow(
                preset=options.preset,
                overrides=(*beside_the_form(parameters, options.flags), *options.overrides),
                force=options.force,
                **parameters,
            )
        )
    except TerminationSignal as signal:  # Prefect's own, where SIGTERM met the waiting event loop instead of the flow
        raise Terminated from signal
    except Exception as error:
        if isinstance(error, CommandError) or options.run is None or not options.run.is_finished():
            raise
        options.progress.note(
            f"Prefect did not hear of the end ({type(error).__name__}: {error}); everything else is complete"
        )
        return options.run.read_results()
    finally:
        COMMAND.reset(token)
    return result


_SETTINGS_OF = {
    "windows": ("evaluation.windows",),
    "caps": ("evaluation.caps",),
    "keep_recent": ("evaluation.keep_recents",),
    "model": ("sft.model", "endpoint.model"),
    "base_url": ("endpoint.base_url",),
    "prompt_pack": ("agent.compaction.prompt_pack",),
    "dataset": ("dataset.path", "evaluation.dataset.path"),
    "env": ("dataset.sandbox.kind", "evaluation.dataset.sandbox.kind"),
}
"""Settings behind a field of a form; every other field is called as its setting is"""


def beside_the_form(parameters: Mapping[str, Any], flags: Sequence[str]) -> list[str]:
    """Options of a command that are in no field of its form: started again from there, they hold as overrides."""
    shown = {setting for field in parameters for setting in _SETTINGS_OF.get(field, (field,))}
    return [flag for flag in flags if flag.partition("=")[0] not in shown]


def _parameters(prefect_flow: Flow[..., Any], e: Experiment) -> dict[str, Any]:
    """What the form of that flow would hold."""
    if prefect_flow is collect:
        return {}
    policies = {"variants": e.variants, "seeds": e.seeds}
    if prefect_flow is not sweep:
        return policies | _started(e)
    axes = e.evaluation
    swept = {"windows": axes.windows, "caps": axes.caps, "keep_recent": axes.keep_recents}
    endpoint = {} if e.endpoint is None else {"base_url": e.endpoint.base_url, "model": e.endpoint.model}
    return policies | swept | _tasks(axes.dataset) | endpoint


def _started(e: Experiment) -> dict[str, Any]:
    """What a reproduction starts from. Its form has one field for the tasks of training and of evaluation."""
    model = {} if e.sft is None or e.sft.model is None else {"model": portable_folder(e.sft.model)}
    own, evaluated = _tasks(e.dataset), _tasks(e.evaluation.dataset)
    start = {"engine": e.engine, "prompt_pack": portable_file(e.agent.compaction.prompt_pack)}
    return model | start | (own if own == evaluated else {})


def _tasks(dataset: DatasetSettings | None) -> dict[str, Any]:
    if dataset is None:
        return {}
    path = dataset.path if dataset.path in SHIPPED else portable_folder(dataset.path)
    return {"dataset": path, "env": dataset.sandbox.kind}
