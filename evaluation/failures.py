"""What a failure means for a trial: try again? grade what is there? does the reward count?

One table, after Harbor's (research page "Harbor, Terminus-KIRA, Terminal-Bench 2.0, SWE-bench", "Failure policy").
What the agent does wrong counts; what the machinery does wrong gives no reward, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FailurePolicy:
    """How a trial with this kind of failure is treated."""

    group: str
    retry: bool
    """The trial is attempted again from the start (bounded by the job)."""
    grade: bool
    """The verifier still runs, as evidence or for the reward."""
    counts: bool
    """The reward enters the score. If False the trial is unscored: reward None and the error class."""
    ends_job: bool = False
    """Every other trial would fail alike: the job starts no more"""


_SANDBOX = FailurePolicy("sandbox", retry=True, grade=False, counts=False)
_ENGINE = FailurePolicy("engine", retry=True, grade=True, counts=False)
_VERIFIER = FailurePolicy("verifier", retry=False, grade=True, counts=False)
_REQUEST = FailurePolicy("request", retry=False, grade=True, counts=False)
_BUDGET = FailurePolicy("budget", retry=False, grade=True, counts=False, ends_job=True)
_FINAL = FailurePolicy("final", retry=False, grade=False, counts=False, ends_job=True)
_CANCELLED = FailurePolicy("cancelled", retry=False, grade=False, counts=False)
_AGENT = FailurePolicy("agent", retry=False, grade=True, counts=True)

FAILURE_POLICY: dict[str, FailurePolicy] = {
    "environment": _SANDBOX,
    "environment_start": _SANDBOX,
    "environment_build": _SANDBOX,
    "agent_setup_timeout": _SANDBOX,
    "health_check": _SANDBOX,
    "sandbox_oom": _SANDBOX,
    "infrastructure": _SANDBOX,
    "engine": _ENGINE,
    "rate_limit": _ENGINE,
    "server_error": _ENGINE,
    "connection": _ENGINE,
    "engine_timeout": _ENGINE,
    "verifier": _VERIFIER,
    "verifier_timeout": _VERIFIER,
    "verifier_bootstrap": _VERIFIER,
    "reward_missing": _VERIFIER,
    "reward_empty": _VERIFIER,
    "reward_invalid": _VERIFIER,
    "bad_request": _REQUEST,
    "budget_exceeded": _BUDGET,
    "authentication": _FINAL,
    "model_not_found": _FINAL,
    "cancelled": _CANCELLED,
    "deadline": _AGENT,
    "max_turns": _AGENT,
    "context_full": _AGENT,
    "compaction_grew": _AGENT,
    "summary_failed": _AGENT,
    "output_length": _AGENT,
    "refusal": _AGENT,
    "agent_exit": _AGENT,
}
"""Error class, or stop reason of the agent's own doing, to its policy."""

UNKNOWN_FAILURE = FailurePolicy("unknown", retry=False, grade=False, counts=False)


def failure_policy(error_class: str) -> FailurePolicy:
    """Policy of an error class. One that the table does not list leaves the trial unscored and is not repeated:
    neither a score nor compute is spent on what nobody has understood yet."""
    return FAILURE_POLICY.get(error_class, UNKNOWN_FAILURE)
