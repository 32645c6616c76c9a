"""Pictures of a run in Prefect and MLflow, taken by a headless Chromium from the running services, to be looked at.

    python -m tests.pictures --home FOLDER [--run latest] [--out tests/logs/pictures]

FOLDER is a home that holds a finished `reproduce` run. `compactionrl up` brings the services up
and takes them down again.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from websockets.sync.client import connect

from flows.runs import RunFolder, find_run
from flows.services import Home
from flows.standing import StandingRecord

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
UP_SECONDS = 120.0
PAGE_SECONDS = 12
SIZE = "1800,1200"
CLOSE_WHAT_COVERS = """
for (const button of document.querySelectorAll('button')) {
  const name = (button.getAttribute('aria-label') || button.innerText || '').trim().toLowerCase();
  if (['close assistant', 'got it', 'close panel'].includes(name)) button.click();
}
"""
CLICKED = {"mlflow-trace": ("compaction",)}
"""Texts that are clicked, one after the other, before the picture is taken"""
CLICK = """
[...document.querySelectorAll('*')].filter(e => e.children.length === 0 && e.innerText === TEXT)[0]?.click()
"""
EXPECTED = {
    "prefect-run": ("Completed", "Task runs", "reproduce"),
    "mlflow-runs": ("matching runs",),
    "mlflow-compare": ("window", "cap", "keep_recent"),
    "mlflow-trace": ("compaction", "tokens_before", "tokens_after"),
    "report": ("This run beside the paper",),
}
"""Words that each page must hold"""


class Browser:
    """A headless Chromium, driven over its debugging protocol: pages get real time, and what covers them is closed."""

    def __init__(self, program: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
             "--remote-debugging-port=0", f"--window-size={SIZE}", f"--user-data-dir={folder}", "about:blank"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stderr is not None
        line = next(line for line in self._process.stderr if "DevTools listening" in line)
        port = line.split("127.0.0.1:")[1].split("/")[0]
        targets = httpx.get(f"http://127.0.0.1:{port}/json").json()
        page = next(target for target in targets if target["type"] == "page")
        self._socket = connect(page["webSocketDebuggerUrl"], max_size=None)
        self._calls = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=120))
            if answer.get("id") == self._calls:
                result: dict[str, Any] = answer["result"]
                return result

    def picture(self, url: str, path: Path, clicked: Sequence[str] = ()) -> str:
        """Takes the page as PNG once it has settled; returns its text."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        time.sleep(PAGE_SECONDS)
        self.call("Runtime.evaluate", expression=CLOSE_WHAT_COVERS)
        for text in clicked:
            self.call("Runtime.evaluate", expression=CLICK.replace("TEXT", json.dumps(text)))
            time.sleep(2)
        time.sleep(2)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
        text = self.call("Runtime.evaluate", expression="document.body.innerText")["result"].get("value", "")
        print(f"{path}  {url}", flush=True)
        return str(text)

    def close(self) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(timeout=30)


def pages(home: Home, run: RunFolder, prefect: str, mlflow: str) -> dict[str, str]:
    """Picture's name → address."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home.mlflow_database}")
    parent = client.get_run(run.record["mlflow_run_id"])
    experiment = parent.info.experiment_id
    cells = json.loads(run.results.read_text())["results"]
    swept = [cell for cell in cells if cell["variant"] == cells[-1]["variant"] and cell["temperature"] > 0]
    ids = [cell["mlflow_run_id"] for cell in swept]
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
    parser.add_argument("--run", default="latest", help="which of its runs")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "logs" / "pictures")
    arguments = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    missing: list[str] = []
    if program is None:
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
        run = find_run(home, arguments.run)
        with tempfile.TemporaryDirectory() as folder:
            browser = Browser(program, Path(folder))
            for name, url in pages(home, run, standing.prefect, standing.mlflow).items():
                text = browser.picture(url, arguments.out / f"{name}.png", CLICKED.get(name, ()))
                for wanted in EXPECTED.get(name, ()):
                    if wanted not in text:
                        missing.append(f"{name}: {wanted!r} is not on the page")
            browser.close()
    finally:
        services.send_signal(signal.SIGINT)
        services.wait(timeout=120)
    print("\n".join(missing) or "every page shows what it should")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
