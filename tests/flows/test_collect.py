"""`collect` on real tasks in real sandboxes: what a scripted model behind a real endpoint solves trains a student."""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compaction.rendering import ChatTemplateRenderer, load_renderer
from compaction.storage import read_rollouts
from rl.settings import TinySettings
from rl.tiny import make_tiny_checkpoint
from tests.compaction.engines.stub_endpoint import Answer, Call, StubEndpoint, usage
from tests.flows import memory_agent as memory
from tests.flows.test_sweep_tasks import KEY, PASSWORD, Bench
from tests.processes import PATIENCE

pytestmark = pytest.mark.xdist_group("collect")

PAGES = (1, 3, 5, 14)
REPEATS = 2
AGENT = {
    "prompt_pack": "", "window": 330, "threshold": 110, "max_response": 60, "min_response": 8, "summary_cap": 24,
    "cap": 1, "keep_recent": 1,
}  # fmt: skip
"""`prompt_pack` is filled in; of the tasks the longest needs more than the one compaction"""
STUDENT = TinySettings(layers=1, width=32, heads=1, feed_forward=48, vocabulary=500, max_positions=512)
STAGES = '[{"steps": 20, "tokens_per_step": 500}]'


def counting(call: Call, renderer: ChatTemplateRenderer) -> Answer:
    """The agent's reply, from a server that counts the prompt's tokens."""
    answer = memory.act(call)
    prompt = len(renderer.generation_prompt)
    for message in call.body["messages"]:
        text = message["content"]
        if message["role"] == "assistant":
            prompt += len(renderer.generation_prompt) + len(renderer.encode(text)) + len(renderer.close([], "length"))
        else:
            prompt += len(renderer.message(message["role"], text))
    return replace(answer, body=json.dumps(json.loads(answer.body) | {"usage": usage(prompt, 10)}).encode())


def make_student(root: Path) -> Path:
    """A random model whose tokenizer knows the words of the tasks."""
    texts = [
        *(memory.PACK["system"], memory.PACK["summary_instruction"], memory.instruction(3), memory.PAGE),
        *(memory.block(f"cat p{page:02d}") for page in range(1, 15)),
        *("[exit code 0]\npage ink", "[exit code 0, no output]", "resumed at 03 of 10 code c11 go on"),
        *(memory.block("echo c11 > out"), memory.block("exit")),
    ]
    return make_tiny_checkpoint(root / "student", texts * 30, STUDENT)


class Teacher(Bench):
    """Its student's tokenizer counts for the endpoint too, so that both have the same windows."""

    def __init__(self, root: Path, endpoint: StubEndpoint) -> None:
        super().__init__(root, endpoint)
        self.tasks = memory.write_tasks(root / "four", PAGES)
        self.student = root / "student"

    @property
    def agent(self) -> list[str]:
        settings = AGENT | {"prompt_pack": str(self.pack)}
        return [word for name, value in settings.items() for word in ("--set", f"agent.compaction.{name}={value}")]

    @property
    def asked(self) -> dict[str, Any]:
        """The same as settings, for `reproduce`."""
        return {
            "collect.dataset.path": self.tasks, "collect.dataset.sandbox.kind": "local", "collect.repeats": REPEATS,
            "collect.endpoint.base_url": self.endpoint.url, "collect.endpoint.model": "memory-1",
            "collect.endpoint.tokenizer": self.student,
        }  # fmt: skip

    def arguments(self, *more: str) -> list[str]:
        return [
            "collect", "--dataset", str(self.tasks), "--env", "local", "--repeats", str(REPEATS),
            "--base-url", self.endpoint.url.replace("://", f"://someone:{PASSWORD}@"), "--model", "memory-1",
            "--api-key-env", "CANARY_KEY", "--price", "2,0.2,8",
            "--set", f"collect.endpoint.tokenizer={self.student}", *self.agent, *more,
        ]  # fmt: skip

    def reproduce(self, data: str, *more: str, **settings: Any) -> list[str]:
        """Fine-tunes the student and evaluates it on one short task."""
        values = {
            "sft.data": f"[{{trajectories: {data}}}]", "sft.sft.stages": STAGES,
            "evaluation.dataset.path": self.tasks, "evaluation.dataset.sandbox.kind": "local",
            "evaluation.dataset.limit": 1, **settings,
        }  # fmt: skip
        words = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        chosen = ["--preset", "collect", "--model", str(self.student), "--variants", "base"]
        return ["reproduce", *chosen, *self.agent, *words, *more]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
    root = tmp_path_factory.mktemp("teacher")
    renderer = load_renderer(make_student(root))
    with StubEndpoint(lambda call: counting(call, renderer)).serving() as endpoint:
        teacher = Teacher(root, endpoint)
        with teacher.serving():
            yield teacher


