"""Trajectories as SFT data: the expert's are the same bits; what cannot be trained on is counted, with its reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.torch import load_file

from compaction.atif import atif_trajectory, write_atif
from compaction.rendering import ChatTemplateRenderer, load_renderer
from compaction.rollout import Outcome, Rollout
from compaction.storage import write_rollouts
from evaluation.tasksets.trail import TrailSettings
from rl.rows import rows_of
from rl.sft import sft_weights
from tasks import warmstart
from tasks.caching import StageSpec
from tasks.errors import UserError
from tasks.expert_data import ExpertData, corpus, expert_rollouts
from tasks.sft_data import TrajectoryData, select
from tests.tasks.test_warmstart import AGENT, SETTINGS, STEPS

WORLD = TrailSettings(min_length=7, max_length=12, max_facts=5)
EXPERT = ExpertData(rollouts=20, windows=(128,), caps=(3,), keep_recents=(0, 1, 2))
SOURCE = {"schema_version": "ATIF-v1.6", "agent": {"name": "other", "version": "1"}}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplateRenderer:
    from rl.tiny import make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("tiny")
    return load_renderer(make_tiny_checkpoint(folder, corpus(SETTINGS.corpus_tasks, WORLD, AGENT), SETTINGS.tiny))


@pytest.fixture(scope="module")
def expert(renderer: ChatTemplateRenderer) -> list[Rollout]:
    made = expert_rollouts(EXPERT, SETTINGS.expert, WORLD, AGENT, renderer, seed=0)
    assert "summary_failed" not in {rollout.outcome.stop_reason for rollout in made}
    return made


def entry(path: Path, min_reward: float = 1.0) -> TrajectoryData:
    return TrajectoryData(trajectories=str(path), min_reward=min_reward)


def test_the_experts_rollouts_come_back_with_the_same_ids_and_mask(
    renderer: ChatTemplateRenderer, expert: list[Rollout], tmp_path: Path
) -> None:
    path = write_rollouts(tmp_path / "expert.parquet", expert)
    selection = select(entry(path, 0), path, renderer, AGENT)
    assert selection.left_out == {}
    assert sum(rollout.n_compactions for rollout in expert) > 10
    for before, after in zip(expert, selection.rollouts, strict=True):
        assert after.segments == before.segments
        for mine, its in zip(rows_of(before), rows_of(after), strict=True):
            assert np.array_equal(sft_weights(mine, 0.1), sft_weights(its, 0.1))


def test_a_stage_on_the_experts_trajectories_makes_the_model_that_the_expert_makes(
    expert: list[Rollout], tmp_path: Path
) -> None:
    path = write_rollouts(tmp_path / "expert.parquet", expert)
    read = TrajectoryData(trajectories="collect", min_reward=0)
    for name, data in (("expert", EXPERT), ("read", read)):
        settings = SETTINGS.model_copy(update={"data": (data,)})
        assert len(list(warmstart.warmstart(tmp_path / name, settings, WORLD, AGENT, 0, path))) == STEPS
    first, second = (load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("expert", "read"))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    (told,) = json.loads((tmp_path / "read" / warmstart.SELECTED).read_text())
    assert (told["found"], told["trained_on"], told["left_out"]) == (len(expert), len(expert), {})
    assert not (tmp_path / "expert" / warmstart.SELECTED).exists()


def test_what_is_left_out_is_counted_with_its_reason(
    renderer: ChatTemplateRenderer, expert: list[Rollout], tmp_path: Path
) -> None:
    good = replace(expert[0], outcome=Outcome(1.0, "finished"))
    unsolved = replace(good, id="unsolved", outcome=Outcome(0.0, "finished"))
    failed = replace(good, id="failed", outcome=Outcome(None, "error", "engine"))
    other = replace(good, id="other", settings=good.settings.model_copy(update={"scaffold": "bash-block"}))
    longer = replace(good, id="longer", instruction="start " * 200)
    path = write_rollouts(tmp_path / "mixed.parquet", [good, unsolved, unsolved, failed, other, longer])
    selection = select(entry(path), path, renderer, AGENT)
    assert [rollout.id for rollout in selection.rollouts] == [good.id]
    assert selection.summary()["left_out"] == {
        "reward below 1": 2,
        "the trial failed and has no reward": 1,
        "the student's scaffold is shell-line": 1,
        "it does not fit the student's window of 128 tokens": 1,
    }
    assert selection.text().startswith(f"1 of 6 trajectories of {path} are trained on; left out: 2 × reward below 1")
    assert "longer (" in selection.text()


def test_nothing_to_train_on_is_one_message_with_the_next_step(
    renderer: ChatTemplateRenderer, expert: list[Rollout], tmp_path: Path
) -> None:
    unsolved = [replace(rollout, outcome=Outcome(0.0, "finished")) for rollout in expert[:2]]
    path = write_rollouts(tmp_path / "unsolved.parquet", unsolved)
    with pytest.raises(UserError, match=r"none of the 2 .* 2 × reward below 1, .*compactionrl collect.*min_reward"):
        select(entry(path), path, renderer, AGENT)
    assert len(select(entry(path, 0), path, renderer, AGENT).rollouts) == 2


def atif(*actions: str, shown: str = "ok") -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"source": "user", "message": "start L1 out O1"}]
    steps += [
        {"source": "agent", "message": action, "observation": {"results": [{"content": shown}]}} for action in actions
    ]
    return {**SOURCE, "steps": [{"step_id": i, **step} for i, step in enumerate(steps, 1)]}


def test_other_agents_trajectories_are_one_window_and_say_where_a_reward_is_missing(
    renderer: ChatTemplateRenderer, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(atif("cat L1", "exit")))
    (tmp_path / "b.json").write_text("{broken")
    with pytest.raises(UserError, match=r"holds no reward, and only min_reward: 0 takes those, such as a.json"):
        select(entry(tmp_path), tmp_path, renderer, AGENT)
    selection = select(entry(tmp_path, 0), tmp_path, renderer, AGENT)
    assert [len(rollout.segments) for rollout in selection.rollouts] == [1]
    assert selection.summary()["left_out"] == {"it is no JSON": 1}


def test_of_a_job_the_newest_attempts_are_read_with_the_rewards_of_their_results(
    renderer: ChatTemplateRenderer, expert: list[Rollout], tmp_path: Path
) -> None:
    for name, reward in (("solved__0", 1.0), ("unsolved__0", 0.0), ("silent__0", None)):
        trial = tmp_path / "job" / name
        for agent in (trial / "agent", trial / "attempts" / "1" / "agent"):
            agent.mkdir(parents=True)
            (agent / "trajectory.json").write_text(json.dumps(atif("cat L1", "exit")))
        rewards = None if reward is None else {"rewards": {"reward": reward}}
        (trial / "result.json").write_text(json.dumps({"verifier_result": rewards}))
    (tmp_path / "job" / "ours__0" / "agent").mkdir(parents=True)
    ours = next(rollout for rollout in expert if rollout.outcome.reward == 1)
    write_atif(tmp_path / "job/ours__0/agent/trajectory.json", atif_trajectory(ours, model_name="expert"))
    selection = select(entry(tmp_path), tmp_path, renderer, AGENT)
    assert [rollout.id for rollout in selection.rollouts] == [ours.id, "solved__0"]
    assert selection.rollouts[0].segments == ours.segments
    assert sorted(selection.summary()["left_out"].values()) == [1, 1]
    one = tmp_path / "job" / "solved__0"
    assert select(entry(one), one, renderer, AGENT).found == 1


def test_the_stage_is_named_by_what_the_files_hold_not_by_where_they_are(tmp_path: Path) -> None:
    def digest(path: Path, text: str, min_reward: float = 1.0) -> str:
        path.write_text(text)
        settings = SETTINGS.model_copy(update={"data": (entry(path, min_reward),)})
        return warmstart.spec(settings, WORLD, AGENT, 0).digest

    first = digest(tmp_path / "a.json", "{}")
    assert digest(tmp_path / "b.json", "{}") == first
    assert digest(tmp_path / "a.json", "[]") != first
    assert digest(tmp_path / "a.json", "{}", 0.5) != first


def test_what_stage_collect_makes_is_a_parent() -> None:
    settings = SETTINGS.model_copy(update={"data": (TrajectoryData(trajectories="collect"),)})
    collected = StageSpec("collect", "big", {"a": 1})
    spec = warmstart.spec(settings, WORLD, AGENT, 0, collected)
    assert spec.parents == {"trajectories": collected.digest}
    assert warmstart.spec(SETTINGS, WORLD, AGENT, 0).parents == {}


@pytest.mark.parametrize("name", ["none.parquet", "notes.txt", "empty"])
def test_a_path_without_trajectories_is_refused_with_what_is_allowed(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="a Parquet file of rollouts, an ATIF JSON file, a folder of those"):
        entry(tmp_path / name).files()


def test_an_entry_is_either_kind_and_says_what_it_lacks() -> None:
    with pytest.raises(ValidationError, match="trajectories"):
        warmstart.WarmstartSettings.model_validate({"data": [{"trajectories": "", "rollouts": 3}]})
