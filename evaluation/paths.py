"""Where a job keeps what: Harbor's layout, so that its viewers read it too.

```
jobs/NAME/                        one sweep
  CELL/                           one job: a policy under one setting
    config.json  result.json  events.jsonl  job.lock
    TASK__REPEAT/                 one trial
      config.json  result.json
      agent/{trajectory.json, rollout.parquet, …}  verifier/{test-stdout.txt, reward.txt, …}  artifacts/…
      attempts/1/…                an earlier attempt, as it was left
```
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

ATTEMPTS = "attempts"


@dataclass(frozen=True)
class JobPaths:
    """The folder of one job."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def lock(self) -> Path:
        return self.root / "job.lock"

    def trial(self, task: str, repeat: int) -> TrialPaths:
        return TrialPaths(self.root / f"{task}__{repeat}")


def trials_below(folder: Path) -> list[TrialPaths]:
    """Trials with a trajectory in a folder of one trial, one job or one sweep, ours or Harbor's; newest attempts."""
    trial, job, sweep = (folder.glob(f"{above}agent/trajectory.json") for above in ("", "*/", "*/*/"))
    found = {path.parent.parent for paths in (trial, job, sweep) for path in paths}
    return [TrialPaths(root) for root in sorted(found) if ATTEMPTS not in root.relative_to(folder).parts]


@dataclass(frozen=True)
class TrialPaths:
    """The folder of one trial, and what its newest attempt left there."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def trajectory(self) -> Path:
        return self.root / "agent" / "trajectory.json"

    @property
    def rollout(self) -> Path:
        return self.root / "agent" / "rollout.parquet"

    @property
    def attempts(self) -> Path:
        return self.root / ATTEMPTS

    def next_attempt(self) -> int:
        """Number of the attempt to come, from 1. What an earlier one left is set aside, never deleted."""
        left = [path for path in self.root.iterdir() if path != self.attempts] if self.root.is_dir() else []
        before = [int(path.name) for path in self.attempts.glob("*") if path.name.isdigit()]
        number = max(before, default=0) + 1
        if not left:
            self.root.mkdir(parents=True, exist_ok=True)
            return number
        aside = self.attempts / str(number)
        aside.mkdir(parents=True)
        for path in left:
            shutil.move(path, aside / path.name)
        return number + 1
