"""A process that starts a sandbox, says so, and waits in a command until it is killed: `python -m … KIND FOLDER`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from evaluation.settings import SandboxSettings
from evaluation.tasksets.task_folder import FolderTask, TaskFolder


async def main(kind: str, place: str) -> None:
    folder = TaskFolder(path=Path(place), name="tests/driver", instruction="", checksum="")
    sandbox = FolderTask(folder, SandboxSettings(kind=kind)).open()  # type: ignore[arg-type]
    await sandbox.start()
    print("running", flush=True)
    await sandbox.execute("sleep 600")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
