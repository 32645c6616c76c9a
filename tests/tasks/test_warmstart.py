"""The base policy: made from nothing, in a worker process, the same again under its seed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from compaction.pairing import read_pairing
from compaction.rendering import load_renderer
from compaction.settings import AgentSettings, CompactionSettings
from rl.errors import TrainingDiverged
from rl.models import load_policy
from rl.settings import LoraSettings, SFTSettings, SFTStage, TinySettings
from tasks import warmstart
from tasks.cluster import Cluster
from tasks.expert_data import ExpertData, corpus, expert_rollouts
from tasks.stages import StageRun
from tasks.warmstart import STEPS_PER_REPORT, WarmstartSettings
from tests.rl.small import WORLD
from tests.tasks.small_stages import Recording

AGENT = AgentSettings(
    scaffold="shell-line",
    compaction=CompactionSettings(
        window=128, threshold=44, max_response=24, min_response=3, summary_cap=22, cap=3, prompt_pack="tiny"
    ),
    max_turns=12,
)
DATA = ExpertData(rollouts=6, windows=(112, 128), caps=(2, 3), keep_recents=(0, 1))
STEPS = 2 * STEPS_PER_REPORT + 5
SETTINGS = WarmstartSettings(
    checkpoint_every=STEPS_PER_REPORT,
    tiny=TinySettings(layers=1, width=32, heads=1, feed_forward=48, max_positions=256),
    corpus_tasks=60,
    data=(DATA,),
    sft=SFTSettings(stages=(SFTStage(steps=STEPS, tokens_per_step=300),)),
)


def made(folder: Path, seed: int = 0, settings: WarmstartSettings = SETTINGS) -> dict[str, torch.Tensor]:
    steps = list(warmstart.warmstart(folder, settings, WORLD, AGENT, seed))
    assert [done for done, _ in steps] == list(range(1, STEPS + 1))
    metrics = [each for _, each in steps]
    assert metrics[-1]["sft/loss"] < metrics[0]["sft/loss"]
    return load_file(folder / "checkpoint" / "model.safetensors")


def test_the_base_policy_is_an_ordinary_checkpoint_and_the_same_again_under_its_seed(tmp_path: Path) -> None:
    first, again, other = made(tmp_path / "a"), made(tmp_path / "b"), made(tmp_path / "c", seed=1)
    assert all(torch.equal(first[name], w) for name, w in again.items())
    assert any(not torch.equal(first[name], w) for name, w in other.items())
    assert load_policy(tmp_path / "a" / "checkpoint").config.num_hidden_layers == 1
    assert load_renderer(tmp_path / "a" / "checkpoint").encode(" cat L1") == [
        *load_renderer(tmp_path / "a" / "checkpoint").encode(" cat"),
        *load_renderer(tmp_path / "a" / "checkpoint").encode(" L1"),
    ]


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_killed_in_the_middle_it_goes_on_from_its_checkpoint_to_the_same_bits(
    tmp_path: Path, lora: LoraSettings | None
) -> None:
    settings = SETTINGS.model_copy(update={"sft": SETTINGS.sft.model_copy(update={"lora": lora})})
    whole = made(tmp_path / "whole", settings=settings)
    steps = warmstart.warmstart(tmp_path / "cut", settings, WORLD, AGENT, 0)
    for done, _ in steps:
        if done == STEPS_PER_REPORT + 3:
            break
    steps.close()  # type: ignore[attr-defined]
    assert not (tmp_path / "cut" / "checkpoint").exists()
    rest = [done for done, _ in warmstart.warmstart(tmp_path / "cut", settings, WORLD, AGENT, 0)]
    assert rest == list(range(STEPS_PER_REPORT + 1, STEPS + 1))
    resumed = load_file(tmp_path / "cut" / "checkpoint" / "model.safetensors")
    assert all(torch.equal(whole[name], w) for name, w in resumed.items())
    assert not (tmp_path / "cut" / warmstart.CHECKPOINTS).exists()


def test_the_expert_runs_under_the_settings_drawn_for_it(tmp_path: Path) -> None:
    from rl.tiny import make_tiny_checkpoint

    start = make_tiny_checkpoint(tmp_path, corpus(SETTINGS.corpus_tasks, WORLD, AGENT), SETTINGS.tiny)
    rollouts = expert_rollouts(DATA, SETTINGS.expert, WORLD, AGENT, load_renderer(start), seed=0)
    assert len({r.task_id for r in rollouts}) == 6
    assert {r.settings.mode for r in rollouts} == {"training"}
    assert {r.settings.compaction.window for r in rollouts} <= {112, 128}
    assert len({r.settings.compaction for r in rollouts}) > 1
    assert rollouts == expert_rollouts(DATA, SETTINGS.expert, WORLD, AGENT, load_renderer(start), seed=0)


def test_each_sft_stage_has_its_data() -> None:
    with pytest.raises(ValidationError, match="data has 2 entries for 1 SFT stages"):
        WarmstartSettings(data=(DATA, DATA), sft=SETTINGS.sft)


def test_long_steps_are_shown_between_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(done, {"sft/loss": float(done)}) for done in range(1, STEPS_PER_REPORT + 3)]
    mean = sum(range(1, STEPS_PER_REPORT + 1)) / STEPS_PER_REPORT
    reports = [(STEPS_PER_REPORT, {"sft/loss": mean}), (STEPS_PER_REPORT + 2, {"sft/loss": STEPS_PER_REPORT + 1.5})]
    assert list(warmstart._reports(iter(steps))) == reports
    monkeypatch.setattr(warmstart, "SECONDS_PER_SIGN", -1.0)
    told = list(warmstart._reports(iter(steps)))
    assert [done for done, _ in told] == [*range(1, STEPS_PER_REPORT + 3), STEPS_PER_REPORT + 2]
    assert [report for report in told if report[1]] == reports


@pytest.mark.xdist_group("ray")
def test_in_a_worker_process_it_reports_on_the_way_and_its_errors_arrive_as_themselves(
    ray_cluster: Cluster, tmp_path: Path
) -> None:
    def run(settings: WarmstartSettings, folder: Path) -> tuple[dict[str, Any], Recording]:
        recording = Recording()
        body = warmstart.body(settings, WORLD, AGENT, 0, ray_cluster)
        return asyncio.run(body(StageRun(folder, recording, recording))), recording  # type: ignore[arg-type]

    result, recording = run(SETTINGS, tmp_path / "a")
    assert sorted(recording.steps) == [STEPS_PER_REPORT - 1, 2 * STEPS_PER_REPORT - 1, STEPS - 1]
    loss = recording.steps[STEPS - 1]["sft/loss"]
    assert result == {"checkpoint": "checkpoint", "base_model": None, "loss": loss}
    assert load_policy(tmp_path / "a" / result["checkpoint"]) is not None

    diverging = SETTINGS.model_copy(update={"sft": SETTINGS.sft.model_copy(update={"lr": 1e30})})
    with pytest.raises(TrainingDiverged, match="3 steps in a row") as caught:
        run(diverging, tmp_path / "b")
    assert "Traceback" not in str(caught.value)


def test_a_pretrained_model_is_fine_tuned_from_its_own_weights_or_left_as_it_is(
    small_checkpoint: Path, tmp_path: Path
) -> None:
    agent = AGENT.model_copy(update={"compaction": AGENT.compaction.model_copy(update={"window": 112})})
    data = DATA.model_copy(update={"windows": (112,)})
    pretrained = SETTINGS.model_copy(update={"model": str(small_checkpoint), "data": (data,)})
    steps = list(warmstart.warmstart(tmp_path / "tuned", pretrained, WORLD, agent, 0))
    assert len(steps) == STEPS
    start, tuned = (
        load_file(small_checkpoint / "model.safetensors"),
        load_file(tmp_path / "tuned/checkpoint/model.safetensors"),
    )
    assert start.keys() == tuned.keys()
    assert any(not torch.equal(start[name], tuned[name]) for name in start)

    as_it_is = WarmstartSettings(model=str(small_checkpoint), data=())
    assert list(warmstart.warmstart(tmp_path / "same", as_it_is, WORLD, agent, 0)) == []
    same = load_file(tmp_path / "same/checkpoint/model.safetensors")
    assert all(torch.equal(start[name], same[name]) for name in start)


def test_the_pairing_stands_beside_the_weights_with_all_that_they_were_trained_on(
    small_checkpoint: Path, tmp_path: Path
) -> None:
    made(tmp_path / "first", seed=3)
    first = read_pairing(tmp_path / "first/checkpoint")
    assert first is not None
    assert (first.window, first.scaffold, first.prompt_pack.name) == (128, "shell-line", "tiny")
    assert first.base_model is None
    assert [(t.stage, t.data, t.steps, t.seed) for t in first.training] == [
        ("sft", "6 expert rollouts on the trail world", STEPS, 3)
    ]

    folder = str(tmp_path / "first/checkpoint")
    other = AGENT.model_copy(update={"compaction": AGENT.compaction.model_copy(update={"cap": 1})})
    list(warmstart.warmstart(tmp_path / "again", SETTINGS.model_copy(update={"model": folder}), WORLD, other, 0))
    again = read_pairing(tmp_path / "again/checkpoint")
    assert again is not None
    assert (again.cap, again.base_model) == (1, folder)
    assert [t.seed for t in again.training] == [3, 0]

    list(warmstart.warmstart(tmp_path / "same", WarmstartSettings(model=folder, data=()), WORLD, other, 0))
    assert read_pairing(tmp_path / "same/checkpoint") == first, "nothing was trained"
    untold = WarmstartSettings(model=str(small_checkpoint), data=())
    list(warmstart.warmstart(tmp_path / "untold", untold, WORLD, AGENT, 0))
    assert read_pairing(tmp_path / "untold/checkpoint") is None


def test_other_weights_in_a_folder_are_another_start(small_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(small_checkpoint, folder)

    def digest() -> str:
        warmstart.model_identity.cache_clear()
        return warmstart.spec(WarmstartSettings(model=str(folder), data=()), WORLD, AGENT, 0).digest

    before = digest()
    assert digest() == before
    (folder / "README.md").write_text("another card")
    assert digest() == before
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert digest() != before


def test_a_new_model_needs_something_to_learn() -> None:
    with pytest.raises(ValidationError, match="only a pretrained one"):
        WarmstartSettings(data=())
