"""The trail world: follow small files, carry their facts, write them down.

A task is a folder of small files. Its instruction names a start file and an output file. Each file of the trail shows
two pointers, an L-name and an R-name: the way goes on at the L-name, or at the R-name when the file says `flip`. Some
files hold one fact (`k3`). At `end` the facts are written to the output file in the order in which they were met.
A wrong pointer leads to a decoy: the same file with a wrong fact, so a mistake goes unnoticed and costs the task.

Every word of a file stands behind a space, the first one too, so that a byte-level BPE that splits before spaces
makes each name and each fact one token wherever it occurs.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import Field, model_validator

from compaction.protocols import TaskLimits
from compaction.settings import Settings
from evaluation.environments.trail import TrailEnvironment

Split = Literal["train", "validation", "test"]

END = "end"
"""Stands where the pointers would be in the last file"""
FLIP_WORDS = ("flip", "turn", "swap", "veer")
LURE_WORDS = ("flop", "tarn", "swab", "beer")
"""Look like the flip words and mean nothing"""
NOISE_WORDS = (
    *("ash", "bay", "cup", "dew", "elm", "fig", "gem", "hut"),
    *("ink", "jar", "oak", "pod", "rug", "tin", "urn", "wax"),
)
OUT_NAMES = ("done", "log", "sum", "key", "set", "map", "tab", "bag")
PART_LETTERS = "abcdefghijklmnop"

_SPLIT_SHARE: dict[str, range] = {"train": range(8), "validation": range(8, 12), "test": range(12, 16)}


class TrailSettings(Settings):
    """Every number of the world. Defaults: world W1."""

    min_length: int = Field(7, ge=1, description="fewest files on a trail")
    max_length: int = Field(22, ge=1, description="most files on a trail")
    pointer_names: int = Field(32, ge=1, le=100, description="names to draw from on each side: L0, L1, … and R0, R1, …")
    parts: int = Field(16, ge=1, le=len(PART_LETTERS), description="letters of a fact; a task uses each at most once")
    values: int = Field(8, ge=2, le=10, description="digits of a fact")
    fact_rate: float = Field(0.4, gt=0, le=1, description="chance that a file holds a fact")
    min_facts: int = Field(1, ge=0, description="fewest facts of a task")
    max_facts: int = Field(13, ge=1, description="most facts of a task")
    noise_min: int = Field(0, ge=0, description="fewest words without meaning in a file")
    noise_max: int = Field(3, ge=0, description="most words without meaning in a file")
    noise_words: int = Field(len(NOISE_WORDS), ge=1, le=len(NOISE_WORDS), description="different words without meaning")
    out_names: int = Field(len(OUT_NAMES), ge=1, le=len(OUT_NAMES), description="different names of the output file")
    flip_rate: float = Field(0.18, ge=0, le=1, description="chance that a file that may flip says one flip word")
    flip_only_before_facts: bool = Field(
        True, description="only a file whose successor holds a fact may flip; false: every file may"
    )
    flip_words: int = Field(1, ge=1, le=len(FLIP_WORDS), description="different words that mean flip")
    double_flip_rate: float = Field(
        0.0, ge=0, le=1, description="chance that a file that may flip says two flip words, which cancel out"
    )
    lure_rate: float = Field(0.0, ge=0, le=1, description="chance of a word that looks like a flip word and is none")
    decoy_fact_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="chance that the decoy of a file without a fact holds one, so that a slip there counts",
    )
    max_turns: int = Field(28, ge=1, description="turn limit of a task")

    @model_validator(mode="after")
    def _fits(self) -> TrailSettings:
        for low, high in (("min_length", "max_length"), ("min_facts", "max_facts"), ("noise_min", "noise_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} is larger than {high}={getattr(self, high)}")
        if self.pointer_names < self.max_length:
            raise ValueError(
                f"pointer_names={self.pointer_names} cannot name {self.max_length} files; "
                f"raise it to at least max_length or lower max_length"
            )
        if self.max_facts > self.parts:
            raise ValueError(f"max_facts={self.max_facts} needs as many parts, there are {self.parts}; lower max_facts")
        if self.min_facts > self.min_length:
            raise ValueError(f"min_facts={self.min_facts} does not fit on {self.min_length} files; lower min_facts")
        if self.flip_rate + self.double_flip_rate > 1:
            raise ValueError(
                f"flip_rate={self.flip_rate} and double_flip_rate={self.double_flip_rate} exceed 1 together; lower one"
            )
        return self

    @cached_property
    def left_names(self) -> tuple[str, ...]:
        return tuple(f"L{i}" for i in range(self.pointer_names))

    @cached_property
    def right_names(self) -> tuple[str, ...]:
        return tuple(f"R{i}" for i in range(self.pointer_names))

    @cached_property
    def facts(self) -> tuple[str, ...]:
        return tuple(f"{part}{value}" for part in PART_LETTERS[: self.parts] for value in range(self.values))


@dataclass(frozen=True)
class TrailTask:
    """One trail. Implements `compaction.protocols.Task`; hashable and picklable."""

    id: str
    start: str
    out: str
    files: tuple[tuple[str, str], ...]
    """(name, content), sorted by name; decoys included"""
    answer: tuple[str, ...]
    """The facts in order: the words that the output file must hold"""
    path: tuple[str, ...]
    """The right files in order"""
    max_turns: int

    @property
    def instruction(self) -> str:
        return f"start {self.start} out {self.out}"

    @property
    def limits(self) -> TaskLimits:
        return TaskLimits(max_turns=self.max_turns)

    def open(self) -> TrailEnvironment:
        return TrailEnvironment(dict(self.files), self.out, self.answer)


def trail_tasks(settings: TrailSettings, split: Split, n: int, seed: int) -> list[TrailTask]:
    """The first n tasks of a split under a seed.

    A digest of a task's files decides which split it belongs to (half train, a quarter each validation and test), so
    no two splits share a set of files, whatever the seeds. The first n tasks are the same for every larger n.
    """
    if split not in _SPLIT_SHARE:
        raise ValueError(f"unknown split {split!r}; allowed: {', '.join(_SPLIT_SHARE)}")
    tasks: list[TrailTask] = []
    draw = 0
    while len(tasks) < n:
        task = _draw(settings, f"trail-{split}-{seed}-{len(tasks)}", random.Random(f"trail/{split}/{seed}/{draw}"))
        draw += 1
        if split_of(task) == split:
            tasks.append(task)
    return tasks


def split_of(task: TrailTask) -> str:
    """The only split that may hold this task's files."""
    digest = hashlib.blake2b(repr(task.files).encode(), digest_size=2).digest()
    return next(split for split, share in _SPLIT_SHARE.items() if digest[0] % 16 in share)


