"""Random models of two layers: they run in milliseconds and learn a simple rule in seconds.

A Llama whose tokens are characters, one whose tokens are words (so that judges' prompts are short), a cross-encoder.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from knowgate.models.prompts.templates import load_packaged_templates

SPECIAL = ["<pad>", "<end>", "<user>", "<bot>", "<unk>"]
NAMES = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
CHARACTERS = [*string.ascii_letters, *string.digits, *" ?.,:'\n"]
WHOLE = ["true", "false", "trouble"]  # labels, and a word that begins like one
JUDGED = ["x", *"abcdefghijklmnop", "True", "False", "Yes", "No", "None", '{"', '":', '"', '",', "no", "idea"]
NOUNS = ["apple", "sky", "tree", "lamp", "river", "stone", "bird", "road", "cloud", "door", "ship", "rain"]
PAIRS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "the", "marker", *NOUNS]


def save_tiny_llama(folder: Path, seed: int = 0, window: int = 512, more: tuple[str, ...] = ()) -> Path:
    """Save a Llama whose tokens are characters; `more` are additional special tokens."""
    tokenizer = _tokenizer([*CHARACTERS, *WHOLE], pre_tokenizers.Split(Regex(rf"{'|'.join(WHOLE)}|[\s\S]"), "isolated"))
    tokenizer.chat_template = "{% for m in messages %}<user>{{ m['content'] }}<bot>{% endfor %}"
    tokenizer.add_tokens(list(more), special_tokens=True)
    return _save_llama(folder, tokenizer, seed, window)


def save_word_llama(folder: Path, seed: int = 0, window: int = 256) -> Path:
    """Save a Llama whose tokens are the words of the judge prompts."""
    asked = " ".join(
        text for name in ("ik", "kbm", "right") for text in load_packaged_templates(name).templates["en"].values()
    )
    words = [*JUDGED, *re.findall(r"\w+|[^\w\s]+", asked)]
    tokenizer = _tokenizer(words, pre_tokenizers.Whitespace(), extra_special_tokens=["<user>", "<bot>"])
    tokenizer.chat_template = "{% for m in messages %}<user> {{ m['content'] }} <bot>{% endfor %}"
    return _save_llama(folder, tokenizer, seed, window)


def _tokenizer(words: Sequence[str], cut: Any, **options: Any) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*SPECIAL, *words]))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = cut
    return PreTrainedTokenizerFast(tokenizer_object=core, **NAMES, **options)


def _save_llama(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, window: int, kind: str = "llama") -> Path:
    torch.manual_seed(seed)
    make, shape = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}[kind]
    config = shape(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    make(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_tiny_cross_encoder(folder: Path, words: Sequence[str] = PAIRS, seed: int = 0, **settings: Any) -> Path:
    """Save a BERT cross-encoder whose tokens are words; `settings` go to BertConfig."""
    folder.mkdir(parents=True, exist_ok=True)
    BertTokenizer({word: number for number, word in enumerate(words)}).save_pretrained(folder)
    torch.manual_seed(seed)
    usual = {"num_labels": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        **{**usual, **settings},
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def save_spoken_llama(folder: Path, seed: int = 0, kind: str = "llama") -> Path:
    """Save a Llama or Qwen2 model with a byte-level BPE tokenizer that llama.cpp supports."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    asked = list(load_packaged_templates("right").templates["en"].values())
    special = ["<pad>", "<end>", "<user>", "<bot>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    core.train_from_iterator([*asked, "Yes No " * 20], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", extra_special_tokens=["<user>", "<bot>"]
    )
    tokenizer.chat_template = "{% for m in messages %}<user>{{ m['content'] }}<bot>{% endfor %}"
    return _save_llama(folder, tokenizer, seed, 512, kind)
