"""Real tasks: task folders opened once, and as the stream that training reads."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from compaction.protocols import Task
from evaluation.settings import DatasetSettings
from evaluation.tasksets.datasets import Dataset, DatasetError, ensure_images, load_dataset
from rl.requests import TaskSource
from tasks.errors import UserError

SANDBOX_SOURCES = (
    "evaluation/environments",
    "evaluation/settings.py",
    "evaluation/tasksets/datasets.py",
    "evaluation/tasksets/task_folder.py",
    "evaluation/tasksets/task_toml.py",
    "evaluation/verifier.py",
    "tasks/real_tasks.py",
)
"""Sources that decide what a stage on real tasks gives, beside those of the same stage on the trail world"""


@cache
def open_dataset(settings: DatasetSettings) -> Dataset:
    """The task folders that the settings choose. Raises UserError."""
    try:
        return load_dataset(
            settings.path,
            sandbox=settings.sandbox,
            include=settings.include,
            exclude=settings.exclude,
            limit=settings.limit,
            sample_seed=settings.sample_seed,
        )
    except DatasetError as error:
        raise UserError(str(error)) from error


def dataset_identity(settings: DatasetSettings) -> dict[str, Any]:
    """The dataset by content, for a stage's key."""
    dataset = open_dataset(settings)
    return {"name": dataset.name, "digest": dataset.digest, "sandbox": settings.sandbox.model_dump(mode="json")}


def dataset_tasks(settings: DatasetSettings, seed: int) -> TaskSource:
    """The dataset's tasks over and over, each round in an order of its own. The images they need are built first."""
    dataset = open_dataset(settings)
    if settings.sandbox.kind == "docker":
        ensure_images(dataset)

    def stretch(first: int, count: int) -> list[Task]:
        return [_task_number(dataset, seed, index) for index in range(first, first + count)]

    return stretch


def _task_number(dataset: Dataset, seed: int, index: int) -> Task:
    round_, place = divmod(index, len(dataset.tasks))
    order = list(range(len(dataset.tasks)))
    random.Random(f"{seed}|{round_}").shuffle(order)
    return dataset.tasks[order[place]]
