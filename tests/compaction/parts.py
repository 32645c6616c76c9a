"""Small real parts to run the agent loop on: a tokenizer, templates, an environment, a task, scripted replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from compaction.engines.scripted import ScriptedEngine
from compaction.protocols import Completion, Environment, Execution, GenerateRequest, TaskLimits
from compaction.rendering import ChatTemplateRenderer
from compaction.settings import AgentSettings, CompactionSettings

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen's: a default system message, and a newline after the end token"""

_TEXT = [
    "cat ls grep echo exit trail summarize out a at b the file holds go on with what is next",
    "[cut 12] [cut 3456] empty reply: give one command reply cut: too long 0123456789 αβγ 漢字 🙂",
    "system\nuser\nassistant\n <tool_call>",
]


def make_tokenizer(template: str = PLAIN) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; the role tokens are special but not named, as in many checkpoints."""
    specials = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    end = "<|im_end|>" if "im_end" in template else "<|end|>"
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<|pad|>")
    wrapped.chat_template = template
    return wrapped


def small_settings(**changes: Any) -> AgentSettings:
    """Agent settings on the `tiny` pack; `changes` may name fields of the agent or of its compaction."""
    compaction: dict[str, Any] = {
        "window": 160, "threshold": 60, "max_response": 30, "min_response": 4, "summary_cap": 24, "cap": 2,
        "keep_recent": 1, "prompt_pack": "tiny", "summary_retries": 2,
    }  # fmt: skip
    agent: dict[str, Any] = {"max_turns": 30}
    for name, value in changes.items():
        (agent if name in AgentSettings.model_fields else compaction)[name] = value
    return AgentSettings(scaffold="shell-line", compaction=CompactionSettings(**compaction), **agent)


@dataclass
class Files(Environment):
    """A world of files in memory: `cat NAME` reads, `echo TEXT > NAME` writes. Solved when `answer` holds `42`."""

    files: dict[str, str]
    calls: list[str] = field(default_factory=list)

    async def start(self) -> None:
        self.calls.append("start")

    async def execute(self, command: str) -> Execution:
        self.calls.append(command)
        if command.startswith("echo ") and " > " in command:
            text, name = command.removeprefix("echo ").split(" > ", 1)
            self.files[name] = text
            return Execution("")
        name = command.removeprefix("cat ")
        return Execution(self.files[name]) if name in self.files else Execution(f"no file {name}", 1)

    async def upload(self, path: str, content: bytes) -> None:
        self.files[path] = content.decode()

    async def grade(self) -> float:
        self.calls.append("grade")
        return float(self.files.get("answer") == "42")

    async def stop(self) -> None:
        self.calls.append("stop")


@dataclass
class FilesTask:
    """A task in a `Files` world; `world` may be another environment's factory."""

    files: dict[str, str] = field(default_factory=lambda: {"a": "go on with b", "b": "the answer is 42"})
    instruction: str = "cat a"
    limits: TaskLimits = field(default_factory=TaskLimits)
    id: str = "files-1"
    world: Callable[[dict[str, str]], Files] = Files
    opened: list[Files] = field(default_factory=list)

    def open(self) -> Environment:
        self.opened.append(self.world(dict(self.files)))
        return self.opened[-1]

    @property
    def environment(self) -> Files:
        return self.opened[-1]


def replies(actions: list[str], summary: str = "out a at b") -> Callable[[GenerateRequest], str]:
    """A script: these actions in order, then `exit`; always the same summary."""
    left = iter(actions)
    return lambda request: summary if request.kind == "summary" else next(left, "exit")


class ReleasedEngine(ScriptedEngine):
    """A scripted engine that notes which rollouts were released."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.released: list[str] = []
        self.completions: list[Completion] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.completions.append(await super().generate(request))
        return self.completions[-1]

    async def release(self, rollout_id: str) -> None:
        self.released.append(rollout_id)


def play(
    script: Callable[[GenerateRequest], str],
    *,
    settings: AgentSettings | None = None,
    task: FilesTask | None = None,
    renderer: ChatTemplateRenderer,
    engine: type[ReleasedEngine] = ReleasedEngine,
    seed: int = 0,
    rollout_id: str = "r",
) -> tuple[Any, Any]:
    """(rollout, engine) of one attempt."""
    from compaction.agent import run_rollout

    served = engine(script, renderer)
    rollout = asyncio.run(
        run_rollout(
            task or FilesTask(), served, renderer, settings or small_settings(), seed=seed, rollout_id=rollout_id
        )
    )
    return rollout, served
