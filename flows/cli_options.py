"""Options that several commands share, and how they become overrides of a preset."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

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
