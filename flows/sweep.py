"""The flow `sweep`: every combination of window, cap and keep_recent, on the variants' checkpoints."""

from __future__ import annotations

from typing import Any

from flows.experiment import Experiment
from flows.options import RunOptions
from flows.plan import Plan
from flows.reproduce import describe


def run_sweep(experiment: Experiment, options: RunOptions) -> dict[str, Any]:
    """Runs (or plans) the full product; checkpoints that a reproduction made are reused."""
    if options.dry_run:
        return describe(Plan(experiment, full_product=True), options)
    from flows.deployments import run_as_command, sweep

    return run_as_command(sweep, experiment, options)
