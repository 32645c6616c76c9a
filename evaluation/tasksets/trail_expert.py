"""A scripted policy for the trail world: the source of the trajectories that SFT learns from.

It knows the rules, not the solution: every action and every summary is worked out from the messages of its prompt, so
what it lost in a bad summary stays lost and what it writes is always something a policy could have known. Its
mistakes (flips overlooked, facts dropped from summaries) are the base model's quality, and what RL has to repair.

A summary is `out NAME at POINTER has FACT …`: the output file, the file to read next (or `end`, or `exit` once the
facts are written), all facts known so far. It covers everything up to the moment it is written, the turns that stay
verbatim included. The policy cannot know how many turns will be kept, and so a summary that repeats their facts is
right for every number of kept turns; in return the reader counts a fact once and takes the order of its latest mention.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from pydantic import Field, model_validator

from compaction.protocols import Completion, EngineError, FinishReason, GenerateRequest, Renderer
from compaction.settings import Settings
from compaction.summaries import load_prompt_pack
from evaluation.tasksets.trail import END, FLIP_WORDS, LURE_WORDS, NOISE_WORDS, TrailSettings, trail_tasks

DONE = "exit"
"""Stands in a summary where the pointer would be once the output file is written"""


class ExpertSettings(Settings):
    """How good the script is. The shares of a summary mix sum to at most 1; the rest is complete."""

    seed: int = Field(0, description="with the rollout's id, decides every draw")
    follow_flip: float = Field(0.45, ge=0, le=1, description="chance to go R where the file says so")
    stray_right: float = Field(0.02, ge=0, le=1, description="chance to go R where the file does not say so")
    premature_finish: float = Field(0.01, ge=0, le=1, description="chance per step to write the facts before the end")
    last_facts: int = Field(2, ge=0, description="how many facts a summary of the kind `last` keeps")
    drop_rate: float = Field(
        0.3, ge=0, le=1, description="chance of each fact to be missing in a summary of the kind `drop`"
    )
    first_last: float = Field(0.12, ge=0, le=1, description="share of first summaries that keep only the last facts")
    first_drop: float = Field(0.10, ge=0, le=1, description="share of first summaries that lose facts at random")
    first_none: float = Field(0.03, ge=0, le=1, description="share of first summaries without any fact")
    later_last: float = Field(0.55, ge=0, le=1, description="share of later summaries that keep only the last facts")
    later_drop: float = Field(0.09, ge=0, le=1, description="share of later summaries that lose facts at random")
    later_none: float = Field(0.03, ge=0, le=1, description="share of later summaries without any fact")

    @model_validator(mode="after")
    def _shares_fit(self) -> ExpertSettings:
        for which in ("first", "later"):
            total = sum(getattr(self, f"{which}_{kind}") for kind in ("last", "drop", "none"))
            if total > 1 + 1e-9:
                raise ValueError(f"the shares {which}_last, {which}_drop and {which}_none sum to {total:g}; at most 1")
        return self


@dataclass
class Known:
    """What a prompt says."""

    out: str = ""
    pointer: str = ""
    """The next file, END or DONE, as the last message that names one says"""
    facts: list[str] = field(default_factory=list)
    finishing: bool = False
    """The output file has been written"""
    resumed: bool = False
    """A summary stands in place of the task message"""


class TrailExpert:
    """Implements `compaction.protocols.Engine` by rule. Deterministic per (settings.seed, rollout id)."""

    def __init__(self, world: TrailSettings, renderer: Renderer, settings: ExpertSettings) -> None:
        self._vocabulary = _Vocabulary(world)
        self._renderer = renderer
        self._settings = settings
        self._end = renderer.end_ids[0]

    async def generate(self, request: GenerateRequest) -> Completion:
        if not request.messages:
            raise EngineError("the trail expert reads messages, and the request has none")
        ids = [*self._renderer.encode(self.reply(request)), self._end]
        finish_reason: FinishReason = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        n = len(ids)
        return Completion(
            token_ids=np.asarray(ids, dtype=np.int32),
            logprobs=np.zeros(n, dtype=np.float32),
            versions=np.zeros(n, dtype=np.int32),
            finish_reason=finish_reason,
            prompt_tokens=len(request.prompt_ids),
        )

    async def release(self, rollout_id: str) -> None:
        return None

    def reply(self, request: GenerateRequest) -> str:
        """The text of the next action or summary."""
        messages = [m for m in request.messages if m["role"] != "system"]
        draw = f"{self._settings.seed}/{request.rollout_id}"
        if request.kind == "summary":
            return self._summary(self._read(messages[:-1], draw), draw)
        known = self._read(messages, draw)
        if known.finishing or known.pointer == DONE:
            return "exit"
        n_actions = sum(m["role"] == "assistant" for m in messages)
        step = random.Random(f"{draw}/step/{known.pointer}/{n_actions}")
        if known.pointer == END or step.random() < self._settings.premature_finish:
            return " ".join(["echo", *known.facts, ">", known.out])
        return f"cat {known.pointer}"

    def _read(self, messages: list[dict[str, str]], draw: str) -> Known:
        known = Known()
        said: list[str] = []
        seen: list[str] = []
        n_headers = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        for message in messages[:n_headers]:
            self._read_header(message["content"].split(), known, said)
        for action, observation in zip(messages[n_headers::2], messages[n_headers + 1 :: 2], strict=True):
            self._read_turn(action["content"].split(), observation["content"].split(), known, seen, draw)
        known.facts = _latest(said + seen)
        return known

    def _read_header(self, words: list[str], known: Known, said: list[str]) -> None:
        """The task message `start NAME out NAME`, or a summary."""
        if words[:1] == ["start"] and len(words) == 4:
            known.pointer, known.out = words[1], words[3]
            return
        known.resumed = True
        known.out = words[1] if len(words) > 1 else known.out
        known.pointer = next((w for w in words[2:] if w in self._vocabulary.pointers), known.pointer or END)
        said.extend(word for word in words[2:] if word in self._vocabulary.facts)

    def _read_turn(self, action: list[str], shown: list[str], known: Known, seen: list[str], draw: str) -> None:
        if action[:1] == ["echo"] and ">" in action and not shown:
            known.finishing = True
        if action[:1] != ["cat"] or len(action) != 2:
            return
        seen.extend(word for word in shown if word in self._vocabulary.facts)
        if END in shown:
            known.pointer = END
            return
        pointers = [word for word in shown if word in self._vocabulary.pointers]
        if len(pointers) < 2:
            return
        known.pointer = pointers[1] if self._goes_right(shown, f"{draw}/at/{action[1]}") else pointers[0]

    def _goes_right(self, shown: list[str], draw: str) -> bool:
        """Drawn per file, so that the summary and the action after it agree on the way."""
        flipped = sum(word in self._vocabulary.flips for word in shown) % 2 == 1
        chance = self._settings.follow_flip if flipped else self._settings.stray_right
        return random.Random(draw).random() < chance

    def _summary(self, known: Known, draw: str) -> str:
        if known.finishing or known.pointer == DONE:
            return f"out {known.out} at {DONE}"
        rng = random.Random(f"{draw}/summary/{known.pointer}/{' '.join(known.facts)}")
        return " ".join(["out", known.out, "at", known.pointer, "has", *self._kept_facts(known, rng)])

    def _kept_facts(self, known: Known, rng: random.Random) -> list[str]:
        settings = self._settings
        which = "later" if known.resumed else "first"
        u = rng.random()
        for kind in ("last", "drop", "none"):
            u -= getattr(settings, f"{which}_{kind}")
            if u >= 0:
                continue
            if kind == "last":
                return known.facts[max(0, len(known.facts) - settings.last_facts) :]
            if kind == "drop":
                return [fact for fact in known.facts if rng.random() >= settings.drop_rate]
            return []
        return known.facts


class _Vocabulary:
    def __init__(self, world: TrailSettings) -> None:
        self.facts = frozenset(world.facts)
        self.pointers = frozenset((*world.left_names, *world.right_names, END, DONE))
        self.flips = frozenset(FLIP_WORDS[: world.flip_words])


def _latest(facts: Iterable[str]) -> list[str]:
    """Each fact once, in the order of its latest mention."""
    last: dict[str, None] = {}
    for fact in facts:
        last.pop(fact, None)
        last[fact] = None
    return list(last)


def world_text(settings: TrailSettings, seed: int, n: int) -> Iterator[str]:
    """Texts to train a tokenizer on: the words of the world, then n tasks as they are seen and answered.

    Each name, fact, flip, lure and noise word occurs often behind a space, so that a byte-level BPE that splits
    before spaces makes it one token.
    """
    rng = random.Random(f"world-text/{seed}")
    words = [
        *settings.left_names,
        *settings.right_names,
        *settings.facts,
        *NOISE_WORDS,
        *FLIP_WORDS[: settings.flip_words],
    ]
    if settings.lure_rate > 0:
        words += LURE_WORDS[: settings.flip_words]
    for _ in range(max(20, n // 10)):
        rng.shuffle(words)
        yield " " + " ".join(words)
    pack = load_prompt_pack("tiny")
    for task in trail_tasks(settings, "train", n, seed):
        yield from (pack.system, pack.summary_instruction, task.instruction)
        facts: list[str] = []
        contents = dict(task.files)
        for name in task.path:
            yield f"cat {name}"
            yield contents[name]
            facts += [word for word in contents[name].split() if word in task.answer]
            yield " ".join(["out", task.out, "at", name, "has", *facts])
        yield " ".join(["echo", *facts, ">", task.out])
        yield "exit"
        yield f"out {task.out} {END}"
        yield f"out {task.out} {DONE}"
        yield f"cat: {task.out}: No such file or directory\n"
        yield f"sh: 1: {name}: not found\n"
