"""The commands `tasks list`, `tasks check` and `tasks export`: sets of real tasks before anything is spent on them."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from flows.cli_options import Json

app = typer.Typer(
    name="tasks",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="List, check and export sets of real tasks (task folders in Harbor's format).",
)

Where = Annotated[
    str,
    typer.Argument(
        metavar="DATASET", help="[cyan]bench12[/], a folder of task folders, a list file, or registry.json[:NAME]."
    ),
]
Env = Annotated[Literal["docker", "local"], typer.Option(help="Sandbox: docker, or local (bubblewrap).")]


@app.command("list")
def list_tasks(dataset: Where = "bench12") -> None:
    """List a set's tasks with their limits, and what to know about each.

    [bold]Example[/]

    compactionrl tasks list bench12
    """
    from flows.session import guarded

    with guarded():
        from rich.console import Console

        from flows.task_sets import show_tasks

        show_tasks(Console(), dataset)


@app.command()
def check(
    dataset: Where = "bench12",
    env: Env = "docker",
    limit: Annotated[int | None, typer.Option(min=1, help="Most tasks.", show_default=False)] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Sandboxes at once.")] = 4,
    json_output: Json = False,
) -> None:
    """Run each task's own solution, and doing nothing: the one must pass, the other must fail.

    Ends with 1 where a task does not keep to that. Do it once before you spend money on a set.

    [bold]Examples[/]

    compactionrl tasks check bench12 --env local

    compactionrl tasks check my-tasks/ --env docker
    """
    from flows.session import guarded

    with guarded(json_output=json_output):
        from rich.console import Console

        from flows.task_sets import check_set

        sound = check_set(Console(), dataset, env=env, limit=limit, concurrency=concurrency, json_output=json_output)
        raise typer.Exit(0 if sound else 1)


@app.command()
def export(
    dataset: Annotated[str, typer.Argument(metavar="SET", help="[cyan]bench12[/], or [cyan]trail[/].")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new folder.")],
    split: Annotated[
        Literal["train", "validation", "test"], typer.Option(help="trail: the split to draw tasks from.")
    ] = "train",
    n: Annotated[int, typer.Option("-n", min=1, help="trail: how many tasks.")] = 64,
    preset: Annotated[str, typer.Option(help="trail: the preset whose world it is.", metavar="NAME")] = "tiny",
) -> None:
    """Write a shipped set as task folders: to read, to change, to run in Harbor, or to train on.

    [bold]Examples[/]

    compactionrl tasks export bench12 my-bench

    compactionrl tasks export trail trail-tasks --split train -n 200

    compactionrl reproduce --set dataset.path=trail-tasks --set dataset.sandbox.kind=docker
    """
    from flows.session import guarded

    with guarded():
        from flows.task_sets import export_set

        typer.echo(export_set(dataset, folder, split=split, n=n, preset=preset))
