"""A random Llama of two layers whose tokens are bytes, and tokenizers whose tokens are not whole characters."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<end>", "<user>", "<bot>", "<unk>"]
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}<bot>{% endfor %}"


def save_byte_llama(folder: Path, seed: int = 0, window: int = 4096) -> Path:
    """Write config, weights and tokenizer to `folder`."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like those of GPT-2 and Qwen, without merges: every token is one byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(_numbered([*SPECIAL, *alphabet]), []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return _around(core)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like those of Llama 2 and Gemma: words with a marker for the space before them, else bytes."""
    words = ["▁", "▁Paris", "▁is", "a", "▁b", "."]
    spelt = [f"<0x{byte:02X}>" for byte in range(256)]
    core = Tokenizer(models.BPE(_numbered([*SPECIAL, *words, *spelt]), [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _around(core)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words, decoded with spaces between them."""
    return _around(Tokenizer(models.WordLevel(_numbered([*SPECIAL, "a", "b", ".", "?"]), unk_token="<unk>")))


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _around(core: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    )
