"""The embedded model: a stock Llama of about a hundred thousand parameters and its tokenizer, as a checkpoint folder.

Sizes follow the measured recipe for learning on one CPU thread; a head size of 32 is the smallest that vLLM serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rl.settings import TinySettings

PAD = "<|pad|>"
END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

WORDS_WITH_THEIR_SPACE = r" ?\S+|\s"
"""One space goes with the word behind it. Letters and digits are not split: a name like `k3` can be one token."""


def train_tokenizer(corpus: Iterable[str], settings: TinySettings) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on `corpus`; any text round-trips exactly.

    A word that the corpus holds often enough, with a space before it, is one token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS_WITH_THEIR_SPACE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        special_tokens=[PAD, END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=settings.max_positions,
    )


def tiny_config(tokenizer: PreTrainedTokenizerFast, settings: TinySettings) -> LlamaConfig:
    """The Llama configuration for `tokenizer`, embeddings tied, fp32."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.width,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.head_size,
        max_position_embeddings=settings.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        initializer_range=settings.init_std,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )


def make_tiny_checkpoint(folder: str | Path, corpus: Iterable[str], settings: TinySettings) -> Path:
    """Writes tokenizer, chat template, configuration and random weights to `folder`, as `from_pretrained` reads them.

    The same corpus and settings give the same files. The global torch generator is left as it was.
    """
    folder = Path(folder)
    tokenizer = train_tokenizer(corpus, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = LlamaForCausalLM(tiny_config(tokenizer, settings))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
