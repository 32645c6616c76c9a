"""Pictures of a run in Prefect and MLflow, taken by a headless Chromium from the running services, to be looked at.

    python -m tests.pictures --home FOLDER [--out tests/logs/pictures]

FOLDER is a home that holds a finished `reproduce` run; the latest is shown. `compactionrl up` brings the services up
and takes them down again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flows.runs import RunFolder, find_run
from flows.services import Home
from flows.standing import StandingRecord

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
UP_SECONDS = 120.0
PAGE_SECONDS = 25
COMPARED = 6
"""Cells in one comparison"""


def screenshot(browser: str, url: str, path: Path, size: str = "1600,1100") -> None:
    """One page as PNG. Raises CalledProcessError where the browser fails."""
    command = [
        *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *(f"--window-size={size}", f"--virtual-time-budget={PAGE_SECONDS * 1000}", f"--screenshot={path}", url),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=180)
    print(f"{path}  {url}", flush=True)


def pages(home: Home, run: RunFolder, prefect: str, mlflow: str) -> dict[str, str]:
    """Picture's name → address."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home.mlflow_database}")
    parent = client.get_run(run.record["mlflow_run_id"])
    experiment = parent.info.experiment_id
    cells = json.loads(run.results.read_text())["results"]
    ids = [cell["mlflow_run_id"] for cell in cells[:COMPARED]]
    compared = f"runs={quote(json.dumps(ids))}&experiments={quote(json.dumps([experiment]))}"
    trace = compacted_trace(client, experiment)
    return {
        "prefect-run": f"{prefect}/runs/flow-run/{run.record['prefect_flow_run_id']}",
        "mlflow-runs": f"{mlflow}/#/experiments/{experiment}/runs",
        "mlflow-compare": f"{mlflow}/#/compare-runs?{compared}",
        "mlflow-parent": f"{mlflow}/#/experiments/{experiment}/runs/{parent.info.run_id}",
        "mlflow-trace": f"{mlflow}/#/experiments/{experiment}/traces?selectedEvaluationId={trace}",
        "mlflow-report": f"{mlflow}/#/experiments/{experiment}/runs/{parent.info.run_id}/artifacts/report.html",
        "report": run.report.as_uri(),
    }


def compacted_trace(client: Any, experiment: str) -> str:
    """A trace with a MEMORY span whose tokens shrink."""
    for trace in client.search_traces(locations=[experiment], max_results=50):
        for span in trace.data.spans:
            attributes = span.attributes
            before, after = attributes.get("tokens_before"), attributes.get("tokens_after")
            if span.span_type == "MEMORY" and before and after and after < before:
                print(f"trace {trace.info.trace_id}: MEMORY span from {before} to {after} tokens")
                return str(trace.info.trace_id)
    raise SystemExit("no trace holds a compaction: evaluate a cell with a cap above 0")


def main() -> int:
    parser = argparse.ArgumentParser(description="Pictures of a run in Prefect and MLflow.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "logs" / "pictures")
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser: install one of {', '.join(BROWSERS)}")
    home = Home.locate(arguments.home)
    arguments.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "flows.cli", "up"]
    services = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "COMPACTIONRL_HOME": str(home.root)})
    try:
        deadline = time.monotonic() + UP_SECONDS
        while (standing := StandingRecord(home.root).read()) is None:
            if services.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the services did not come up")
            time.sleep(0.5)
        run = find_run(home, "latest")
        for name, url in pages(home, run, standing.prefect, standing.mlflow).items():
            screenshot(browser, url, arguments.out / f"{name}.png")
    finally:
        services.send_signal(signal.SIGINT)
        services.wait(timeout=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
