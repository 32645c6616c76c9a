"""`sweep` on real tasks in real sandboxes, with an agent behind a real endpoint whose memory is known."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compaction.rendering import load_renderer
from compaction.settings import CompactionSettings
from evaluation.grid import product_cells
from evaluation.results import CellResult
from tests.compaction.engines.stub_endpoint import StubEndpoint
from tests.flows import memory_agent as memory
from tests.processes import COMMAND, PATIENCE

pytestmark = pytest.mark.xdist_group("sweep-tasks")

WINDOWS, CAPS, KEEPS = (240, 300), (0, 1, 3), (0, 2)
SETTINGS = CompactionSettings(
    window=240, threshold=100, max_response=40, min_response=8, summary_cap=12, cap=3, keep_recent=0, summary_retries=0
)
KEY = "canary-key-5d1c"
PASSWORD = "canary-password-77aa"


class Bench:
    """The tasks, the pack, the tokenizer and the endpoint of one module, and commands on a home."""

    def __init__(self, root: Path, endpoint: StubEndpoint, env: str = "local") -> None:
        self.home, self.endpoint, self.env = root / "home", endpoint, env
        self.tasks = memory.write_tasks(root / "tasks")
        self.pack = memory.write_pack(root / "memory.yaml")
        self.tokenizer = memory.write_tokenizer(root / "tokenizer")

    def arguments(self, *more: str) -> list[str]:
        s = SETTINGS
        compaction = {"min_response": s.min_response, "summary_cap": s.summary_cap, "summary_retries": 0}
        return [
            "sweep", "--dataset", str(self.tasks), "--env", self.env, "--engine", "openai",
            "--base-url", self.endpoint.url.replace("://", f"://someone:{PASSWORD}@"),
            "--model", "memory-1", "--api-key-env", "CANARY_KEY",
            "--tokenizer", str(self.tokenizer), "--prompt-pack", str(self.pack), "--threshold", str(s.threshold),
            "--max-response", str(s.max_response), "--windows", ",".join(map(str, WINDOWS)),
            "--caps", ",".join(map(str, CAPS)), "--keep-recent", ",".join(map(str, KEEPS)), "--repeats", "2",
            *(word for name, value in compaction.items() for word in ("--set", f"agent.compaction.{name}={value}")),
            *more,
        ]  # fmt: skip

    def run(self, *more: str, code: int = 0) -> dict[str, Any]:
        """The JSON object of a sweep that must end with `code`."""
        done = self.command(*self.arguments("--json", *more))
        assert done.returncode == code, done.stderr[-3000:]
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    @contextmanager
    def serving(self) -> Iterator[None]:
        """With `up` on its home: the commands share its Prefect server."""
        up = self.start("up")
        assert up.stdout is not None
        assert any("Ctrl-C" in line for line in up.stdout), "up ended"
        yield
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=PATIENCE)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "PREFECT_HOME")}
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            env={**kept, "COMPACTIONRL_HOME": str(self.home), "CANARY_KEY": KEY},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def started(self, job: str = "*") -> Counter[tuple[str, str, int]]:
        """How often each trial of each cell was started, by the jobs' own events."""
        found: Counter[tuple[str, str, int]] = Counter()
        for path in self.home.glob(f"jobs/{job}/*/events.jsonl"):
            events = [json.loads(line) for line in path.read_text().splitlines()]
            found.update((path.parent.name, e["task"], e["repeat"]) for e in events if e["event"] == "started")
        return found


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """With `up` on its home: the commands share its Prefect server."""
    with StubEndpoint(memory.act).serving() as endpoint:
        bench = Bench(tmp_path_factory.mktemp("bench"), endpoint)
        with bench.serving():
            yield bench


@pytest.fixture(scope="module")
def swept(bench: Bench) -> dict[str, Any]:
    return bench.run()


def expected(bench: Bench, window: int, cap: int, keep: int | None) -> float:
    settings = SETTINGS.model_copy(update={"window": window, "cap": cap, "keep_recent": keep or 0})
    sizes = memory.Sizes.of(load_renderer(bench.tokenizer), bench.pack)
    return sum(memory.solvable(sizes, settings, pages) for pages in memory.PAGES) / len(memory.PAGES)


def test_every_cell_scores_what_the_agents_memory_allows(bench: Bench, swept: dict[str, Any]) -> None:
    cells = [CellResult.model_validate(cell) for cell in swept["results"]]
    assert [c.cell for c in cells] == product_cells(WINDOWS, CAPS, KEEPS, variant="memory-1", seed=0)
    assert len(cells) == 10
    rates = {(c.window, c.cap, c.keep_recent): c.pass_at_1 for c in cells}
    assert rates == {key: pytest.approx(expected(bench, *key)) for key in rates}
    assert len(set(rates.values())) >= 5  # the settings matter here
    assert all((c.scored, c.n_trials, c.coverage) == (24, 24, 1.0) for c in cells)
    assert all(c.count_sources == {"tokenizer": 24} for c in cells)
    assert {c.pass_at_1_std for c in cells} == {0.0}
    assert swept["status"] == "ok"


def test_no_key_and_no_password_is_anywhere(bench: Bench, swept: dict[str, Any]) -> None:
    sent = bench.endpoint.calls[0].headers["authorization"]
    assert sent.startswith("Basic ")  # it did get there
    files = [path for path in bench.home.rglob("*") if path.is_file()]
    assert any(path.suffix == ".db" for path in files)
    found = [path for path in files if any(word.encode() in path.read_bytes() for word in (KEY, PASSWORD))]
    assert found == []


