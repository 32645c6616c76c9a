"""Trajectories as SFT data: where they are, which of them can be trained on, and why the others cannot."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from compaction.atif_reading import trajectory_from_atif
from compaction.rendering import ChatTemplateRenderer
from compaction.rerendering import rerendered
from compaction.rollout import Rollout
from compaction.settings import AgentSettings, Settings
from compaction.storage import read_rollouts
from compaction.trajectory import NotUsable, Trajectory, trajectory_of
from evaluation.harbor_results import reward_in
from evaluation.paths import trials_below
from tasks.caching import file_digest
from tasks.errors import UserError

COLLECTED = "collect"
"""In place of a path: what this experiment's stage `collect` makes"""
ACCEPTED = "a Parquet file of rollouts, an ATIF JSON file, a folder of those, or a job's folder"

Source = tuple[str, Callable[[], Trajectory]]
"""A trajectory's name and its texts, which raise NotUsable where there are none"""


class TrajectoryData(Settings):
    """Trajectories that one SFT stage reads: of a stronger model, or of any agent that writes ATIF."""

    trajectories: str = Field(min_length=1, description=f"{ACCEPTED}; or `{COLLECTED}`: what stage collect makes")
    min_reward: float = Field(
        1.0, ge=0, le=1, description="least reward; 0 takes also those whose file holds no reward"
    )

    @field_validator("trajectories")
    @classmethod
    def _is_absolute(cls, path: str) -> str:
        return path if path == COLLECTED else str(Path(path).expanduser().absolute())

    def described(self) -> str:
        return "trajectories that were collected" if self.collected else f"trajectories of {self.trajectories}"

    @property
    def collected(self) -> bool:
        return self.trajectories == COLLECTED

    def identity(self) -> dict[str, Any]:
        """For a stage's key: files by content, not place. What stage `collect` makes is a parent. Raises UserError."""
        if self.collected:
            return self.model_dump(mode="json")
        return {"files": [file_digest(path) for path in self.files()], "min_reward": self.min_reward}

    def files(self) -> list[Path]:
        """All that is read. Raises UserError where there is nothing."""
        path = Path(self.trajectories)
        if path.is_file() and path.suffix in (".parquet", ".json"):
            return [path]
        if not path.is_dir():
            raise UserError(f"sft.data: {path} is no file of trajectories; give {ACCEPTED}")
        trials = trials_below(path)
        found = [file for t in trials for file in (t.trajectory, t.result) if file.is_file()]
        found = found or sorted(path.glob("*.json")) + sorted(path.glob("*.parquet"))
        if not found:
            raise UserError(f"sft.data: folder {path} holds no trajectory; give {ACCEPTED}")
        return found


@dataclass
class Selection:
    """The trajectories of one entry of `sft.data` that can be trained on, and why the others were left out."""

    source: str
    rollouts: list[Rollout] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Reason → the trajectories, each with its own detail"""

    @property
    def found(self) -> int:
        return len(self.rollouts) + sum(map(len, self.left_out.values()))

    def summary(self) -> dict[str, Any]:
        """What the stage's result keeps."""
        counts = {reason: len(names) for reason, names in self.left_out.items()}
        return {"source": self.source, "found": self.found, "trained_on": len(self.rollouts), "left_out": counts}

    def reasons(self) -> str:
        """`3 × reward below 1, such as memory-02__0 (reward 0)`, the most frequent first."""
        ordered = sorted(self.left_out.items(), key=lambda item: -len(item[1]))
        return "; ".join(f"{len(names)} × {reason}, such as {names[0]}" for reason, names in ordered)

    def text(self) -> str:
        told = f"{len(self.rollouts)} of {self.found} trajectories of {self.source} are trained on"
        return f"{told}; left out: {self.reasons()}" if self.left_out else told


def select(data: TrajectoryData, path: Path, renderer: ChatTemplateRenderer, agent: AgentSettings) -> Selection:
    """The trajectories at `path`, rendered for the student. Raises UserError where none can be trained on."""
    selection = Selection(data.trajectories)
    for name, read in _sources(data.model_copy(update={"trajectories": str(path)}), agent.scaffold):
        try:
            trajectory = read()
            _check_reward(trajectory, data.min_reward)
            selection.rollouts.append(rerendered(trajectory, renderer, agent))
        except NotUsable as why:
            selection.left_out[why.reason].append(f"{name} ({why.detail})" if why.detail else name)
    if not selection.rollouts:
        raise UserError(
            f"sft.data: none of the {selection.found} trajectories of {data.trajectories} can be trained on: "
            f"{selection.reasons() or 'it is empty'}. Collect more (`compactionrl collect`), lower min_reward of this "
            "entry, or give the student the scaffold, prompt pack and window they were made with (agent.…)"
        )
    return selection


def _check_reward(trajectory: Trajectory, least: float) -> None:
    if trajectory.reward is None:
        if least > 0:
            raise NotUsable("the file holds no reward, and only min_reward: 0 takes those")
    elif trajectory.reward < least:
        raise NotUsable(f"reward below {least:g}", f"reward {trajectory.reward:g}")


def _sources(data: TrajectoryData, scaffold: str) -> Iterator[Source]:
    trials = {t.trajectory: t for t in trials_below(Path(data.trajectories))}
    for path in data.files():
        if path.suffix == ".parquet":
            for rollout in _rollouts(path):
                yield rollout.id, lambda rollout=rollout: trajectory_of(rollout)  # type: ignore[misc]
        elif path in trials:
            trial = trials[path]
            reward = reward_in(_json(trial.result)) if trial.result.is_file() else None
            yield trial.root.name, _atif(path, trial.root.name, scaffold, reward)
        elif not trials:
            yield path.name, _atif(path, path.stem, scaffold, None)


def _atif(path: Path, name: str, scaffold: str, reward: float | None) -> Callable[[], Trajectory]:
    return lambda: trajectory_from_atif(_json(path), name, scaffold, reward)


def _rollouts(path: Path) -> list[Rollout]:
    try:
        return read_rollouts(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these
        raise UserError(f"sft.data: {path} cannot be read: {error}") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotUsable("it is no JSON", f"{path.name}: {error}") from error
