"""What a plan holds, from settings alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.experiment import load_experiment
from flows.plan import Plan
from tasks.errors import UserError

CHEAP = ["evaluation.windows=[]", "evaluation.caps=[]", "evaluation.keep_recents=[]", "evaluation.greedy=false"]


def plan(*overrides: str, preset: str = "smoke") -> Plan:
    return Plan(load_experiment(preset, [*CHEAP, *overrides]))


def test_zero_shot_is_the_model_as_it_is_once_for_all_seeds(small_checkpoint: Path) -> None:
    planned = plan(f'sft.model="{small_checkpoint}"', "variants=zero-shot,base", "seeds=0,1").stages
    made = [spec for spec in planned if spec.stage == "sft"]
    assert [spec.label for spec in made] == ["none, zero-shot", "seed 0", "seed 1"]
    assert made[0].settings["warmstart"]["data"] == []
    cells = [spec for spec in planned if spec.stage == "evaluate"]
    assert [spec.parents["policy"] for spec in cells] == [made[n].digest for n in (0, 1, 0, 2)]


def test_zero_shot_of_a_new_model_is_refused() -> None:
    with pytest.raises(UserError, match="zero-shot is a pretrained model as it is: give one with --model"):
        plan("variants=zero-shot,base")


def test_another_engine_is_another_policy_and_another_evaluation() -> None:
    by_engine = {e: plan("variants=compactionrl", f"engine={e}") for e in ("torch", "vllm")}
    assert by_engine["torch"].sft(0).digest == by_engine["vllm"].sft(0).digest, "the warm start samples nothing"
    digests = {e: {(s.stage, s.digest) for s in p.stages if s.stage != "sft"} for e, p in by_engine.items()}
    assert not digests["torch"] & digests["vllm"]


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("loop.vllm.dtype=bfloat16", True),
        ("loop.vllm.tensor_parallel=2", True),
        ("loop.vllm.eager=true", True),
        ("loop.vllm.servers=[http://gpu:8000]", True),
        ("loop.vllm.gpu_share=0.5", False),
        ("loop.vllm.transfer=nccl", False),
        ("loop.trainer_gpus=0.25", False),
    ],
)
def test_only_what_decides_a_result_is_in_the_keys(setting: str, changes: bool) -> None:
    before, after = plan("variants=compactionrl", "engine=vllm"), plan("variants=compactionrl", "engine=vllm", setting)
    assert ([s.digest for s in before.stages] != [s.digest for s in after.stages]) is changes
