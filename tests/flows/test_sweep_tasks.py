"""`sweep` on real tasks in real sandboxes, with an agent behind a real endpoint whose memory is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compaction.rendering import load_renderer
from compaction.settings import CompactionSettings
from evaluation.grid import product_cells
from evaluation.results import CellResult
from tests.compaction.engines.stub_endpoint import StubEndpoint
from tests.flows import memory_agent as memory

pytestmark = pytest.mark.xdist_group("sweep-tasks")

TIMEOUT = 600
WINDOWS, CAPS, KEEPS = (300, 480), (0, 1, 3), (0, 2)
SETTINGS = CompactionSettings(
    window=300, threshold=100, max_response=40, min_response=8, summary_cap=12, cap=3, keep_recent=0, summary_retries=0
)
KEY = "canary-key-5d1c"
PASSWORD = "canary-password-77aa"


class Bench:
    """The tasks, the pack, the tokenizer and the endpoint of one module, and commands on a home."""

    def __init__(self, root: Path, endpoint: StubEndpoint) -> None:
        self.home, self.endpoint = root / "home", endpoint
        self.tasks = memory.write_tasks(root / "tasks")
        self.pack = memory.write_pack(root / "memory.yaml")
        self.tokenizer = memory.write_tokenizer(root / "tokenizer")

    def arguments(self, *more: str) -> list[str]:
        s = SETTINGS
        compaction = {"min_response": s.min_response, "summary_cap": s.summary_cap, "summary_retries": 0}
        return [
            "sweep", "--dataset", str(self.tasks), "--env", "local", "--engine", "openai",
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

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "PREFECT_HOME")}
        return subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments],
            env={**kept, "COMPACTIONRL_HOME": str(self.home), "CANARY_KEY": KEY},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with StubEndpoint(memory.act).serving() as endpoint:
        yield Bench(tmp_path_factory.mktemp("bench"), endpoint)


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
