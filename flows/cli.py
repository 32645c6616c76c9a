"""The `compactionrl` command. Heavy imports happen inside commands: `--help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compaction.engines.credentials import take_userinfo
from flows.cli_collect import collect
from flows.cli_options import (
    BaseModel,
    DatasetPath,
    DryRun,
    Force,
    Json,
    Overrides,
    Preset,
    PromptPackFile,
    SampledBy,
    SandboxChoice,
    Seeds,
    Variants,
    text,
)
from flows.cli_sweep import sweep
from flows.cli_tasks import app as tasks_app

if TYPE_CHECKING:
    from flows.experiment import Experiment
    from flows.options import RunOptions

Flow = Callable[["Experiment", "RunOptions"], dict[str, Any]]

app = typer.Typer(
    name="compactionrl",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Train and evaluate agents whose context compaction is part of the policy.

    [bold]Start here[/]

    [cyan]compactionrl reproduce[/]   the whole method on a small world, in minutes

    [cyan]compactionrl reproduce --dry-run[/]   what would run, what is already there, and why

    [cyan]compactionrl show latest --rollout 0[/]   read what an agent did and what it kept

    Everything is kept below COMPACTIONRL_HOME (default ./compactionrl-data).
    Running the same command again continues: finished stages are found by their content.

    Exit codes: 0 ok · 1 failed · 2 bad input · 3 partial · 130 Ctrl-C · 143 terminated""",
)

Cron = Annotated[
    str | None,
    typer.Option(help="When to run reproduce, in UTC: [cyan]0 3 * * *[/].", metavar="CRON", show_default=False),
]
Limit = Annotated[int, typer.Option(min=1, help="Most runs at once; others wait.")]
RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="[cyan]latest[/], a run's folder, its MLflow run id, or the beginning of one."),
]


@app.command()
def reproduce(
    preset: Preset = "tiny",
    variants: Variants = None,
    seeds: Seeds = None,
    model: BaseModel = None,
    engine: SampledBy = None,
    prompt_pack: PromptPackFile = None,
    dataset: DatasetPath = None,
    env: SandboxChoice = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    json_output: Json = False,
    force: Force = False,
) -> None:
    """Train the variants, evaluate them over one-factor sweeps and write the report.

    With [cyan]--dataset[/] on real tasks instead of the trail world: those of training and of evaluation, unless
    [cyan]--set evaluation.dataset.path=…[/] names others.

    [bold]Examples[/]

    compactionrl reproduce

    compactionrl reproduce --variants all --seeds 0,1,2 --json > results.json

    compactionrl reproduce --set ppo.steps=20 --set agent.compaction.window=160 --dry-run

    compactionrl reproduce --model Qwen/Qwen3-0.6B --dataset tasks/ --env docker --prompt-pack nine-items
    """
    from flows.session import run_flow

    def flow(experiment: Experiment, options: RunOptions) -> dict[str, Any]:
        from flows.reproduce import run_reproduce

        return run_reproduce(experiment, options)

    flags = {
        "variants": variants,
        "seeds": seeds,
        "sft.model": text(model),
        "engine": engine,
        "agent.compaction.prompt_pack": text(prompt_pack),
    }
    for tasks in ("dataset", "evaluation.dataset"):
        flags |= {f"{tasks}.path": text(dataset), f"{tasks}.sandbox.kind": env}
    raise typer.Exit(run_flow(flow, preset, overrides, flags, force=force, dry_run=dry_run, json_output=json_output))


app.command()(collect)
app.command()(sweep)
app.add_typer(tasks_app)


@app.command()
def up(
    ray_dashboard: Annotated[
        bool, typer.Option("--ray-dashboard", help="Also Ray with its dashboard; commands of this home run on it.")
    ] = False,
    serve_too: Annotated[
        bool, typer.Option("--serve", help="Also serve runs, as [cyan]compactionrl serve[/].")
    ] = False,
    preset: Preset = "tiny",
    cron: Cron = None,
    limit: Limit = 1,
) -> None:
    """Start Prefect, MLflow and on request Ray's dashboard, print their links, and stop them on Ctrl-C.

    Other commands on the same home find them: what they record can be watched while it runs.

    [bold]Examples[/]

    compactionrl up

    compactionrl up --serve --cron "0 3 * * *"
    """
    from flows.session import guarded

    with guarded():
        from rich.console import Console

        from flows.services import Home
        from flows.up import ServeOptions, run_up
        from tasks.errors import UserError

        if cron and not serve_too:
            raise UserError("--cron schedules runs that `up` alone does not serve: add --serve")
        serving = ServeOptions(preset, cron, limit) if serve_too else None
        run_up(Home.locate(), Console(), ray_dashboard=ray_dashboard, serve=serving)


