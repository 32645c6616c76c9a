"""Rollouts for people: a list of a run's, or one read from its first turn to its grade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean

from rich import box
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
    """A rollout, its number in the run and where it comes from."""

    number: int
    source: str
    rollout: Rollout


def show_run(
    home: Home,
    name: str,
    number: int | None,
    *,
    stage: str | None = None,
    full: bool = False,
    console: Console | None = None,
) -> None:
    """List the rollouts of a run (or of a Parquet file), or show the one of that number.

    With `stage` the list is of the stages whose title has that text; numbers stay those of the whole run. Raises
    UserError.
    """
    if number is not None and stage is not None:
        raise UserError("--stage chooses what is listed, --rollout reads one of any stage: leave one of them out")
    console = console or Console()
    read = [(source, rollout) for path, source in _files(home, name) for rollout in _read(path)]
    if not read:
        raise UserError(f"{name}: no rollouts kept; evaluation and training stages keep them once they are finished")
    found = [Found(number, source, rollout) for number, (source, rollout) in enumerate(read)]
    if number is None:
        listed = _of_stage(found, name, stage)
        for source, of_source in groupby(listed, key=lambda one: one.source):
            console.print(_listing(source, list(of_source)))
        console.print(f"Read one: compactionrl show {name} --rollout {listed[0].number}", highlight=False)
        return
    if not 0 <= number < len(found):
        raise UserError(f"{name} has rollouts 0 to {len(found) - 1}; --rollout {number} is not among them")
    console.print(Text(found[number].source, "bold"))
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


def _read(path: Path) -> list[Rollout]:
    try:
        return list(read_rollouts(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} holds no readable rollouts: {error}") from error


def _of_stage(found: list[Found], name: str, stage: str | None) -> list[Found]:
    listed = [one for one in found if stage is None or stage in one.source]
    if not listed:
        stages = "".join(f"\n  {source}" for source in dict.fromkeys(one.source for one in found))
        raise UserError(f"{name}: no stage with rollouts has {stage!r} in its title; there are:{stages}")
    return listed


def _listing(source: str, found: Sequence[Found]) -> Table:
    rewards = [one.rollout.outcome.reward for one in found]
    scored = [reward for reward in rewards if reward is not None]
    mean = f"mean reward {fmean(scored):.3f}" if scored else "no reward"
    title = Text.assemble((source, "bold"), (f"\n{_counted(len(found), 'rollout')}, {mean}", "dim"))
    table = Table(
        title=title, title_style="", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in ("#", "task", "reward", "turns", "compactions", "summary\ntokens", "stopped"):
        table.add_column(name, overflow="fold", no_wrap=name not in ("task", "summary\ntokens"))
    for one in found:
        rollout = one.rollout
        table.add_row(
            str(one.number),
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
        text.append(f"\n      … {_counted(hidden, 'more line')}", "dim")
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
    body.append(f"dropped: {_counted(record.dropped, 'turn')} folded into the summary\n", "dim")
    for attempt in record.discarded:
        body.append(f"rejected: {attempt}\n", "red dim")
    body.append(record.summary or "(empty)")
    if record.tokens_after is not None:
        kept = f"the last {_counted(record.kept, 'turn')}, verbatim" if record.kept else "nothing else"
        body.append(f"\nkept: {kept}", "dim")
    return Panel(body, title=escape(title), title_align="left", border_style=style)


def _counted(n: int, what: str) -> str:
    return f"{n} {what if n == 1 else f'{what}s'}"


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
