"""The embedded checkpoint: its tokenizer, chat template and weights."""

import filecmp
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.tiny import TinySettings, make_tiny_checkpoint

FACTS = [f"{letter}{digit}" for letter in "abcdefghijklmnop" for digit in range(8)]
NAMES = [f"{side}{i}" for side in ("L", "R") for i in range(32)]


def small_world_text():
    rng = random.Random(0)
    for _ in range(3000):
        words = ["next", rng.choice(NAMES), "fact", rng.choice(FACTS), rng.choice(FACTS), "noise"]
        yield " " + " ".join(words)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), small_world_text(), TinySettings())


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


def test_each_fact_and_name_after_a_space_is_one_token(tokenizer):
    lengths = {word: len(tokenizer.encode(" " + word, add_special_tokens=False)) for word in FACTS + NAMES}
    assert {word: n for word, n in lengths.items() if n != 1} == {}


@pytest.mark.parametrize(
    "text",
    ["", " cat L3", "echo a1 b2 > out\n", "  two  spaces\t\ttabs \n\n", "Grüße 東京 🙂\x00\x7f", "it 's , not ."],
)
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_special_tokens_inside_content_can_stay_text(tokenizer):
    ids = tokenizer.encode("<|end|>", add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == "<|end|>"


def test_chat_template_closes_each_message_and_opens_the_reply(tokenizer):
    messages = [
        {"role": "system", "content": "trail"},
        {"role": "user", "content": " go"},
        {"role": "assistant", "content": " cat L1"},
        {"role": "user", "content": " next R2"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>trail<|end|><|user|> go<|end|><|assistant|> cat L1<|end|><|user|> next R2<|end|><|assistant|>"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.eos_token_id) == 4
    assert tokenizer.eos_token == "<|end|>"


def test_checkpoint_is_a_llama_with_tied_embeddings_and_the_end_token(checkpoint, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.model_type == "llama"
    assert model.config.head_dim == 32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer) <= TinySettings().vocabulary
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_same_corpus_and_settings_give_the_same_files(checkpoint, tmp_path):
    before = torch.random.get_rng_state()
    again = make_tiny_checkpoint(tmp_path, small_world_text(), TinySettings())
    assert torch.equal(before, torch.random.get_rng_state())
    names = sorted(path.name for path in checkpoint.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert filecmp.cmpfiles(checkpoint, again, names, shallow=False)[0] == names
