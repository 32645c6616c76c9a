"""A trial's and a job's result.json with Harbor's fields. What only we know is under `compactionrl`."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.trial import TrialResult, total_cost

OWN = "compactionrl"
"""Key of our own part in Harbor's objects"""
_AGENT = "evaluation.harbor_agent:CompactionAgent"
_NAMESPACE = uuid.UUID("6f1bd4b2-5d0c-4c52-9e08-6f4f8a3d7a11")


def trial_json(
    result: TrialResult,
    *,
    trial_folder: Path,
    task_path: Path | None,
    checksum: str,
    attempt: int,
    detail: str | None,
    started: datetime,
    finished: datetime,
) -> dict[str, Any]:
    """Harbor's TrialResult. `task_path`: the task's folder, where it has one; `detail`: what the error said."""
    name, where = trial_folder.name, str(task_path) if task_path else result.key.task
    failed = result.error_class is not None
    return {
        "id": str(uuid.uuid5(_NAMESPACE, f"{trial_folder}#{attempt}")),
        "task_name": result.key.task,
        "trial_name": name,
        "trial_uri": trial_folder.resolve().as_uri(),
        "task_id": {"path": where},
        "source": result.key.dataset,
        "task_checksum": checksum,
        "config": {
            "task": {"path": where},
            "trial_name": name,
            "trials_dir": str(trial_folder.parent),
            "agent": {"import_path": _AGENT, "model_name": result.key.variant},  # else Harbor takes it for its oracle
        },
        "agent_info": {"name": OWN, "version": "0.1.0", "model_info": {"name": result.key.variant, "provider": None}},
        "agent_result": {
            "n_input_tokens": result.prompt_tokens,
            "n_cache_tokens": result.cached_tokens,
            "n_output_tokens": result.generated_tokens,
            "cost_usd": result.cost,
            "metadata": {"stop_reason": result.stop_reason, "compactions": result.compactions},
        },
        "verifier_result": None if failed else {"rewards": {"reward": result.reward}},
        "exception_info": _exception(result.error_class, detail, finished) if failed else None,
        "started_at": started.isoformat(),
        "finished_at": finished.isoformat(),
        OWN: {"attempt": attempt, "detail": detail, "trial": result.model_dump(mode="json")},
    }


def job_json(name: str, results: Sequence[TrialResult], n_total: int, *, started: datetime) -> dict[str, Any]:
    """Harbor's JobResult: counts, and per agent and dataset mean, rewards and errors with the trials' names."""
    evals: dict[str, list[TrialResult]] = defaultdict(list)
    for result in results:
        evals[f"{OWN}__{result.key.variant}__{result.key.dataset}"].append(result)
    now = datetime.now(UTC).isoformat()
    return {
        "id": str(uuid.uuid5(_NAMESPACE, name)),
        "started_at": started.isoformat(),
        "updated_at": now,
        "finished_at": now,
        "n_total_trials": n_total,
        "stats": {
            "n_completed_trials": len(results),
            "n_errored_trials": sum(r.reward is None for r in results),
            "n_running_trials": 0,
            "n_pending_trials": n_total - len(results),
            "n_cancelled_trials": 0,
            "n_retries": 0,
            "evals": {key: _stats(found) for key, found in evals.items()},
            "n_input_tokens": sum(r.prompt_tokens for r in results),
            "n_cache_tokens": sum(r.cached_tokens for r in results),
            "n_output_tokens": sum(r.generated_tokens for r in results),
            "cost_usd": total_cost(results),
        },
    }


def own_part(document: Mapping[str, Any]) -> TrialResult:
    """Our TrialResult out of a result.json. Raises ValueError (pydantic's) or KeyError for another kind of file."""
    return TrialResult.model_validate(document[OWN]["trial"])


def reward_in(document: Mapping[str, Any]) -> float | None:
    """The reward in a trial's result.json, ours or Harbor's; None where the verifier gave none, or several."""
    rewards = (document.get("verifier_result") or {}).get("rewards") or {}
    reward = rewards.get("reward") if "reward" in rewards or len(rewards) != 1 else next(iter(rewards.values()))
    return None if reward is None else float(reward)


def _stats(results: Sequence[TrialResult]) -> dict[str, Any]:
    rewards: dict[str, list[str]] = defaultdict(list)
    errors: dict[str, list[str]] = defaultdict(list)
    for result in results:
        name = f"{result.key.task}__{result.key.repeat}"
        if result.reward is None:
            errors[str(result.error_class)].append(name)
        else:
            rewards[str(result.reward)].append(name)
    scored = [r.reward for r in results if r.reward is not None]
    return {
        "n_trials": len(scored),  # as Harbor: those with a reward
        "n_errors": len(results) - len(scored),
        "metrics": [{"mean": float(np.mean(scored))}] if scored else [],
        "pass_at_k": _pass_at_k(results),
        "reward_stats": {"reward": dict(rewards)},
        "exception_stats": dict(errors),
    }


def _pass_at_k(results: Sequence[TrialResult]) -> dict[str, float]:
    """pass@k for every k up to the fewest scored attempts of a task: 1 − C(n−c, k) / C(n, k), mean over tasks."""
    from scipy.special import comb

    n = Counter(r.key.task for r in results if r.reward is not None)
    passed = Counter(r.key.task for r in results if r.reward is not None and r.reward >= 1)
    most = min(n.values(), default=0)
    return {
        str(k): float(np.mean([1 - comb(n[t] - passed[t], k) / comb(n[t], k) for t in n])) for k in range(2, most + 1)
    }


def _exception(error_class: str | None, detail: str | None, when: datetime) -> dict[str, Any]:
    return {
        "exception_type": error_class,
        "exception_message": detail or "",
        "exception_traceback": "",
        "occurred_at": when.isoformat(),
    }
