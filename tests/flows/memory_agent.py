"""A scripted agent whose memory is known, tasks that need it, and the closed form of which tasks it can do.

A task: read `code`, then pages 01 to NN, then write the code to `out`. Summaries carry over how far the agent came,
and the code only if it *saw* it in this window: a code that stands in the resume message alone is forgotten by the next
summary. So it survives exactly one compaction.

Every word is one token, and every turn takes equally many: what fits a window can be counted by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compaction.rendering import ChatTemplateRenderer
from compaction.settings import CompactionSettings
from compaction.summaries import load_prompt_pack
from tests.compaction.engines.stub_endpoint import Answer, Call, reply

PAGES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14)
"""Pages of the twelve tasks"""
PAGE = "page " + " ".join(["ink"] * 18)
PACK = {
    "name": "memory",
    "system": "you act in a shell",
    "summary_instruction": "summarize now",
    "resume": "resumed {summary} go on",
    "summary_pattern": "^(?P<body>at .*)$",
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer for which every word between blanks is one token."""
    specials = ["<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(specials)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="<unk>")
    wrapped.add_special_tokens({"additional_special_tokens": specials[2:]})
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    return folder


def write_pack(path: Path) -> Path:
    path.write_text(yaml.safe_dump(PACK))
    return path


def instruction(pages: int) -> str:
    return f"read code then pages 01 to {pages:02d} then write the code to out"


def write_tasks(
    folder: Path, sizes: Sequence[int] = PAGES, *, base: str = "debian:bookworm-slim", name: str = "memory"
) -> Path:
    """One task folder per number of pages, of images that start from `base`; the local sandbox runs them too."""
    for number, pages in enumerate(sizes):
        root, code = folder / f"{name}-{number:02d}", f"c{10 + number}"
        files = root / "environment" / "files"
        files.mkdir(parents=True)
        (files / "code").write_text(f"code {code} " + " ".join(["ink"] * 17))
        for page in range(1, pages + 1):
            (files / f"p{page:02d}").write_text(PAGE)
        (root / "environment" / "Dockerfile").write_text(f"FROM {base}\nWORKDIR /app\nCOPY files/ /app/\n")
        (root / "instruction.md").write_text(instruction(pages))
        (root / "task.toml").write_text('schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n')
        tests = root / "tests"
        tests.mkdir()
        (tests / "test.sh").write_text(
            f'r=0; [ "$(cat /app/out 2>/dev/null)" = {code} ] && r=1; echo $r > /logs/verifier/reward.txt\n'
        )
    return folder


def block(command: str) -> str:
    return f"so\n```bash\n{command}\n```"


def act(call: Call) -> Answer:
    """The agent: all it knows is in the messages of this one call."""
    messages: list[dict[str, Any]] = call.body["messages"]
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    seen = [m["content"] for m in messages if m["role"] == "user"]
    resumed = re.search(r"resumed at (\d\d) of (\d\d) code (\S+)", seen[0])
    asked = re.search(r"to (\d\d) then", seen[0])
    pages = int(resumed[2] if resumed else asked[1] if asked else 0)
    observed = next((m[1] for text in seen[1:] if (m := re.search(r"code (c\d+)", text))), None)
    known = observed or (resumed[3] if resumed else "none")
    read = [int(m[1]) for text in said if (m := re.search(r"cat p(\d\d)", text))]
    at = max([*read, int(resumed[1]) if resumed else 0])
    if seen[-1] == PACK["summary_instruction"]:
        return reply(f"at {at:02d} of {pages:02d} code {observed or 'none'}", used={})
    if not resumed and not any("cat code" in text for text in said):
        return reply(block("cat code"), used={})
    if at < pages:
        return reply(block(f"cat p{at + 1:02d}"), used={})
    written = any("> out" in text for text in said)
    return reply(block("exit" if written else f"echo {known} > out"), used={})


@dataclass(frozen=True)
class Sizes:
    """Tokens, as the tokenizer above counts them."""

    opening: int
    """System and task: the same for every task"""
    resumed: int
    """System and resume message with a summary"""
    turn: int
    before_answer: int
    """What a turn costs beside its action, at least"""

    @classmethod
    def of(cls, renderer: ChatTemplateRenderer, pack: Path) -> Sizes:
        texts = load_prompt_pack(str(pack))
        system = len(renderer.message("system", texts.system))
        task = len(renderer.message("user", instruction(3)))
        body = len(renderer.message("user", texts.resume_message("at 01 of 03 code c10")))
        action = len(renderer.generation_prompt) + len(renderer.encode(block("cat p01")))
        end = len(renderer.close([], "length"))
        observed = len(renderer.message("user", f"[exit code 0]\n{PAGE}"))
        empty = len(renderer.generation_prompt) + end + len(renderer.message("user", ""))
        return cls(system + task, system + body, action + end + observed, empty)


def solvable(sizes: Sizes, settings: CompactionSettings, pages: int) -> bool:
    """Whether the agent does a task of so many pages under these settings (window C, threshold T, cap, keep k)."""
    c, t, turn = settings.window, settings.threshold, sizes.turn
    writes = pages + 2  # the turn in which the code is written: code, pages, then this
    first = (c - t - sizes.opening) // turn + 1  # turns of the first window, compacted after the last of them
    more = (c - t - sizes.resumed) // turn + 1 - settings.keep_recent  # new turns of each further window

    def last(base: int) -> int:
        """Turns of a window without compactions left."""
        return (c - base - sizes.before_answer - settings.min_response) // turn + 1

    if settings.cap == 0:
        return writes <= last(sizes.opening)
    compactions = min(settings.cap, 0 if writes <= first else 1 + (writes - first - 1) // more)
    reach = first + (settings.cap - 1) * more + last(sizes.resumed + settings.keep_recent * turn)
    return compactions <= 1 and writes <= reach
