"""The model card beside a checkpoint's weights: for people what `compaction.json` is for programs, and the scores."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from compaction.files import write_durably
from compaction.pairing import CARD, PAIRING, Pairing, read_pairing
from evaluation.analysis.tables import format_interval, format_score
from evaluation.grid import Cell
from evaluation.results import CellResult

NOT_YET = "not evaluated yet"


@dataclass(frozen=True)
class Evaluated:
    """What a run measured of a checkpoint."""

    run: str
    variant: str
    dataset: str
    cells: Sequence[CellResult]
    most: int
    """Compactions of ×(most + 1): the preset's cap, which a variant trained without compaction is measured at too"""

    def at(self, pairing: Pairing, cap: int) -> CellResult | None:
        """The cell in which all but the cap is as the model was trained."""
        keep = pairing.keep_recent if cap else None
        own = Cell("", 0, pairing.window, cap, keep, pairing.temperature)
        wanted = (own.window, own.cap, own.keep_recent, own.temperature)
        found = (c for c in self.cells if (c.window, c.cap, c.keep_recent, c.temperature) == wanted)
        return next(found, None)


def write_card(checkpoint: Path, evaluated: Evaluated | None = None) -> Path | None:
    """Writes the card of the weights in `checkpoint`; None where no pairing says what they were trained for.

    A run that evaluated none of the card's settings, or found the same scores again, leaves a card that is there as it
    is. Raises OSError (disk full).
    """
    pairing = read_pairing(checkpoint)
    if pairing is None:
        return None
    card = checkpoint / CARD
    measured = evaluated and [evaluated.at(pairing, cap) for cap in _caps(evaluated.most)]
    text = card_text(pairing, evaluated)
    if card.is_file() and (not any(measured or ()) or _says(card.read_text(encoding="utf-8")) == _says(text)):
        return card
    return write_durably(card, text)


def _says(card: str) -> list[str]:
    """All but the run: one that finds the same scores again did not measure them."""
    return [line for line in card.splitlines() if not line.startswith("From run ")]


def _learned(pairing: Pairing) -> str:
    """What of its summaries the weights have learned, and how."""
    last = pairing.training[-1] if pairing.training else None
    if last is None or last.stage != "ppo":
        return "It has been fine-tuned on such work, not trained by reward."
    if pairing.cap == 0:
        return "It was trained by reward in a single window: it never learned from a summary of its own."
    if not last.settings.get("ppo", {}).get("train_summaries", True):
        return "Its actions were trained by reward, its summaries were not."
    return "Its summaries were trained with its actions, by the same reward."


def card_text(pairing: Pairing, evaluated: Evaluated | None = None) -> str:
    """The card as Markdown, with the front matter that the Hugging Face hub reads."""
    environment = Environment(
        loader=PackageLoader("tasks", "."), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["fenced"] = _fenced
    most = evaluated.most if evaluated else pairing.cap
    model = pairing.base_model
    is_folder = model is not None and Path(model).expanduser().is_dir()
    return environment.get_template("model_card.md.j2").render(
        title=f"{Path(model).name if model else 'A small model'}, trained to work in a small window",
        learned=_learned(pairing),
        hub_model=None if is_folder else model,
        pairing_file=PAIRING,
        pairing=pairing,
        most=most,
        scores=[_score(pairing, cap, evaluated) for cap in _caps(most)],
        run=evaluated and evaluated.run,
        variant=evaluated and evaluated.variant,
        flags=" \\\n    ".join(_flags(pairing, most)),
    )


def _caps(most: int) -> list[int]:
    return sorted({0, most})


def _score(pairing: Pairing, cap: int, evaluated: Evaluated | None) -> tuple[str, ...]:
    name = f"×{cap + 1}"
    if evaluated is None:
        return (name, NOT_YET, "–", "–", "–")
    cell = evaluated.at(pairing, cap)
    if cell is None:
        return (name, "not evaluated in this run", "–", "–", evaluated.dataset)
    text = f"{format_score(cell.pass_at_1)} {format_interval(cell.interval)}".strip()
    return (name, text, f"{cell.n_tasks:,}", str(cell.repeats), evaluated.dataset)


def _flags(pairing: Pairing, most: int) -> list[str]:
    """Options of `compactionrl sweep` that evaluate under the pairing, line by line."""
    lines: list[dict[str, object]] = [
        {"windows": pairing.window, "caps": ",".join(map(str, _caps(most))), "keep-recent": pairing.keep_recent},
        {"threshold": pairing.threshold, "max-response": pairing.max_response, "summary-cap": pairing.summary_cap},
        {"temperature": pairing.temperature, "prompt-pack": PAIRING},
    ]
    settings = {"scaffold": pairing.scaffold, "compaction.keep_task": str(pairing.keep_task).lower()}
    settings["compaction.min_response"] = str(pairing.min_response)
    words = [" ".join(f"--{name} {value}" for name, value in line.items()) for line in lines]
    return [*words, *(f"--set {shlex.quote(f'agent.{name}={value}')}" for name, value in settings.items())]


def _fenced(text: str) -> str:
    """A block of Markdown that holds `text` verbatim, whatever fences are in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
