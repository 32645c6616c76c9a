"""The failure policy is one table, and what the code raises is in it."""

from __future__ import annotations

from typing import get_args

import pytest

from compaction import protocols
from compaction.rollout import StopReason
from evaluation.failures import FAILURE_POLICY, failure_policy


@pytest.mark.parametrize(
    "error", [e for e in vars(protocols).values() if isinstance(e, type) and hasattr(e, "error_class")]
)
def test_every_infrastructure_error_is_listed_and_never_scored(error):
    assert not FAILURE_POLICY[error.error_class].counts


@pytest.mark.parametrize("reason", sorted(set(get_args(StopReason)) - {"finished", "error"}))
def test_every_way_an_agent_can_stop_is_graded_and_counts(reason):
    policy = FAILURE_POLICY[reason]
    assert (policy.retry, policy.grade, policy.counts) == (False, True, True)


@pytest.mark.parametrize(
    ("error_class", "retry", "grade", "counts"),
    [
        ("environment_start", True, False, False),
        ("sandbox_oom", True, False, False),
        ("rate_limit", True, True, False),
        ("reward_missing", False, True, False),
        ("budget_exceeded", False, True, False),
        ("authentication", False, False, False),
        ("cancelled", False, False, False),
        ("deadline", False, True, True),
        ("agent_exit", False, True, True),
        ("never heard of", False, False, False),
    ],
)
def test_policy(error_class, retry, grade, counts):
    policy = failure_policy(error_class)
    assert (policy.retry, policy.grade, policy.counts) == (retry, grade, counts)


def test_what_counts_is_graded_and_not_repeated():
    assert all(p.grade and not p.retry for p in FAILURE_POLICY.values() if p.counts)