def _draw(settings: TrailSettings, task_id: str, rng: random.Random) -> TrailTask:
    length = rng.randint(settings.min_length, settings.max_length)
    facts = _draw_facts(settings, length, rng)
    flips = [_draw_flips(settings, ahead is not None, rng) for ahead in facts[1:]] + [[]]
    lefts = rng.sample(settings.left_names, length)
    rights = rng.sample(settings.right_names, length)
    unused_parts = [p for p in PART_LETTERS[: settings.parts] if p not in {f[0] for f in facts if f}]

    files: dict[str, str] = {}
    path: list[str] = []
    for i in range(length):
        pointers = [END] if i + 1 == length else [lefts[i + 1], rights[i + 1]]
        extras: list[str | None] = [*flips[i], *_draw_noise(settings, rng), None]  # None: where a fact goes
        rng.shuffle(extras)  # one order for file and decoy: nothing but the fact tells them apart
        right_turn = i > 0 and len(flips[i - 1]) % 2 == 1
        name, decoy = (rights[i], lefts[i]) if right_turn else (lefts[i], rights[i])
        path.append(name)
        files[name] = _content(pointers, extras, facts[i])
        if i > 0:  # the start has no twin: the instruction names it
            files[decoy] = _content(pointers, extras, _decoy_fact(settings, facts[i], unused_parts, rng))
    return TrailTask(
        id=task_id,
        start=path[0],
        out=rng.choice(OUT_NAMES[: settings.out_names]),
        files=tuple(sorted(files.items())),
        answer=tuple(f for f in facts if f is not None),
        path=tuple(path),
        max_turns=settings.max_turns,
    )


def _draw_facts(settings: TrailSettings, length: int, rng: random.Random) -> list[str | None]:
    places = [i for i in range(length) if rng.random() < settings.fact_rate]
    if len(places) > settings.max_facts:
        places = sorted(rng.sample(places, settings.max_facts))
    if len(places) < settings.min_facts:
        rest = [i for i in range(length) if i not in places]
        places = sorted(places + rng.sample(rest, settings.min_facts - len(places)))
    facts: list[str | None] = [None] * length
    for i, part in zip(places, PART_LETTERS, strict=False):  # in alphabetical order: what comes next is never in doubt
        facts[i] = f"{part}{rng.randrange(settings.values)}"
    return facts


def _draw_flips(settings: TrailSettings, fact_ahead: bool, rng: random.Random) -> list[str]:
    if settings.flip_only_before_facts and not fact_ahead:
        return []
    u = rng.random()
    n = 1 if u < settings.flip_rate else 2 if u < settings.flip_rate + settings.double_flip_rate else 0
    return [rng.choice(FLIP_WORDS[: settings.flip_words]) for _ in range(n)]


def _draw_noise(settings: TrailSettings, rng: random.Random) -> list[str]:
    n = rng.randint(settings.noise_min, settings.noise_max)
    noise = [rng.choice(NOISE_WORDS[: settings.noise_words]) for _ in range(n)]
    if rng.random() < settings.lure_rate:
        noise.append(rng.choice(LURE_WORDS[: settings.flip_words]))
    return noise


def _decoy_fact(settings: TrailSettings, fact: str | None, unused_parts: list[str], rng: random.Random) -> str | None:
    if fact is not None:
        others = [v for v in range(settings.values) if v != int(fact[1:])]
        return f"{fact[0]}{rng.choice(others)}"
    if unused_parts and rng.random() < settings.decoy_fact_rate:
        return f"{rng.choice(unused_parts)}{rng.randrange(settings.values)}"
    return None


def _content(pointers: list[str], extras: list[str | None], fact: str | None) -> str:
    words = [fact if word is None else word for word in extras]
    return "".join(f" {word}" for word in [*pointers, *words] if word is not None)
