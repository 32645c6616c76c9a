"""What flows say of models' pairings: warnings before a run, cards after it."""

from __future__ import annotations

from collections.abc import Sequence

from compaction.pairing import pairing_differences, read_pairing
from evaluation.results import CellResult
from flows.plan import Plan
from rl.pretrained import local_model
from tasks.caching import StageStore
from tasks.errors import UserError
from tasks.model_card import Evaluated, write_card


def pairing_warnings(plan: Plan) -> list[str]:
    """Where the plan leaves the pairing of the model that it starts from; none where that model says nothing.

    Raises UserError for a damaged `compaction.json`.
    """
    experiment = plan.experiment
    model = experiment.sft.model if experiment.engine != "openai" and experiment.sft else None
    folder = local_model(model) if model else None
    if folder is None:
        return []
    try:
        trained = read_pairing(folder)
    except ValueError as error:
        raise UserError(f"--model: {error}") from error
    if trained is None:
        return []
    cells = [cell for variant, seed in plan.policies for cell in plan.cells(variant, seed)]
    keeps = [cell.keep_recent for cell in cells if cell.keep_recent is not None]
    evaluated = {
        "window": sorted({cell.window for cell in cells}),
        "cap": sorted({cell.cap for cell in cells}),
        "keep_recent": sorted(set(keeps)) or [experiment.agent.compaction.keep_recent],
    }
    return [f"{folder.name}: {line}" for line in pairing_differences(trained, experiment.agent, evaluated)]


def write_cards(plan: Plan, store: StageStore, results: Sequence[CellResult], run: str) -> None:
    """Writes the card of each checkpoint of the plan again, with what this run measured of it."""
    if plan.experiment.engine == "openai":
        return
    for variant, seed in plan.policies:
        cells = [cell for cell in results if (cell.variant, cell.seed) == (variant, seed)]
        checkpoint = store.folder(plan.policy(variant, seed)) / "checkpoint"  # type: ignore[arg-type]
        if cells and checkpoint.is_dir():
            write_card(
                checkpoint, Evaluated(run, variant, plan.dataset_name, cells, plan.experiment.agent.compaction.cap)
            )
