"""How a reply becomes an action, and what the action did an observation."""

from __future__ import annotations

from compaction.scaffolds.scaffold import Action, Call, Scaffold
from compaction.scaffolds.text import BashBlock, ShellLine
from compaction.scaffolds.tools import NativeTools

__all__ = ["SCAFFOLDS", "Action", "Call", "Scaffold", "load_scaffold"]

SCAFFOLDS: dict[str, type[Scaffold]] = {"bash-block": BashBlock, "shell-line": ShellLine, "tools": NativeTools}


def load_scaffold(name: str) -> Scaffold:
    """The scaffold of that name, for one rollout. Raises ValueError naming the known ones."""
    if name not in SCAFFOLDS:
        raise ValueError(f"scaffold {name!r} is unknown; choose one of: {', '.join(sorted(SCAFFOLDS))}")
    return SCAFFOLDS[name]()
