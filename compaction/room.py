"""What stands in every window, and whether it leaves room to act."""

from __future__ import annotations

from compaction import window
from compaction.history import Message, ids
from compaction.protocols import Renderer, Tools
from compaction.scaffolds import Scaffold, load_scaffold
from compaction.scaffolds.tools import definitions
from compaction.settings import AgentSettings
from compaction.summaries import PromptPack, load_prompt_pack


def system_message(pack: PromptPack, scaffold: Scaffold, renderer: Renderer) -> Message:
    """The system prompt, the same in every window. Tools are defined by the template, or in the text itself."""
    text = pack.system_prompt(scaffold)
    if scaffold.tools and not renderer.takes_tools:
        text = f"{text}\n\n{definitions(scaffold.tools)}"
    return Message("system", text, ids(renderer.message("system", text, template_tools(scaffold, renderer))))


def template_tools(scaffold: Scaffold, renderer: Renderer) -> Tools:
    """The tools that the template defines, not the text."""
    return scaffold.tools if renderer.takes_tools else ()


def check_room(instruction: str, renderer: Renderer, settings: AgentSettings) -> window.Overheads:
    """What rendering costs under these settings. Raises WindowTooSmall where a task of that text leaves no room to act:
    to be asked before anything is spent."""
    renderer = renderer.with_thinking(settings.thinking)
    pack, scaffold = load_prompt_pack(settings.compaction.prompt_pack), load_scaffold(settings.scaffold)
    observation = len(renderer.message("user", ""))
    if scaffold.tools and renderer.takes_results:
        observation = max(observation, len(renderer.results([""])))
    overheads = window.Overheads(
        instruction=len(renderer.message("user", pack.summary_instruction)) + len(renderer.generation_prompt),
        turn=len(renderer.generation_prompt) + len(renderer.close([], "length")) + observation,
        resume=len(renderer.message("user", pack.resume_message(""))),
    )
    system = len(system_message(pack, scaffold, renderer).token_ids)
    window.check_window(settings.compaction, system, len(renderer.message("user", instruction)), overheads)
    return overheads