def test_a_sweep_leaves_tables_pictures_runs_and_traces(bench: Bench, swept: dict[str, Any]) -> None:
    from mlflow import MlflowClient

    (run,) = [path.parent for path in bench.home.glob("runs/*/sweep.csv")]
    rows = list(csv.DictReader((run / "sweep.csv").open()))
    assert len(rows) == 10
    assert {row["verdict"] for row in rows} >= {"best", "inside the noise"}
    assert "| memory-1 |" in (run / "sweep.md").read_text()
    assert (run / "report.html").read_text().count("<svg") >= 1
    client = MlflowClient(f"sqlite:///{bench.home}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("compactionrl/endpoint")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], max_results=100)
    cells = [r for r in runs if r.data.tags["kind"] == "cell"]
    assert len(cells) == 10
    assert {r.data.params["dataset"] for r in cells} == {"tasks"}
    assert all("eval/repeated_commands" in r.data.metrics for r in cells)
    traces = client.search_traces(locations=[experiment.experiment_id], max_results=100)
    kinds = {span.span_type for trace in traces for span in trace.data.spans}
    assert {"AGENT", "CHAT_MODEL", "TOOL", "MEMORY"} <= kinds


def test_every_trial_is_there_in_harbors_layout(bench: Bench, swept: dict[str, Any]) -> None:
    job = Path(swept["jobs"])
    assert job.parent == bench.home / "jobs"
    assert len(list(job.glob("*/*/result.json"))) == 240
    trial = job / "memory-1-seed0-window240-cap3-keep2" / "memory-11__1"
    steps = json.loads((trial / "agent/trajectory.json").read_text())["steps"]
    assert sum("compaction" in step.get("extra", {}) for step in steps) == 3
    assert (trial / "verifier/reward.txt").read_text().strip() == "0"


def test_the_same_command_again_runs_and_asks_nothing(bench: Bench, swept: dict[str, Any]) -> None:
    calls, started = len(bench.endpoint.calls), bench.started()
    again = bench.run()
    assert again["results"] == swept["results"]
    assert all(stage["cached"] for stage in again["stages"])
    assert (len(bench.endpoint.calls), bench.started()) == (calls, started)


def test_a_dry_run_says_what_is_left_and_what_it_takes(bench: Bench, swept: dict[str, Any]) -> None:
    shown = bench.command(*bench.arguments("--dry-run", "--repeats", "3", "--price", "2,0.2,8"))
    assert shown.returncode == 0
    assert "10 evaluation cells" in shown.stdout
    assert "trials: 120 to run, 240 done" in shown.stdout
    assert re.search(r"tokens: about \d+\.\d [kM] prompt .*as 240 finished trials took", shown.stdout)
    assert re.search(r"cost: about \$\d+\.\d\d if the server caches", shown.stdout)


def small(*more: str) -> tuple[str, ...]:
    """One cell of four short tasks."""
    return ("--windows", "300", "--caps", "1", "--keep-recent", "0", "--limit", "4", "--repeats", "1", *more)


def test_a_budget_ends_a_sweep_cleanly_and_the_next_command_goes_on(bench: Bench) -> None:
    chosen = small("--job", "budget", "--concurrency", "1")
    first = bench.run(*chosen, "--max-tokens", "1k", code=3)
    assert first["status"] == "partial"
    assert "budget_exceeded" in first["errors"][0]
    assert 0 < first["results"][0]["scored"] < 4
    before = bench.started("budget")
    second = bench.run(*chosen)
    assert (second["status"], second["results"][0]["scored"]) == ("ok", 4)
    assert set(before.values()) == {1}
    assert sorted(bench.started("budget").values()) == [1, 1, 1, 2]  # again only the trial that the budget cut short


def test_a_named_job_refuses_other_settings_and_shows_them(bench: Bench) -> None:
    chosen = small("--job", "named", "--limit", "1")
    bench.run(*chosen)
    refused = bench.command(*bench.arguments(*chosen, "--temperature", "0.5"))
    assert refused.returncode == 2
    assert "agent.temperature 1.0 → 0.5" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--dataset", "bench21"), 2, "did you mean bench12"),
        (("--limit", "0"), 2, "greater than or equal to 1"),
        (("--price", "2,8"), 2, "give three numbers"),
        (("--max-cost", "5"), 2, "needs the prices of memory-1: --price"),
        (("--windows", "40"), 2, "window=40"),
        (("--prompt-pack", "nine"), 2, "prompt pack 'nine' is neither a file nor a shipped pack"),
        (("--request-extra", "{top_p"), 2, "not valid YAML"),
        (("--request-extra", '{"model": "x"}'), 2, "request_extra may not set model"),
    ],
)
def test_a_mistake_is_one_message_before_anything_is_spent(
    bench: Bench, arguments: tuple[str, ...], code: int, message: str
) -> None:
    calls = len(bench.endpoint.calls)
    refused = bench.command(*bench.arguments(*small("--job", "mistake"), *arguments))
    assert refused.returncode == code, refused.stderr
    assert message in refused.stderr.replace("\n", " ")
    assert "Traceback" not in refused.stderr
    assert len(bench.endpoint.calls) - calls <= 1  # the preflight


def test_an_endpoint_that_refuses_ends_with_what_to_do(bench: Bench) -> None:
    refused = bench.command(*bench.arguments(*small("--job", "refused"), "--base-url", "http://127.0.0.1:9/v1"))
    assert refused.returncode in (1, 2)
    assert "Is the server running at http://127.0.0.1:9/v1?" in refused.stderr.replace("\n", " ")
