"""Incremental decoding, checked against decoding all tokens at once."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from knowgate.models.tokenization import IncrementalDecoder, decode_all
from tests.support.byte_llama import byte_tokenizer, fallback_tokenizer, word_tokenizer

BYTES, FALLBACK, WORDS = byte_tokenizer(), fallback_tokenizer(), word_tokenizer()


def pieces_of(tokenizer, ids):
    """Return the piece for each token, and the rest at the end."""
    text, whole = IncrementalDecoder(tokenizer), tokenizer.decode(ids, skip_special_tokens=True).strip()
    emitted = [text.take(ids[: end + 1]) for end in range(len(ids))]
    return [*emitted, text.finish(whole)]


def in_bytes(text):
    return [FALLBACK.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]


def fallback_ids(*tokens):
    return [FALLBACK.convert_tokens_to_ids(token) for token in tokens]


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK, WORDS], ids=["bytes", "fallback", "words"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_pieces_of_any_tokens_join_to_their_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=24))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True).strip()


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK, WORDS], ids=["bytes", "fallback", "words"])
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_many_answers_are_decoded_as_single_ones_are(tokenizer, data):
    rows = data.draw(st.lists(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12), max_size=4))
    assert decode_all(tokenizer, rows) == [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


@given(text=st.text(max_size=12))
@example("  巴黎 is é🙂  ")
@settings(max_examples=150, deadline=None)
def test_the_pieces_of_any_text_in_bytes_join_to_it(text):
    ids = BYTES.encode(text, add_special_tokens=False)
    assert "".join(pieces_of(BYTES, ids)) == BYTES.decode(ids).strip()


def test_a_character_of_several_tokens_is_emitted_when_complete():
    assert pieces_of(BYTES, BYTES.encode("a巴b", add_special_tokens=False)) == ["a", "", "", "巴", "b", ""]


def test_an_incomplete_character_is_emitted_at_the_end():
    assert pieces_of(BYTES, BYTES.encode("a巴", add_special_tokens=False)[:-1]) == ["a", "", "", "\ufffd"]


def test_spaces_are_held_back_and_dropped_at_both_ends():
    assert pieces_of(BYTES, BYTES.encode(" a b ", add_special_tokens=False)) == ["", "a", "", " b", "", ""]


def test_a_words_own_space_is_kept():
    assert pieces_of(FALLBACK, fallback_ids("▁Paris", "▁is", "a", ".")) == ["Paris", " is", "a", ".", ""]


def test_a_run_of_byte_tokens_is_held_back_until_it_ends():
    ids = [*fallback_ids("a"), *in_bytes("巴黎"), *fallback_ids("▁b")]
    assert pieces_of(FALLBACK, ids) == ["a", *[""] * 6, "巴黎 b", ""]
    assert pieces_of(FALLBACK, ids[:-2]) == ["a", *[""] * 5, "\ufffd" * 5]


def test_a_special_token_does_not_end_a_run_of_bytes():
    ids = [*in_bytes("巴"), *fallback_ids("<pad>"), *in_bytes("黎")]
    assert pieces_of(FALLBACK, ids[:-1])[-1] == "\ufffd" * 5
    assert pieces_of(FALLBACK, [*ids, *fallback_ids("a")])[-2:] == ["巴黎a", ""]


def test_special_tokens_emit_no_text():
    ids = [WORDS.convert_tokens_to_ids(token) for token in ("<pad>", "a", "<pad>", "b")]
    assert pieces_of(WORDS, ids) == ["", "a", "", " b", ""]


def test_everything_is_emitted_at_the_end_if_decoding_rewrites_spaces():
    tokenizer = word_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    ids = [tokenizer.convert_tokens_to_ids(token) for token in "a.b"]
    assert pieces_of(tokenizer, ids) == ["", "", "", "a. b"]