@pytest.fixture(scope="module")
def collected(teacher: Teacher) -> dict[str, Any]:
    return teacher.run()


def test_what_was_solved_is_kept_and_what_was_not_is_only_counted(teacher: Teacher, collected: dict[str, Any]) -> None:
    summary = collected["summary"]
    rollouts = read_rollouts(collected["trajectories"])
    assert (summary["trials"], summary["tried"], summary["without_reward"]) == (8, 8, 0)
    assert (summary["solved"], summary["tasks_solved"], summary["kept"]) == (6, 3, 6)
    assert {rollout.outcome.reward for rollout in rollouts} == {1.0}
    assert {rollout.instruction for rollout in rollouts} == {memory.instruction(pages) for pages in PAGES[:3]}
    assert summary["kept_compacted"] == sum(bool(rollout.n_compactions) for rollout in rollouts) > 0
    assert summary["cost"] == pytest.approx((summary["prompt_tokens"] * 2 + summary["generated_tokens"] * 8) / 1e6)
    assert json.loads(Path(collected["trajectories"]).with_name("summary.json").read_text()) == summary
    assert len(list(Path(collected["jobs"]).glob("*/agent/trajectory.json"))) == 8


def test_the_same_command_again_pays_for_nothing(teacher: Teacher, collected: dict[str, Any]) -> None:
    calls = len(teacher.endpoint.calls)
    again = teacher.command(*teacher.arguments())
    assert again.returncode == 0, again.stderr
    assert len(teacher.endpoint.calls) == calls
    for shown in ("8 of 8 trials, 0 without a reward", "6 trajectories", "compactionrl reproduce --preset collect"):
        assert shown in again.stdout
    planned = teacher.command(*teacher.arguments("--dry-run"))
    assert "cached" in planned.stdout
    assert "trials: 0 to run, 8 done" in planned.stdout


def test_no_key_and_no_password_is_in_any_file(teacher: Teacher, collected: dict[str, Any]) -> None:
    assert teacher.endpoint.calls[0].headers["authorization"].startswith("Basic ")  # it did get there
    files = [path for path in teacher.home.rglob("*") if path.is_file()]
    assert Path(collected["trajectories"]) in files
    assert [p for p in files if any(word.encode() in p.read_bytes() for word in (KEY, PASSWORD))] == []


