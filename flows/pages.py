"""How a run's pages lead to each other: the Prefect flow run, the MLflow run, the folder on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.output import answer_lines, result_rows
from flows.runs import RunFolder
from flows.services import Services
from tasks.artifacts import Publisher


def flow_run_page(services: Services, flow_run_id: str) -> str:
    """The flow run in Prefect's UI; of a local server it works while the server runs."""
    return f"{services.prefect_url.removesuffix('/api')}/runs/flow-run/{flow_run_id}"


def mlflow_note(services: Services, run: RunFolder, flow_run_id: str) -> str:
    """The Markdown that MLflow shows above the parent run."""
    lines = [
        f"- Prefect: [flow run {flow_run_id}]({flow_run_page(services, flow_run_id)})",
        f"- Folder: `{run.path}`",
        f"- Run again: `{run.record['command']}`",
    ]
    if services.mlflow_is_ours:
        lines.append("- `compactionrl up` starts the Prefect server where this link needs it")
    return "\n".join(lines)


def publish_mlflow_link(publisher: Publisher, services: Services, run: Mapping[str, Any]) -> None:
    if page := services.mlflow_run_page(run["mlflow_experiment_id"], run["mlflow_run_id"]):
        publisher.link("mlflow-run", page, "MLflow run", "Metrics, parameters, stages and cells of this run")


def publish_result(publisher: Publisher, services: Services, run: RunFolder, result: Mapping[str, Any]) -> None:
    """The result table with every link, and the report where MLflow serves it."""
    record = run.record
    report = f"/artifacts/{run.report.name}"
    if page := services.mlflow_run_page(record["mlflow_experiment_id"], record["mlflow_run_id"], report):
        publisher.link("report", page, "Report", "The run's report, in MLflow")
    publisher.markdown("results", result_markdown(services, run, result), "Results")


def result_markdown(services: Services, run: RunFolder, result: Mapping[str, Any]) -> str:
    columns, rows = result_rows(result)
    table = [columns, ["---"] * len(columns), *rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    errors = [f"- {line}" for line in (*answer_lines(result), *result["errors"])]
    places = {"Report": str(run.report), "Folder": str(run.path), "Run again": str(run.record["command"])}
    places |= {f"Open {name}": text for name, text in services.how_to_open(run.record).items()}
    listed = [f"- {name}: {text if text.startswith('http') else f'`{text}`'}" for name, text in places.items()]
    return "\n".join([*lines, "", *errors, *listed])
