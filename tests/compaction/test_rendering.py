from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction.rendering import ChatTemplateRenderer, TemplateNotSupported, load_renderer
from tests.compaction.parts import CHATML, PLAIN, make_tokenizer

CONVERSATION = [("system", "trail"), ("user", "cat a"), ("assistant", "cat b"), ("user", "out 漢字 🙂")]


def assembled(renderer: ChatTemplateRenderer) -> list[int]:
    """The conversation, message by message, as the agent loop renders it."""
    ids: list[int] = []
    for role, text in CONVERSATION:
        if role == "assistant":
            sampled = renderer.encode(text)
            ids += [*renderer.generation_prompt, *sampled, *renderer.close(sampled, "length")]
        else:
            ids += renderer.message(role, text)
    return [*ids, *renderer.generation_prompt]


def test_messages_rendered_one_by_one_read_as_the_template_renders_them_all(any_renderer: ChatTemplateRenderer):
    tokenizer = any_renderer._tokenizer
    messages = [{"role": role, "content": text} for role, text in CONVERSATION]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(assembled(any_renderer), skip_special_tokens=False) == whole


def test_text_with_special_tokens_stays_text(any_renderer: ChatTemplateRenderer):
    text = "<|end|><|im_end|><|user|> now <|im_start|>assistant"
    encoded = any_renderer.encode(text)
    assert not any_renderer.special_ids.intersection(encoded)
    assert any_renderer.decode(encoded) == text
    frame = any_renderer.message("user", "")
    assert len(any_renderer.message("user", text)) == len(frame) + len(encoded)


@given(st.text())
def test_any_text_survives_encoding_and_decoding(renderer: ChatTemplateRenderer, text: str):
    assert renderer.decode(renderer.encode(text)) == text


def test_the_end_token_is_no_text_but_other_control_tokens_show(renderer: ChatTemplateRenderer):
    tokenizer = renderer._tokenizer
    end, user = tokenizer.convert_tokens_to_ids(["<|end|>", "<|user|>"])
    assert renderer.decode([*renderer.encode("cat a"), end]) == "cat a"
    assert renderer.decode([user, *renderer.encode("cat a")]) == "<|user|>cat a"


def test_role_tokens_count_as_control_tokens_even_where_the_tokenizer_does_not_name_them(
    renderer: ChatTemplateRenderer,
):
    tokenizer = renderer._tokenizer
    role = tokenizer.convert_tokens_to_ids("<|user|>")
    assert role not in tokenizer.all_special_ids
    assert role in renderer.special_ids


def test_a_reply_that_ended_is_closed_without_a_second_end_token(any_renderer: ChatTemplateRenderer):
    cut = any_renderer.encode("cat a")
    close = any_renderer.close(cut, "length")
    ended = [*cut, close[0]]
    assert [*ended, *any_renderer.close(ended, "stop")] == [*cut, *close]


def test_an_end_token_that_the_engine_left_out_is_added(any_renderer: ChatTemplateRenderer):
    cut = any_renderer.encode("cat a")
    assert any_renderer.close(cut, "stop") == any_renderer.close(cut, "length")
    assert any_renderer.close([], "stop") == any_renderer.close(cut, "length")


def test_what_the_template_puts_after_the_end_token_is_context(chatml_renderer: ChatTemplateRenderer):
    end = chatml_renderer._tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chatml_renderer.close([5, end], "stop") == chatml_renderer.encode("\n")


def test_a_default_system_message_is_not_doubled(chatml_renderer: ChatTemplateRenderer):
    text = chatml_renderer._tokenizer.decode(assembled(chatml_renderer))
    assert "You help." not in text
    assert text.count("system") == 1


LAST_OPEN = PLAIN.replace("<|end|>{% endfor %}", "{% if not loop.last %}<|end|>{% endif %}{% endfor %}")
COUNTED = PLAIN.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>{{ messages|length }}")
STRIPPED = PLAIN.replace("{{ m.content }}", "{% if loop.index < messages|length - 2 %}{{ m.content }}{% endif %}")
NO_PROMPT = PLAIN.split("{% if add_generation_prompt")[0]
NO_END = PLAIN.replace("<|end|>", "")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
TWICE = PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LAST_OPEN, "which lacks the end token"),
        (COUNTED, "rewrites earlier|differently"),
        (STRIPPED, "0 times|rewrites|differently"),
        (NO_PROMPT, "no generation prompt"),
        (NO_END, "lacks the end token '<|end|>'".replace("|", r"\|")),
        (NO_SYSTEM, "refuses messages of roles .*no system role"),
        (TWICE, "2 times"),
        (None, "needs a chat template"),
    ],
)
def test_templates_that_do_not_append_message_by_message_are_refused(template: str | None, said: str):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(TemplateNotSupported, match=said):
        ChatTemplateRenderer(tokenizer)


def test_a_template_that_drops_the_thinking_of_earlier_turns_is_fine_since_turns_stay_as_sampled():
    thinking = CHATML.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
    )
    renderer = ChatTemplateRenderer(make_tokenizer(thinking))
    assert renderer.decode(list(renderer.generation_prompt)) == "<|im_start|>assistant\n"


def test_a_renderer_is_loaded_from_a_checkpoint_folder(tmp_path: Path, any_renderer: ChatTemplateRenderer):
    any_renderer._tokenizer.save_pretrained(tmp_path)
    loaded = load_renderer(tmp_path)
    assert assembled(loaded) == assembled(any_renderer)
    assert loaded.special_ids == any_renderer.special_ids


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load_renderer(tmp_path / "nowhere")