def test_the_printed_command_trains_a_student_on_the_file(teacher: Teacher, collected: dict[str, Any]) -> None:
    words = shlex.split(collected["next"].replace("STUDENT", str(teacher.student)))
    planned = teacher.command(*words[words.index("reproduce") :], "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "sft seed 0" in planned.stdout
    assert "ppo" not in planned.stdout
    done = teacher.command(*teacher.reproduce(collected["trajectories"], "--json"))
    assert done.returncode == 0, done.stderr[-3000:]
    sft = manifest(teacher, json.loads(done.stdout), "sft")
    (told,) = sft["result"]["data"]
    assert (told["found"], told["trained_on"], told["left_out"]) == (6, 6, {})
    assert sft["result"]["loss"] > 0


def test_as_the_first_stage_it_is_found_again_and_is_the_parent_of_sft(
    teacher: Teacher, collected: dict[str, Any]
) -> None:
    calls = len(teacher.endpoint.calls)
    planned = teacher.command(*teacher.reproduce("collect", "--dry-run", "--json", **teacher.asked))
    assert planned.returncode == 0, planned.stderr
    stages = json.loads(planned.stdout)["stages"]
    assert [(stage["name"], stage["cached"]) for stage in stages] == [
        ("collect", True),
        ("sft", False),
        ("evaluate", False),
    ]
    done = teacher.command(*teacher.reproduce("collect", "--json", **teacher.asked))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert len(teacher.endpoint.calls) == calls
    assert manifest(teacher, result, "sft")["parents"] == {
        "trajectories": manifest(teacher, result, "collect")["digest"]
    }


def manifest(teacher: Teacher, result: dict[str, Any], stage: str) -> dict[str, Any]:
    (folder,) = [record["folder"] for record in result["stages"] if record["name"] == stage]
    found: dict[str, Any] = json.loads((teacher.home / "stages" / folder / "manifest.json").read_text())
    return found


def test_interrupted_it_goes_on_without_paying_twice(teacher: Teacher) -> None:
    chosen = teacher.arguments("--job", "interrupted", "--concurrency", "1")
    process = teacher.start(*chosen)
    events = teacher.home / "jobs" / "interrupted"
    while not teacher.started("interrupted"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, told
    before = teacher.started("interrupted")
    finished = {path.parent.name for path in events.glob("*/*/result.json")}
    assert len(finished) < 8
    second = teacher.run("--job", "interrupted")
    assert (second["summary"]["tried"], second["summary"]["kept"]) == (8, 6)
    after = teacher.started("interrupted")
    again = {f"{task}__{repeat}" for (cell, task, repeat), n in after.items() if n > 1}
    assert again == {f"{task}__{repeat}" for _, task, repeat in before} - finished


def test_a_budget_ends_it_with_what_there_is(teacher: Teacher) -> None:
    cut = teacher.run("--job", "budget", "--concurrency", "1", "--max-cost", "0.004", code=3)
    assert cut["status"] == "partial"
    assert "budget_exceeded" in cut["errors"][0]
    assert 0 < len(read_rollouts(cut["trajectories"])) == cut["summary"]["kept"] < 6


def test_nothing_solved_is_said_with_what_to_do(teacher: Teacher) -> None:
    empty = teacher.command(*teacher.arguments("--set", "agent.max_turns=1", "--limit", "1"))
    assert empty.returncode == 1
    said = empty.stderr.replace("\n", " ")
    assert "none of 2 trials reached a reward of 1: there is nothing to train on" in said
    assert "--set collect.min_reward=0.5" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("collect",), "To ask a stronger model: compactionrl collect --dataset bench12"),
        (("collect", "--dataset", "bench12"), "collect.endpoint is missing"),
        (("collect", "--windows", "16k,32k"), "agent.compaction.window is '16k,32k'"),
        (
            ("reproduce", "--set", "sft.data=[{trajectories: no.parquet}, {trajectories: no.parquet}]"),
            "no.parquet is no",
        ),
        (("reproduce", "--set", "sft.data=[{trajectories: collect}, {trajectories: collect}]"), "collect is not set"),
        (
            ("reproduce", "--set", "collect={endpoint: {base_url: 'http://x/v1', model: m}, dataset: {path: bench12}}"),
            "no entry of sft.data reads it: add {trajectories: collect}",
        ),
    ],
)
def test_a_mistake_is_one_message(teacher: Teacher, arguments: tuple[str, ...], message: str) -> None:
    refused = teacher.command(*arguments, "--dry-run")
    assert refused.returncode == 2, refused.stderr
    assert message in refused.stderr.replace("\n", " ")
    assert "Traceback" not in refused.stderr