@app.command()
def serve(preset: Preset = "tiny", cron: Cron = None, limit: Limit = 1) -> None:
    """Register reproduce and sweep as Prefect deployments, and run what is asked for there, until Ctrl-C.

    A run started on Prefect's page or by the schedule is the same as one from this command line. It needs a Prefect
    server: [cyan]compactionrl up[/] in another terminal, or one of your own.

    [bold]Examples[/]

    compactionrl serve

    compactionrl serve --preset tiny --cron "0 3 * * *"
    """
    from flows.session import guarded

    with guarded():
        from rich.console import Console

        from flows.services import Home
        from flows.up import ServeOptions, run_serve

        run_serve(Home.locate(), Console(), ServeOptions(preset, cron, limit))


@app.command()
def report(run: RunName = "latest") -> None:
    """Write a run's HTML report again and print its path."""
    from flows.session import guarded

    with guarded():
        from flows.reproduce import rebuild_report
        from flows.runs import find_run
        from flows.services import Home

        home = Home.locate()
        typer.echo(rebuild_report(home, find_run(home, run)))


@app.command()
def show(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run as above, or the path of a Parquet file.")
    ] = "latest",
    rollout: Annotated[
        int | None, typer.Option("--rollout", "-r", help="Number of the rollout to read.", show_default=False)
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(help="List only stages whose title has this text.", metavar="TEXT", show_default=False),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Unfold every turn.")] = False,
) -> None:
    """List a run's rollouts, or read one: its turns, what was dropped, the summary, what was kept.

    [bold]Examples[/]

    compactionrl show latest

    compactionrl show latest --stage "evaluate compactionrl"

    compactionrl show latest --rollout 3 --full
    """
    from flows.session import guarded

    with guarded():
        from flows.services import Home
        from flows.show import show_run

        show_run(Home.locate(), run, rollout, stage=stage, full=full)


@app.command()
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="A B [C…]", help="Runs, named as above; the first is compared with.")
    ],
    markdown: Annotated[bool, typer.Option("--md", help="Print Markdown.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Set runs beside each other: changed settings, scores with intervals, paired tests, curves on one plot.

    [bold]Examples[/]

    compactionrl compare 20260729-1014 latest

    compactionrl compare 18e6551b 4241010d latest --md > comparison.md
    """
    from flows.session import guarded

    with guarded(json_output=json_output):
        from flows.compare import compare_runs
        from flows.services import Home

        compare_runs(Home.locate(), runs, markdown=markdown, json_output=json_output)


@app.command()
def clean(
    everything: Annotated[
        bool, typer.Option("--all", help="Also runs, MLflow and Prefect data: the whole home.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List only.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """List what takes space, then remove stages that no run uses, leftovers and a left-over server.

    [bold]Examples[/]

    compactionrl clean --dry-run

    compactionrl clean --all --yes
    """
    from flows.session import guarded

    with guarded():
        from flows.cleaning import clean_home
        from flows.services import Home

        clean_home(Home.locate(), everything=everything, dry_run=dry_run, yes=yes)


@app.command()
def doctor(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove leftovers without asking.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; asks nothing.")] = False,
) -> None:
    """Check versions, disk and services; end dead runs; list, and on confirmation remove, what they left behind.

    Nothing of a live command or of another home is touched. The exit code is 1 while a problem remains.

    [bold]Examples[/]

    compactionrl doctor

    compactionrl doctor --yes --json
    """
    from flows.session import guarded

    with guarded(json_output=json_output):
        from flows.doctor import examine_home
        from flows.services import Home

        raise typer.Exit(examine_home(Home.locate(), yes=yes, json_output=json_output))


def main() -> None:
    # A password in an address must reach no record of the command: from here on it is in this process's memory alone.
    sys.argv = [take_userinfo(word) for word in sys.argv]
    app()


if __name__ == "__main__":
    main()
