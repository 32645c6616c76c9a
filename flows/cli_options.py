"""Options that several commands share, and how they become overrides of a preset."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

SWEPT, TASKS = "What is swept", "Tasks"


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


def overrides_of(**flags: str | int | float | bool | None) -> list[str]:
    """Options that were given, as overrides. They come before `--set`, which wins."""
    return [f"{name}={value}" for name, value in flags.items() if value is not None]


def text(value: str | None) -> str | None:
    """A text that must not be read as anything else, such as a model's name."""
    return None if value is None else json.dumps(value, ensure_ascii=False)
