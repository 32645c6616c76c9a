"""Why a stage has to run, by comparison with what was run before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compaction.differences import changed_settings

SHOWN = 3
"""Changed settings that are spelled out; the rest is counted"""

Key = tuple[dict[str, Any], dict[str, str], str]
"""Settings, parents' digests, code digest"""


def explain_difference(settings: dict[str, Any], parents: dict[str, str], code: str, earlier: Sequence[Key]) -> str:
    """Compare with the nearest of `earlier` (oldest first): the fewest differences, of these the newest."""
    if not earlier:
        return "never run"
    candidates = [_differences(settings, parents, code, key) for key in reversed(earlier)]
    _, nearest = min(candidates, key=lambda candidate: candidate[0])
    return nearest or "its folder is gone"


def _differences(settings: dict[str, Any], parents: dict[str, str], code: str, key: Key) -> tuple[int, str]:
    """(how many things differ, in words)"""
    old_settings, old_parents, old_code = key
    changed = changed_settings(old_settings, settings)
    roles = sorted(r for r in parents.keys() | old_parents.keys() if parents.get(r) != old_parents.get(r))
    reasons = []
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        reasons.append(f"settings changed: {', '.join(changed[:SHOWN])}{more}")
    if roles:
        reasons.append(f"its input changed: {', '.join(roles)}")
    if code != old_code:
        reasons.append("code changed")
    return len(changed) + len(roles) + (code != old_code), "; ".join(reasons)
