"""What must hold of events.jsonl, whatever was killed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_events(events: Sequence[dict[str, Any]], *, steps: int, batch_size: int) -> dict[str, int]:
    """Asserts that no rollout was trained twice and none was lost; returns counts of what happened.

    `resumed` makes void what was trained from its step on: the trainer's state of before came back.
    """
    trained: dict[int, list[str]] = {}
    started: set[str] = set()
    quarantined: set[str] = set()
    queued: dict[int, set[str]] = {}
    for event in events:
        match event["event"]:
            case "resumed":
                trained = {step: ids for step, ids in trained.items() if step < event["step"]}
            case "trained":
                assert event["step"] not in trained, f"step {event['step']} twice"
                trained[event["step"]] = event["rollouts"]
            case "started":
                started.add(event["rollout"])
            case "failed" if not event["again"]:
                quarantined.add(event["rollout"])
            case "checkpoint":
                queued[event["step"]] = set(event["queued"])
    assert sorted(trained) == list(range(steps))
    assert {len(ids) for ids in trained.values()} == {batch_size}
    every = [rollout for ids in trained.values() for rollout in ids]
    assert len(every) == len(set(every)), "a rollout was trained twice"
    if started:
        assert started - quarantined == set(every), "a started rollout was not trained, or another was"
    for step, ids in queued.items():
        later = {rollout for at, trained_ids in trained.items() if at >= step for rollout in trained_ids}
        assert ids <= later, f"finished rollouts of the checkpoint before step {step} were lost"
    names = [event["event"] for event in events]
    return {name: names.count(name) for name in dict.fromkeys(names)}
