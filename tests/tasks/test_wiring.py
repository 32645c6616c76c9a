"""Task streams that never overlap, and stages named by sources that exist."""

from __future__ import annotations

import ast

import pytest

from compaction.settings import AgentSettings, CompactionSettings
from evaluation.tasksets.trail import TrailSettings
from tasks import evaluate, real_tasks, warmstart, wiring
from tasks.caching import SOURCES, code_digest
from tasks.wiring import longest_sequence, training_tasks

WORLD = TrailSettings(min_length=3, max_length=5, pointer_names=8)


def test_the_stream_is_read_by_stretches_and_is_the_same_again() -> None:
    stream = training_tasks(WORLD, 3, 12)
    assert [t.id for first in (0, 4, 8) for t in stream(first, 4)] == [t.id for t in stream(0, 12)]
    assert training_tasks(WORLD, 3, 12)(4, 4) == stream(4, 4)
    assert training_tasks(WORLD, 3, 5)(0, 5) == stream(0, 5), "a longer run starts like a shorter one"


def test_streams_of_other_seeds_hold_other_tasks() -> None:
    streams = [training_tasks(WORLD, seed, 20)(0, 20) for seed in range(4)]
    assert len({task.id for stream in streams for task in stream}) == 80


def test_an_engine_holds_a_whole_window() -> None:
    settings = AgentSettings(compaction=CompactionSettings(window=70_000))
    assert longest_sequence(settings) == 70_000


STAGES: dict[str, tuple[tuple[str, ...], list[str], set[str]]] = {
    "sft": (warmstart.SOURCES, ["tasks/warmstart.py"],
            {"evaluation/trial.py", "rl/advantages.py", "rl/engines/direct_forward.py", "rl/engines/kv_cache.py",
             "rl/engines/weight_sync.py", "rl/engines/weights.py"}),
    "ppo": (
        (*wiring.ROLLOUT_SOURCES, *wiring.LEARNING_SOURCES, "tasks/ppo.py", "tasks/wiring.py"),
        ["tasks/ppo.py", "rl/ppo.py", "rl/async_ppo.py", "rl/workers.py"],
        {"tasks/real_tasks.py", "evaluation/settings.py"},
    ),
    "any on real tasks": (
        (*wiring.ROLLOUT_SOURCES, *real_tasks.SANDBOX_SOURCES), ["tasks/real_tasks.py"], {"evaluation/trial.py"},
    ),
    "evaluate": (
        evaluate.SOURCES,
        ["tasks/evaluate.py"],
        {f"rl/{name}.py" for name in
         ("advantages", "batching", "checkpoint", "logprobs", "lora", "losses", "master_weights",
          "optimization", "packing", "pretrained", "rows", "settings",
          "trainer", "weight_transfer")},
    ),
}  # fmt: skip
"""Stage: its sources, the files it starts in, and what is imported without deciding its result"""
AROUND = ("rl/errors.py", "rl/events.py", "rl/meters.py", "rl/remote.py", *(f"tasks/{name}.py" for name in (
    "caching", "cluster", "errors", "explain", "processes", "progress", "provenance", "stages", "traces", "tracking",
)))  # fmt: skip
"""How a stage is started, recorded and reported"""


def imported_files(starts: list[str]) -> set[str]:
    """Files of this repository that `starts` import, directly or not, functions' own imports included.

    What real tasks need counts only where a stage has real tasks: it is not followed unless it is one of `starts`.
    """
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        name = waiting.pop()
        if name in found or name in AROUND:
            continue
        found.add(name)
        if name == "tasks/real_tasks.py" and name not in starts:
            continue
        for node in ast.walk(ast.parse((SOURCES / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                paths = [f"{module.replace('.', '/')}.py" for module in modules]
                waiting += [path for path in paths if (SOURCES / path).is_file()]
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_change_in_what_a_stage_runs_makes_it_stale(stage: str) -> None:
    sources, starts, decides_nothing = STAGES[stage]
    assert code_digest(sources)
    used = imported_files(starts) - decides_nothing
    assert {file for file in used if not any(file == s or file.startswith(f"{s}/") for s in sources)} == set()
