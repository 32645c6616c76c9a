"""The trail world: what every task must be, and what its settings do."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from pydantic import ValidationError

from compaction.protocols import Task
from evaluation.tasksets.trail import END, FLIP_WORDS, TrailSettings, TrailTask, split_of, trail_tasks

W1 = TrailSettings()
SPLITS = ("train", "validation", "test")


def follow(task: TrailTask, flip_words: int = 1) -> tuple[list[str], list[str]]:
    """(files, facts) met by the rule alone: go L, or R where an odd number of flip words stands."""
    files = dict(task.files)
    facts = set(W1.facts)
    path, met, name = [], [], task.start
    while name != END:
        words = files[name].split()
        path.append(name)
        met += [word for word in words if word in facts]
        flips = sum(word in FLIP_WORDS[:flip_words] for word in words)
        name = END if END in words else words[flips % 2]
    return path, met


def solve(task: TrailTask) -> float:
    async def run() -> float:
        environment = task.open()
        await environment.start()
        for name in task.path:
            assert (await environment.execute(f"cat {name}")).exit_code == 0
        await environment.execute(f"echo {' '.join(task.answer)} > {task.out}")
        return await environment.grade()

    return asyncio.run(run())


def test_the_rule_leads_along_the_path_to_the_answer() -> None:
    for task in trail_tasks(W1, "train", 200, seed=3):
        assert follow(task) == (list(task.path), list(task.answer))
        assert solve(task) == 1.0


def test_tasks_keep_to_their_settings() -> None:
    tasks = trail_tasks(W1, "train", 300, seed=0)
    lengths = [len(task.path) for task in tasks]
    assert (min(lengths), max(lengths)) == (7, 22)
    assert all(1 <= len(task.answer) <= 13 for task in tasks)
    assert all(len({fact[0] for fact in task.answer}) == len(task.answer) for task in tasks)
    assert all(len(task.files) == 2 * len(task.path) - 1 for task in tasks)
    assert all(len(task.path) + 2 <= task.limits.max_turns == 28 for task in tasks)
    rate = sum(len(task.answer) for task in tasks) / sum(lengths)
    assert 0.35 < rate < 0.45


def test_a_decoy_differs_in_nothing_but_its_fact() -> None:
    facts = set(W1.facts)
    n_wrong = 0
    for task in trail_tasks(W1, "train", 50, seed=0):
        files = dict(task.files)
        for name, following in zip(task.path, task.path[1:], strict=False):
            (decoy,) = set(files[name].split()[:2]) - {following}
            right, wrong = files[following].split(), files[decoy].split()
            different = [(a, b) for a, b in zip(right, wrong, strict=True) if a != b]
            assert all(a in facts and b in facts and a[0] == b[0] for a, b in different)
            assert len(different) == sum(word in facts for word in right) <= 1
            n_wrong += len(different)
    assert n_wrong > 100


def test_flips_stand_only_before_facts_unless_asked_otherwise() -> None:
    def flips(settings: TrailSettings) -> tuple[int, int]:
        """(before a file with a fact, before one without)"""
        counts = [0, 0]
        for task in trail_tasks(settings, "train", 100, seed=0):
            files = dict(task.files)
            for name, following in zip(task.path, task.path[1:], strict=False):
                if "flip" in files[name].split():
                    counts[not any(fact in files[following].split() for fact in task.answer)] += 1
        return counts[0], counts[1]

    with_fact, without = flips(W1)
    assert with_fact > 50
    assert without == 0
    assert flips(TrailSettings(flip_only_before_facts=False))[1] > 50


def test_harder_decisions_still_lead_to_the_answer() -> None:
    settings = TrailSettings(
        flip_rate=0.3,
        double_flip_rate=0.2,
        flip_words=3,
        lure_rate=0.5,
        flip_only_before_facts=False,
        decoy_fact_rate=1.0,
    )
    tasks = trail_tasks(settings, "train", 100, seed=0)
    assert all(follow(task, flip_words=3) == (list(task.path), list(task.answer)) for task in tasks)
    words = {word for task in tasks for _, content in task.files for word in content.split()}
    assert {"flip", "turn", "swap", "flop", "tarn", "swab"} <= words
    assert "veer" not in words


def test_one_seed_gives_the_same_tasks_and_a_longer_list_begins_with_the_shorter() -> None:
    tasks = trail_tasks(W1, "validation", 20, seed=7)
    assert trail_tasks(W1, "validation", 40, seed=7)[:20] == tasks
    assert trail_tasks(W1, "validation", 20, seed=8) != tasks
    assert len({task.id for task in tasks}) == 20


def test_no_two_splits_share_a_set_of_files() -> None:
    by_split = {split: trail_tasks(W1, split, 150, seed=0) + trail_tasks(W1, split, 150, seed=1) for split in SPLITS}
    sets = {split: {task.files for task in tasks} for split, tasks in by_split.items()}
    assert all(len(files) == 300 for files in sets.values())
    assert len(set.union(*sets.values())) == 900
    for split, tasks in by_split.items():
        assert {split_of(task) for task in tasks} == {split}


def test_splits_stay_disjoint_in_a_world_so_small_that_tasks_repeat() -> None:
    tiny = TrailSettings(
        min_length=1,
        max_length=2,
        pointer_names=2,
        parts=1,
        values=2,
        max_facts=1,
        noise_max=0,
        flip_rate=0,
        out_names=1,
    )
    sets = [{task.files for task in trail_tasks(tiny, split, 200, seed=0)} for split in SPLITS]
    assert all(len(files) < 200 for files in sets)
    assert not sets[0] & sets[1]
    assert not sets[0] & sets[2]
    assert not sets[1] & sets[2]


def test_a_task_travels_to_workers() -> None:
    (task,) = trail_tasks(W1, "test", 1, seed=0)
    assert isinstance(task, Task)
    assert pickle.loads(pickle.dumps(task)) == task
    assert hash(task) == hash(pickle.loads(pickle.dumps(task)))
    assert task.instruction == f"start {task.start} out {task.out}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_length": 9, "max_length": 8}, "min_length=9 is larger than max_length=8"),
        ({"pointer_names": 10}, "pointer_names=10 cannot name 22 files"),
        ({"parts": 4}, "max_facts=13 needs as many parts"),
        ({"min_facts": 8}, "min_facts=8 does not fit on 7 files"),
        ({"flip_rate": 0.9, "double_flip_rate": 0.2}, "exceed 1 together"),
        ({"flips": 1}, "flips"),
    ],
)
def test_settings_that_cannot_be_built_are_refused_with_the_reason(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrailSettings(**values)


def test_an_unknown_split_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown split 'dev'; allowed: train, validation, test"):
        trail_tasks(W1, "dev", 1, seed=0)  # type: ignore[arg-type]
