"""Trail tasks as Harbor task folders (schema 1.4): the same files, instruction and grade, run by a real shell.

The verifier script reads and writes below the folder named by TRAIL_ROOT, which is empty in a container.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from evaluation.tasksets.trail import Split, TrailSettings, TrailTask, trail_tasks

BASE_IMAGE = "debian:bookworm-slim"

WORKDIR = "/trail"
"""The agent's folder in the container"""

_RULES = (
    "Read the start file and follow the trail with cat: go on at the L-name, or at the R-name when the file says a "
    "flip word (two of them cancel out). At end, write the facts met on the way, in order, to the out file with echo."
)

_TASK_TOML = """\
schema_version = "1.4"

[task]
name = {name}
description = {description}
keywords = ["trail", "compaction"]

[metadata]
trail_length = {length}
facts = {facts}
max_turns = {max_turns}

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 60.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 256
storage_mb = 256
workdir = "{workdir}"
"""

_DOCKERFILE = """\
FROM {base_image}
ENV LC_ALL=C
WORKDIR {workdir}
COPY files/ {workdir}/
"""

_TEST = """\
#!/bin/sh
# The words of the out file must be the facts of the trail, in order.
root="${{TRAIL_ROOT:-}}"
out="$root{workdir}"/{out}
reward=0
unset IFS
set -f
if [ -f "$out" ]; then
    set -- $(cat "$out")
    if [ "$*" = {answer} ]; then reward=1; fi
fi
mkdir -p "$root/logs/verifier"
echo "$reward" > "$root/logs/verifier/reward.txt"
"""

_SOLVE = """\
#!/bin/sh
cd "${{TRAIL_ROOT:-}}{workdir}" || exit 1
{commands}
"""


def export_trail(
    folder: str | Path, world: TrailSettings, split: Split, n: int, seed: int = 0, base_image: str = BASE_IMAGE
) -> Path:
    """Writes the first n tasks of a split under a seed as a set of task folders in `folder`, which it returns.

    Raises FileExistsError where one of them exists already.
    """
    for task in trail_tasks(world, split, n, seed):
        export_harbor(task, folder, base_image)
    return Path(folder)


def export_harbor(task: TrailTask, folder: str | Path, base_image: str = BASE_IMAGE) -> Path:
    """Writes the task below `folder`, in a subfolder named by its id, and returns that subfolder. The image needs
    a shell and the core tools only; in the local sandbox the machine's own stand in for it.

    Raises FileExistsError where it exists already: a task folder is never mixed from two.
    """
    root = Path(folder) / task.id
    root.mkdir(parents=True)
    commands = [f"cat {name}" for name in task.path] + [f"echo {' '.join(task.answer)} > {task.out}"]
    texts = {
        "task.toml": _TASK_TOML.format(
            name=json.dumps(f"compactionrl/{task.id}"),
            description=json.dumps(_RULES),
            length=len(task.path),
            facts=len(task.answer),
            max_turns=task.max_turns,
            workdir=WORKDIR,
        ),
        "instruction.md": task.instruction,
        "environment/Dockerfile": _DOCKERFILE.format(base_image=base_image, workdir=WORKDIR),
        "tests/test.sh": _TEST.format(
            workdir=WORKDIR, out=shlex.quote(task.out), answer=shlex.quote(" ".join(task.answer))
        ),
        "solution/solve.sh": _SOLVE.format(workdir=WORKDIR, commands="\n".join(commands)),
        **{f"environment/files/{name}": content for name, content in task.files},
    }
    for path, text in texts.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="\n")
        if target.suffix == ".sh":
            target.chmod(0o755)
    return root
