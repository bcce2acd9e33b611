"""A random Llama of two layers whose tokens are words: judges' prompts are short, and a rule is learnt in seconds."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from knowgate.prompts import packaged

SPECIAL = ["<pad>", "<end>", "<user>", "<bot>", "<unk>"]
TEMPLATE = "{% for m in messages %}<user> {{ m['content'] }} <bot>{% endfor %}"
WORDS = ["x", *"abcdefghijklmnop", "True", "False", "Yes", "No", "None", '{"', '":', '"', '",', "no", "idea"]


def save_word_llama(folder: Path, seed: int = 0, window: int = 256) -> Path:
    """Write config, weights and tokenizer to `folder`."""
    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    config = LlamaConfig(
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
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    asked = " ".join(text for name in ("ik", "kbm") for text in packaged(name).templates["en"].values())
    words = dict.fromkeys([*SPECIAL, *WORDS, *re.findall(r"\w+|[^\w\s]+", asked)])
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE,
        extra_special_tokens=["<user>", "<bot>"],
    )  # fmt: skip
