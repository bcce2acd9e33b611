"""Tokenizing label prompts: many at a time gives the same result as one by one."""

from __future__ import annotations

import pytest

from knowgate.errors import BadSetting
from knowgate.models.local_backend import LocalBackend
from knowgate.types import LabelPrompt


class Letters:
    """A tokenizer with one token per letter, and token 0 at the beginning of a text."""

    has_template = True

    def __init__(self):
        self.calls = 0

    def tokenize(self, text, *, special=False):
        return [0] * special + [ord(letter) for letter in text]

    def tokenize_all(self, texts, *, special=False):
        self.calls += 1
        return [self.tokenize(text, special=special) for text in texts]

    encode_label_prompts = LocalBackend.encode_label_prompts
    _is_chat = LocalBackend._is_chat
    _tokenize_prefixes = LocalBackend._tokenize_prefixes
    _tokenize_parts = LocalBackend._tokenize_parts

    def render(self, text):
        return f"({text})"

    def check_length(self, n_tokens, max_tokens):
        pass


def test_chat_and_raw_prompts_are_tokenized_together():
    model, labels = Letters(), [ord("y"), ord("n")]
    raw = LabelPrompt(parts=("a:", "yb:"), prefix="p", raw=True)
    chat, first, again = model.encode_label_prompts([LabelPrompt(parts=("q",), raw=False), raw, raw], labels)
    assert (chat.ids, chat.positions, chat.prefix) == ([ord(letter) for letter in "(q)"], [2], 0)
    assert (first.ids, first.positions, first.prefix) == ([0, *map(ord, "pa:yb:")], [3, 6], 2)
    assert again == first
    assert again.ids is not first.ids
    assert model.calls == 2  # prefixes, and all parts


def test_a_part_that_does_not_begin_with_a_label_is_refused():
    with pytest.raises(BadSetting, match="of the prompt does not start with one of the labels"):
        Letters().encode_label_prompts([LabelPrompt(parts=("a:", "xb:"), raw=True)], [ord("y")])


def test_a_user_turn_with_several_label_positions_is_refused():
    with pytest.raises(BadSetting, match="must not have several parts"):
        Letters().encode_label_prompts([LabelPrompt(parts=("a:", "yb:"), raw=False)], [ord("y")])
