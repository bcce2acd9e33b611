"""The tokenizer of a model as GGUF tells it: copied from the GGUF file the model came from, or written from its own.

Byte-level BPE of the kinds that llama.cpp cuts words by are written; others are refused: told wrongly, they would be
tokenised wrongly without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from knowgate.errors import BadSetting

PREFIX = "tokenizer."
CONTROL, OWN, NORMAL, UNUSED = 3, 4, 1, 5  # kinds of tokens, as llama.cpp numbers them
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {WORDS % "": "qwen2", WORDS % "{1,3}": "llama-bpe"}  # regular expression of the words -> llama.cpp's name


def copy_tokens(writer: Any, file: Path) -> None:
    """Everything that a GGUF file says of its tokenizer."""
    import gguf

    for key, field in gguf.GGUFReader(file).fields.items():
        if key.startswith(PREFIX):
            kinds = field.types
            writer.add_key_value(key, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)


def write_tokens(writer: Any, tokenizer: Any, size: int) -> None:
    """A fast tokenizer of transformers. size: of the model's vocabulary, which may have more rows than it has words."""
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    cut = _cut(told)
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    added = {item["id"]: CONTROL if item["special"] else OWN for item in told["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([words.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([added.get(number, NORMAL if number in words else UNUSED) for number in range(size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in told["model"]["merges"]])
    _special(writer, tokenizer)


def _special(writer: Any, tokenizer: Any) -> None:
    bare = tokenizer.encode("a", add_special_tokens=False)
    writer.add_add_bos_token(len(tokenizer.encode("a")) > len(bare))
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if number is not None:
            add(number)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _cut(told: Mapping[str, Any]) -> str:
    """llama.cpp's name for how this tokenizer cuts a text into words."""
    outer = told.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    kinds = [step.get("type") for step in steps]
    if told["model"]["type"] == "BPE" and kinds and kinds[-1] == "ByteLevel":
        if kinds == ["ByteLevel"]:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and (found := CUTS.get(steps[0]["pattern"].get("Regex", ""))):
            return found
    raise BadSetting(
        f"the tokenizer of this base ({told['model']['type']}, {' then '.join(map(str, kinds)) or 'no cut'}) cannot be "
        "written as GGUF. Fit the judge on the same base as a GGUF file: --base gguf:FILE"
    )
