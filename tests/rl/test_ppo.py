"""The loop on the real engine and trainer: order of a step, what is learned from, what is skipped, what ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compaction.protocols import EngineError, Task, Usage
from compaction.rollout import CompactionRecord, Outcome, Rollout, TurnRecord
from compaction.settings import AgentSettings
from rl.advantages import AdvantageSettings, group_advantages
from rl.errors import NoUsableRollouts, TrainingDiverged
from rl.learner import rollout_metrics
from tests.rl.samples import random_segment
from tests.rl.small import BrokenTask, TypedTask, collect, local_loop


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not k.startswith("time/") and k != "rollout/tokens_per_second"}


# Order of a step ----------------------------------------------------------------------------------------------------


def test_values_come_first_then_the_critic_then_the_policy_then_the_weights_go_out(small_checkpoint: Path) -> None:
    loop, worker, trainer = local_loop(small_checkpoint, steps=2)
    results = collect(loop)
    assert [name for name, _ in trainer.calls] == ["values", "update_critic", "update_policy", "weights"] * 2
    assert worker.loaded == [1, 2]
    assert [r.step for r in results] == [0, 1]
    assert {r.outcome.reward for r in results[0].rollouts} == {0.0, 1.0}
    assert sum(r.n_compactions for r in results[0].rollouts) > 0


def test_the_critics_learning_rate_leaves_the_batchs_advantages_bit_equal(small_checkpoint: Path) -> None:
    runs = []
    for lr in (1e-3, 1e-1):
        loop, _, trainer = local_loop(small_checkpoint, trainer={"critic_lr": lr}, steps=2)
        collect(loop)
        runs.append([arguments[1] for arguments in trainer.given("update_policy")])
    (first, second), (first_fast, second_fast) = runs
    assert all(np.array_equal(a, b) for a, b in zip(first, first_fast, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(second, second_fast, strict=True)), "the critics differ later"


def test_every_update_is_on_policy_and_every_token_bears_the_version_that_sampled_it(small_checkpoint: Path) -> None:
    loop, _, _ = local_loop(small_checkpoint, steps=3)
    for step, result in enumerate(collect(loop)):
        versions = {int(v) for r in result.rollouts for s in r.segments for v in s.versions[s.optimized]}
        assert versions == {step}
        assert result.metrics["train/kl_to_sampler"] == pytest.approx(0.0, abs=1e-6)
        assert result.metrics["train/clip_fraction"] == 0.0
        assert result.metrics["train/logprob_mismatch"] < 1e-5
        assert result.metrics["train/grad_norm"] > 0


def test_targets_are_the_rewards_and_never_the_advantages(small_checkpoint: Path) -> None:
    loop, _, trainer = local_loop(small_checkpoint, steps=1)
    rewards = {r.id: r.outcome.reward for r in collect(loop)[0].rollouts}
    rows, targets = trainer.given("update_critic")[0]
    for row, target in zip(rows, targets, strict=True):
        assert set(target) == {rewards[row.rollout_id]}


def test_pretraining_leaves_the_policy_alone(small_checkpoint: Path) -> None:
    loop, worker, trainer = local_loop(small_checkpoint, steps=2)
    before, values = trainer.trainer.weights(), trainer.trainer.critic.head.weight.clone()
    results = collect(loop, update_policy=False)
    assert [name for name, _ in trainer.calls] == ["values", "update_critic"] * 2
    assert worker.loaded == []
    assert all(torch.equal(w, before[name]) for name, w in trainer.trainer.weights().items())
    assert not torch.equal(values, trainer.trainer.critic.head.weight)
    assert "critic/loss" in results[0].metrics
    assert "train/loss" not in results[0].metrics


# Requests -----------------------------------------------------------------------------------------------------------


def test_requests_are_disjoint_and_seeded(small_checkpoint: Path) -> None:
    def requests(**changes: Any) -> list[Any]:
        loop, _, _ = local_loop(small_checkpoint, steps=4, batch_size=6, group_size=3, **changes)
        return [request for step in range(4) for request in loop.stream.batch(step)]

    drawn = requests()
    assert drawn == requests()
    assert len({r.id for r in drawn}) == len({r.seed for r in drawn}) == 24
    assert [r.task.id for r in drawn] == [f"typed-{i}" for i in range(8) for _ in range(3)]
    assert not {r.seed for r in drawn} & {r.seed for r in requests(seed=1)}


# Estimators and masks -----------------------------------------------------------------------------------------------


def test_the_group_estimator_needs_no_critic(small_checkpoint: Path) -> None:
    loop, _, trainer = local_loop(
        small_checkpoint, steps=1, batch_size=8, group_size=4, advantage=AdvantageSettings(estimator="group")
    )
    rollouts = collect(loop)[0].rollouts
    assert [name for name, _ in trainer.calls] == ["update_policy", "weights"]
    groups = [rollouts[:4], rollouts[4:]]
    assert [{r.task_id for r in group} for group in groups] == [{"typed-0"}, {"typed-1"}]
    expected = {
        r.id: a
        for group in groups
        for r, a in zip(group, group_advantages([float(r.outcome.reward or 0) for r in group]), strict=True)
    }
    rows, advantages, _ = trainer.given("update_policy")[0]
    assert {row.rollout_id for row in rows} == set(expected)
    for row, values in zip(rows, advantages, strict=True):
        assert set(values) == {expected[row.rollout_id]}


def test_the_overlong_mask_takes_the_gradient_from_rollouts_that_hit_a_limit(small_checkpoint: Path) -> None:
    loop, _, trainer = local_loop(small_checkpoint, steps=1, batch_size=16, overlong_mask=True)
    reasons = {r.id: r.outcome.stop_reason for r in collect(loop)[0].rollouts}
    rows, _, included = trainer.given("update_policy")[0]
    limits = {"max_turns", "context_full"}
    assert limits & set(reasons.values())
    assert set(reasons.values()) - limits
    for row, mask in zip(rows, included, strict=True):
        assert set(mask) == {reasons[row.rollout_id] not in limits}


def test_without_the_summary_loss_no_summary_token_is_optimized(small_checkpoint: Path) -> None:
    loop, _, trainer = local_loop(small_checkpoint, steps=1, train_summaries=False)
    result = collect(loop)[0]
    assert any(len(r.segments) > 1 for r in result.rollouts)
    assert result.metrics["train/summary_token_share"] == 0.0
    assert all(ordinal % 2 == 0 for row in trainer.given("update_policy")[0][0] for ordinal in row.ordinals)


# Faults -------------------------------------------------------------------------------------------------------------


def broken_where(is_broken: Any) -> Any:
    def tasks(first: int, n: int) -> list[Task]:
        return [BrokenTask(f"broken-{i}") if is_broken(i) else TypedTask(f"typed-{i}") for i in range(first, first + n)]

    return tasks


def test_failed_rollouts_are_counted_and_left_out(small_checkpoint: Path) -> None:
    loop, _, trainer = local_loop(small_checkpoint, broken_where(lambda i: i % 4 == 0), steps=1)
    result = collect(loop)[0]
    assert (result.metrics["rollout/errored"], result.metrics["rollout/usable"]) == (2.0, 6.0)
    failed = {r.id for r in result.rollouts if r.outcome.reward is None}
    assert len(failed) == 2
    assert not failed & {row.rollout_id for row in trainer.given("update_policy")[0][0]}


def test_a_batch_without_a_usable_rollout_is_skipped_and_counted(small_checkpoint: Path) -> None:
    loop, _, trainer = local_loop(small_checkpoint, broken_where(lambda i: i < 8), steps=2)
    skipped, learned = collect(loop)
    assert (skipped.metrics["rollout/usable"], skipped.metrics["rollout/errored"]) == (0.0, 8.0)
    assert "train/loss" not in skipped.metrics
    assert np.isfinite(list(skipped.metrics.values())).all()
    assert "train/loss" in learned.metrics
    assert trainer.trainer.version == 1


def test_too_many_of_them_in_a_row_end_the_run_and_the_failure_is_named(small_checkpoint: Path) -> None:
    # Batches 0, 1 and 3, 4, 5 are broken: the good one in between starts the count anew.
    loop, _, trainer = local_loop(small_checkpoint, broken_where(lambda i: i // 8 != 2), steps=9, max_empty_batches=3)
    seen: list[float] = []

    async def run() -> None:
        async for result in loop.run(0):
            seen.append(result.metrics["rollout/usable"])

    with pytest.raises(NoUsableRollouts, match=r"3 batches in a row .*the container runtime does not answer"):
        asyncio.run(run())
    assert seen == [0.0, 0.0, 8.0, 0.0, 0.0]
    assert trainer.trainer.version == 1


def test_a_loss_that_is_not_finite_is_skipped_counted_and_ends_after_a_bound(small_checkpoint: Path) -> None:
    loop, _, trainer = local_loop(small_checkpoint, trainer={"max_skipped": 3}, steps=9)
    torch.nn.init.constant_(trainer.trainer.critic.head.weight, float("nan"))
    before = trainer.trainer.weights()
    seen: list[dict[str, float]] = []

    async def run() -> None:
        async for result in loop.run(0):
            seen.append(result.metrics)

    with pytest.raises(TrainingDiverged, match="3 steps in a row"):
        asyncio.run(run())
    assert [(m["critic/skipped_steps"], m["train/skipped_steps"]) for m in seen] == [(2.0, 1.0)]
    assert all(np.isfinite(v) for v in seen[0].values())
    assert all(torch.equal(w, before[name]) for name, w in trainer.trainer.weights().items())


def test_weights_that_are_not_finite_never_reach_the_engine(small_checkpoint: Path) -> None:
    loop, worker, trainer = local_loop(small_checkpoint, steps=1)
    poisoned = {name: torch.full_like(w, float("nan")) for name, w in trainer.trainer.weights().items()}
    with pytest.raises(EngineError, match="non-finite values"):
        asyncio.run(worker.load_weights(poisoned, 1))
    assert {r.outcome.error_class for r in collect(loop)[0].rollouts} == {None}


# Continuation -------------------------------------------------------------------------------------------------------


def test_a_step_depends_on_its_number_and_the_weights_alone(small_checkpoint: Path, tmp_path: Path) -> None:
    whole_loop, _, whole = local_loop(small_checkpoint, steps=4)
    expected = collect(whole_loop)

    first_loop, _, first = local_loop(small_checkpoint, steps=2)
    collect(first_loop)
    first.trainer.save(tmp_path)
    loop, worker, second = local_loop(small_checkpoint, steps=4)
    second.trainer.load(tmp_path)
    asyncio.run(worker.load_weights(second.trainer.weights(), second.trainer.version))
    got = collect(loop, 2)

    assert [r.rollouts for r in got] == [r.rollouts for r in expected[2:]]
    assert [without_times(r.metrics) for r in got] == [without_times(r.metrics) for r in expected[2:]]
    for a, b in ((whole.trainer.policy, second.trainer.policy), (whole.trainer.critic, second.trainer.critic)):
        assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# Metrics ------------------------------------------------------------------------------------------------------------


def test_rollout_metrics_count_over_the_batch() -> None:
    rng = np.random.default_rng(0)
    compacted = Rollout(
        "a", "t", 0, AgentSettings(),
        (random_segment(rng, 0, [3]), random_segment(rng, 1, [5]), random_segment(rng, 2, [2])),
        Outcome(1.0, "finished"),
        turns=(TurnRecord(0, "x", "y", 9), TurnRecord(2, "x", "y", 9)),
        compactions=(CompactionRecord(1, 1, 90, 20, dropped=1, kept=0, summary="s"),),
        usage=Usage(completion_tokens=10),
    )  # fmt: skip
    rejected = Rollout(
        "b", "t", 0, AgentSettings(),
        (random_segment(rng, 0, [3]), random_segment(rng, 1, [7])),
        Outcome(0.0, "summary_failed"),
        turns=(TurnRecord(0, "x", "y", 9),),
        compactions=(CompactionRecord(1, 1, 90, None, dropped=0, kept=0, summary="", rejected="endless"),),
        usage=Usage(completion_tokens=10),
    )  # fmt: skip
    failed = Rollout("c", "t", 0, AgentSettings(), (), Outcome(None, "error", "engine", "gone"))
    assert rollout_metrics([compacted, rejected, failed]) == {
        "rollout/usable": 2.0,
        "rollout/errored": 1.0,
        "rollout/tokens": 20.0,
        "rollout/turns": 1.0,
        "rollout/compactions": pytest.approx(1 / 3),
        "rollout/compacted_share": pytest.approx(1 / 3),
        "train/reward": 0.5,
        "rollout/summary_tokens": 5.0,
        "rollout/summary_rejected": 0.5,
    }
    assert set(rollout_metrics([failed])) == {name for name in rollout_metrics([failed]) if name.startswith("rollout/")}
