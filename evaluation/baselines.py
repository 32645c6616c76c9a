"""Are the tasks sound? Their own solutions must pass, and doing nothing must fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compaction.protocols import InfrastructureError
from evaluation.environments.sandbox import Sandbox
from evaluation.tasksets.task_folder import FolderTask

Act = Callable[[Sandbox], Awaitable[None]]
"""What is done in the sandbox before it is graded"""


@dataclass(frozen=True)
class Checked:
    """Rewards of the task's own solution and of doing nothing; a text where something broke."""

    task: str
    solution: float | str
    nothing: float | str

    @property
    def sound(self) -> bool:
        return self.solution == 1.0 and self.nothing == 0.0


async def solve(sandbox: Sandbox) -> None:
    """The task's own solution."""
    await sandbox.solve()


async def do_nothing(sandbox: Sandbox) -> None:
    """No command at all."""


async def attempt(task: FolderTask, act: Act, evidence: Path | None = None) -> float:
    """The verifier's reward after `act`. Raises InfrastructureError."""
    sandbox = replace(task, evidence=evidence).open()
    assert isinstance(sandbox, Sandbox)
    try:
        await sandbox.start()
        await act(sandbox)
        return await sandbox.grade()
    finally:
        await sandbox.stop()


async def check_tasks(
    tasks: Sequence[FolderTask], *, concurrency: int, on_checked: Callable[[Checked], None]
) -> list[Checked]:
    """Each task with its own solution and with nothing, `concurrency` at once. `on_checked` is told as they come."""
    gate = asyncio.Semaphore(concurrency)

    async def reward(task: FolderTask, act: Act) -> float | str:
        async with gate:
            try:
                return await attempt(task, act)
            except InfrastructureError as error:
                return f"{error.error_class}: {error}"

    async def one(task: FolderTask) -> Checked:
        checked = Checked(task.id, await reward(task, solve), await reward(task, do_nothing))
        on_checked(checked)
        return checked

    return list(await asyncio.gather(*(one(task) for task in tasks)))
