"""Rollouts for people: a list of a run's, or one read from its first turn to its grade."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from compaction.rollout import CompactionRecord, Rollout, TurnRecord
from compaction.storage import read_rollouts
from flows.runs import find_run
from flows.services import Home
from tasks.caching import Manifest
from tasks.errors import UserError

FOLDED_LINES = 3
"""Lines of an observation that a folded turn shows"""


@dataclass(frozen=True)
class Found:
    """A rollout and where it comes from."""

    source: str
    rollout: Rollout


def show_run(home: Home, name: str, number: int | None, *, full: bool = False, console: Console | None = None) -> None:
    """List the rollouts of a run (or of a Parquet file), or show the one of that number. Raises UserError."""
    console = console or Console()
    found = [found for path, source in _files(home, name) for found in _read(path, source)]
    if not found:
        raise UserError(f"{name}: no rollouts kept; evaluation and training stages keep them once they are finished")
    if number is None:
        console.print(_listing(found))
        console.print(f"Read one: compactionrl show {name} --rollout 0", highlight=False)
        return
    if not 0 <= number < len(found):
        raise UserError(f"{name} has rollouts 0 to {len(found) - 1}; --rollout {number} is not among them")
    console.print(render_rollout(found[number].rollout, full=full))


def render_rollout(rollout: Rollout, *, full: bool = False) -> Group:
    """Turns in order, folded to a few lines unless `full`; at each compaction what went, the summary, what stayed."""
    parts: list[Text | Rule | Panel] = [_head(rollout)]
    records = list(rollout.compactions)
    for number, turn in enumerate(rollout.turns, start=1):
        while records and records[0].after_turn < number:
            parts.append(_compaction(records.pop(0)))
        parts.append(_turn(number, turn, full))
    parts += [_compaction(record) for record in records]
    parts += [Rule(style="dim"), _ending(rollout)]
    return Group(*parts)


def _files(home: Home, name: str) -> list[tuple[Path, str]]:
    """Parquet files with rollouts, with what each is."""
    path = Path(name).expanduser()
    if path.suffix == ".parquet":
        if not path.is_file():
            raise UserError(f"no file {path}")
        return [(path, path.name)]
    run = find_run(home, name)
    files = []
    for folder in run.stage_folders(home.stages):
        manifest = Manifest.read(folder)
        title = f"{manifest.stage} {manifest.label}".strip() if manifest else folder.name
        files += [(file, title) for file in sorted(folder.rglob("*rollouts*.parquet"))]
    return files


def _read(path: Path, source: str) -> list[Found]:
    try:
        return [Found(source, rollout) for rollout in read_rollouts(path)]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} holds no readable rollouts: {error}") from error


def _listing(found: list[Found]) -> Table:
    table = Table()
    for name in ("#", "stage", "task", "reward", "turns", "compactions", "summary tokens", "stopped"):
        table.add_column(name, overflow="fold")
    for number, item in enumerate(found):
        rollout = item.rollout
        table.add_row(
            str(number),
            escape(item.source),
            escape(rollout.task_id),
            _reward(rollout),
            str(len(rollout.turns)),
            str(rollout.n_compactions),
            ", ".join(map(str, rollout.summary_tokens)) or "–",
            rollout.outcome.stop_reason,
        )
    return table


def _head(rollout: Rollout) -> Text:
    compaction = rollout.settings.compaction
    return Text.assemble(
        (f"rollout {rollout.id}", "bold"),
        f"  task {rollout.task_id}  seed {rollout.seed}\n",
        (f"window {compaction.window:,} · cap {compaction.cap} · keep_recent {compaction.keep_recent}", "dim"),
        (f" · temperature {rollout.settings.temperature:g}", "dim"),
    )


def _turn(number: int, turn: TurnRecord, full: bool) -> Text:
    lines = turn.observation.splitlines()
    shown = lines if full else lines[:FOLDED_LINES]
    action = turn.action if full else _first_line(_done(turn))
    text = Text.assemble(
        (f"{number:>3} ", "dim"), ("› ", "cyan"), (action, "bold"), (f"   |h| = {turn.tokens:,}", "dim"), "\n"
    )
    text.append("\n".join(f"      {line}" for line in shown))
    if hidden := len(lines) - len(shown):
        text.append(f"\n      … {hidden} more {'line' if hidden == 1 else 'lines'}", "dim")
    return text


def _done(turn: TurnRecord) -> str:
    """What a turn did: the commands of its function calls, or their names; else the reply."""
    calls = ("; ".join(call.commands) or call.name or "(a call that could not be read)" for call in turn.calls)
    return " · ".join(calls) or turn.action


def _first_line(text: str) -> str:
    first, _, rest = text.partition("\n")
    return f"{first} …" if rest else first


def _compaction(record: CompactionRecord) -> Panel:
    before = f"{record.tokens_before:,}"
    if record.tokens_after is None:
        title, style = f"compaction failed at {before} tokens: {record.rejected}", "red"
    else:
        share = 1 - record.tokens_after / record.tokens_before
        title, style = f"compaction: {before} → {record.tokens_after:,} tokens (−{share:.0%})", "magenta"
    body = Text()
    body.append(f"dropped: {_turns(record.dropped)} folded into the summary\n", "dim")
    for attempt in record.discarded:
        body.append(f"rejected: {attempt}\n", "red dim")
    body.append(record.summary or "(empty)")
    if record.tokens_after is not None:
        kept = f"the last {_turns(record.kept)}, verbatim" if record.kept else "nothing else"
        body.append(f"\nkept: {kept}", "dim")
    return Panel(body, title=escape(title), title_align="left", border_style=style)


def _turns(n: int) -> str:
    return f"{n} {'turn' if n == 1 else 'turns'}"


def _ending(rollout: Rollout) -> Text:
    outcome = rollout.outcome
    text = Text.assemble(("reward ", "dim"), (_reward(rollout), "bold"), ("  stopped: ", "dim"), outcome.stop_reason)
    if outcome.error_class:
        text.append(f"  {outcome.error_class}: {outcome.detail or ''}", "red")
    elif outcome.detail:
        text.append(f"  {outcome.detail}", "dim")
    return text


def _reward(rollout: Rollout) -> str:
    return "none" if rollout.outcome.reward is None else f"{rollout.outcome.reward:g}"
