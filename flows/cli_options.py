"""Options that several commands share, and how they become overrides of a preset."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

SWEPT, TASKS, MODEL, JOB = "What is swept", "Tasks", "Model behind an endpoint", "How trials are run"


def option(help_text: str, panel: str | None, *names: str, **more: Any) -> Any:
    """An option without a default, under the heading `panel` of a command's help."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False, **more)


Preset = Annotated[
    str,
    typer.Option("--preset", "-p", help="Name of a preset (tiny, smoke, …) or path of a YAML file.", metavar="NAME"),
]
Variants = Annotated[
    str | None,
    typer.Option(help="Policies to compare, separated by commas, or [cyan]all[/].", metavar="A,B", show_default=False),
]
Seeds = Annotated[str | None, typer.Option(help="Training seeds: [cyan]0,1,2[/].", metavar="N,N", show_default=False)]
BaseModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Pretrained model to start from: a transformers checkpoint's folder, or a name on the hub.",
        metavar="FOLDER|NAME",
        show_default=False,
    ),
]
SampledBy = Annotated[
    Literal["torch", "vllm"] | None,
    typer.Option(
        "--engine",
        help="What samples: torch (in-process, the default), or vllm (installed apart, see the README).",
        show_default=False,
    ),
]
DatasetPath = Annotated[
    str | None,
    option("[cyan]bench12[/], a folder of Harbor task folders, a list file, or registry.json[:NAME].", TASKS),
]
SandboxChoice = Annotated[Literal["docker", "local"] | None, option("Sandbox: docker, or local (bubblewrap).", TASKS)]
PromptPackFile = Annotated[
    str | None,
    option(
        "Summary instruction and resume text: a name, a YAML file, or a model's compaction.json.",
        None,
        metavar="NAME|FILE",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one setting: [cyan]--set ppo.steps=20[/]. Repeatable.", metavar="KEY=VALUE"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; logs go to the run's folder.")]
Force = Annotated[bool, typer.Option("--force", help="Run every stage again, finished or not.")]

Include = Annotated[str | None, option("Only tasks whose id fits a glob: [cyan]'git-*,log-*'[/].", TASKS)]
Limit = Annotated[int | None, option("Most tasks of the dataset.", TASKS, min=1)]
Repeats = Annotated[int | None, option("Attempts per task.", TASKS, min=1)]
BaseUrl = Annotated[
    str | None, option("Address before /chat/completions: [cyan]http://localhost:8000/v1[/].", MODEL, "--base-url")
]
ApiKeyEnv = Annotated[
    str | None, option("NAME of the variable that holds the key (default OPENAI_API_KEY).", MODEL, "--api-key-env")
]
Price = Annotated[
    str | None,
    option("US dollars per million tokens: [cyan]INPUT,CACHED,OUTPUT[/].", MODEL, metavar="USD,USD,USD"),
]
Concurrency = Annotated[int | None, option("Trials at once (default 4).", JOB, min=1)]
Job = Annotated[str | None, option("Name of the folder below jobs/ (default: made from the settings).", JOB)]
MaxCost = Annotated[
    float | None, option("US dollars this command may spend; then it stops, to be resumed.", JOB, "--max-cost")
]


def overrides_of(**flags: str | int | float | bool | None) -> list[str]:
    """Options that were given, as overrides. They come before `--set`, which wins."""
    return [f"{name}={value}" for name, value in flags.items() if value is not None]


def text(value: str | None) -> str | None:
    """A text that must not be read as anything else, such as a model's name."""
    return None if value is None else json.dumps(value, ensure_ascii=False)


def prices(price: str | None) -> dict[str, str | None]:
    """`INPUT,CACHED,OUTPUT` as an endpoint's settings."""
    if price is None:
        return {}
    parts = price.split(",")
    if len(parts) != 3:
        raise typer.BadParameter(f"{price!r}: give three numbers, INPUT,CACHED,OUTPUT, such as 2,0.2,8")
    return dict(zip(("price_input", "price_cached", "price_output"), parts, strict=True))
