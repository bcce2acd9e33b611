"""A random Llama of two layers, 64 wide, with a character tokenizer: real code paths in milliseconds."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<end>", "<user>", "<bot>", "<unk>"]
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}<bot>{% endfor %}"


def save_tiny_llama(
    folder: Path,
    seed: int = 0,
    window: int = 512,
    more: tuple[str, ...] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Write config, weights and tokenizer to `folder`; `more` are special tokens to add."""
    torch.manual_seed(seed)
    tokenizer = tokenizer or _tokenizer()
    tokenizer.add_tokens(list(more), special_tokens=True)
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
    characters = [*string.ascii_letters, *string.digits, *" ?.,:'\n"]
    words = ["true", "false", "trouble"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters, *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"true|false|trouble|[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """As of GPT-2 and Qwen without any merges: every token is one byte, most of them no whole character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    )


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As of Llama 2 and Gemma: words with a mark for the space before them, and bytes for all that is not a word."""
    words = ["\u2581", "\u2581Paris", "\u2581is", "a", "\u2581b", "."]
    tokens = [*SPECIAL, *words, *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")
