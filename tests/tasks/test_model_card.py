"""The card beside a checkpoint: what it says of the pairing, and which scores it shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from compaction.pairing import CARD, Pairing, pairing_of, write_pairing
from compaction.settings import AgentSettings, CompactionSettings
from evaluation.grid import Cell
from evaluation.results import CellResult
from tasks.model_card import NOT_YET, Evaluated, card_text, write_card
from tasks.provenance import trained_stage
from tests.evaluation.synthetic import make_cell

AGENT = AgentSettings(compaction=CompactionSettings(window=4_096, threshold=512, max_response=256, summary_cap=128))


@pytest.fixture
def pairing() -> Pairing:
    how = {"ppo": {"train_summaries": True}, "engine": "vllm"}
    stages = [trained_stage("sft", "expert rollouts", 300, 7, {}), trained_stage("ppo", "the trail world", 40, 7, how)]
    return pairing_of(AGENT, "org/model", stages)


@pytest.fixture
def checkpoint(tmp_path: Path, pairing: Pairing) -> Path:
    write_pairing(tmp_path, pairing)
    return tmp_path


def result(cap: int, score: float, *, window: int = 4_096, temperature: float = 1.0) -> CellResult:
    return make_cell(Cell("compactionrl", 0, window, cap, 2 if cap else None, temperature), score, n_tasks=4)


def evaluated(*cells: CellResult, most: int = 3) -> Evaluated:
    return Evaluated("20261130-1200-tiny", "compactionrl", "trail/test", cells, most)


def row(text: str, name: str) -> list[str]:
    """The row of the score table that begins with `name`."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [part.strip() for part in line.strip("|").split("|")]


def test_the_front_matter_is_the_hubs(pairing: Pairing) -> None:
    front = yaml.safe_load(card_text(pairing).split("---")[1])
    assert front["base_model"] == "org/model"
    assert front["library_name"] == "transformers"
    assert "context-compaction" in front["tags"]


def test_a_folder_and_a_new_model_are_no_model_of_the_hub(pairing: Pairing, tmp_path: Path) -> None:
    for base, said in ((str(tmp_path), str(tmp_path)), (None, "a new model of random weights")):
        text = card_text(pairing.model_copy(update={"base_model": base}))
        assert "base_model" not in yaml.safe_load(text.split("---")[1])
        assert said in text


def test_the_prompts_stand_there_word_for_word_also_with_fences_in_them(pairing: Pairing) -> None:
    resume = "Go on.\n```bash\nls\n```\n{summary}"
    pack = pairing.prompt_pack.model_copy(update={"resume": resume})
    text = card_text(pairing.model_copy(update={"prompt_pack": pack}))
    assert f"\n````text\n{resume}\n````\n" in text
    assert f"\n```text\n{pack.summary_instruction}\n```\n" in text.replace("````", "```")


def test_the_pairing_and_the_training_are_tables(pairing: Pairing) -> None:
    text = card_text(pairing)
    for line in (
        "| scaffold | `bash-block` |",
        "| window | 4,096 tokens |",
        "| cap: most compactions of a rollout | 3 |",
    ):
        assert line in text
    assert row(text, "thinking before each action")[1] == "as the chat template says"
    assert row(text, "ppo")[1:5] == ["the trail world", "40", "7", "vllm"]
    assert f"torch {pairing.training[-1].versions['torch']}" in text


def test_it_says_what_of_the_summaries_was_trained(pairing: Pairing) -> None:
    sft, ppo = pairing.training
    untrained = ppo.model_copy(update={"settings": {"ppo": {"train_summaries": False}}})
    said = {
        "Its summaries were trained with its actions": {},
        "its summaries were not": {"training": (sft, untrained)},
        "in a single window": {"cap": 0},
        "not trained by reward": {"training": (sft,)},
    }
    for words, changes in said.items():
        text = " ".join(card_text(pairing.model_copy(update=changes)).split())
        assert [other for other in said if other in text] == [words]


def test_a_run_that_finds_the_same_scores_again_does_not_claim_them(checkpoint: Path) -> None:
    write_card(checkpoint, evaluated(result(3, 0.5)))
    before = (checkpoint / CARD).read_text()
    write_card(checkpoint, replace(evaluated(result(3, 0.5)), run="20261201-0000-tiny"))
    assert (checkpoint / CARD).read_text() == before


def test_scores_are_those_at_the_training_point(pairing: Pairing) -> None:
    elsewhere = [result(3, 0.0, window=2_048), result(3, 0.0, temperature=0.0), result(1, 0.0)]
    text = card_text(pairing, evaluated(*elsewhere, result(0, 0.25), result(3, 0.75)))
    single, compacted = row(text, "×1"), row(text, "×4")
    assert single[1].startswith("0.250 [")
    assert compacted[1].startswith("0.750 [")
    assert compacted[2:] == ["4", "1", "trail/test"]
    assert "From run `20261130-1200-tiny`, as variant `compactionrl`." in text


def test_a_variant_trained_without_compaction_is_measured_with_it_too(pairing: Pairing) -> None:
    single = pairing.model_copy(update={"cap": 0})
    assert [line for line in card_text(single).splitlines() if NOT_YET in line] == [f"| ×1 | {NOT_YET} | – | – | – |"]
    text = card_text(single, evaluated(result(3, 1.0), result(0, 0.0)))
    assert row(text, "×4")[1].startswith("1.000")


def test_it_is_written_again_with_the_scores_of_each_run(checkpoint: Path) -> None:
    card = checkpoint / CARD
    assert write_card(checkpoint) == card
    assert card.read_text().count(NOT_YET) == 2
    write_card(checkpoint, evaluated(result(3, 0.5)))
    text = card.read_text()
    assert row(text, "×4")[1].startswith("0.500")
    assert row(text, "×1")[1] == "not evaluated in this run"
    write_card(checkpoint, evaluated(result(3, 1.0)))
    assert row(card.read_text(), "×4")[1].startswith("1.000")


def test_a_run_that_measured_nothing_of_it_leaves_the_scores(checkpoint: Path) -> None:
    write_card(checkpoint, evaluated(result(3, 0.5)))
    before = (checkpoint / CARD).read_text()
    write_card(checkpoint, evaluated(result(3, 0.0, window=2_048)))
    write_card(checkpoint)
    assert (checkpoint / CARD).read_text() == before


def test_a_model_without_a_pairing_gets_no_card(tmp_path: Path) -> None:
    assert write_card(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
