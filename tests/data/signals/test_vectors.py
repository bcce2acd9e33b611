"""The wording of a text is counted in character n-grams."""

import zlib

import numpy as np
import pytest

from knowgate.core.text import MAX_ANSWER_CHARS
from knowgate.data.signals.vectors import WORDING_WIDTH, draft_texts, hash_wording
from knowgate.types import Completion, Reading


def test_each_ngram_of_a_word_counts_in_the_column_of_its_hash():
    expected = np.zeros(WORDING_WIDTH)
    for ngram in [" a", "ab", "b ", " ab", "ab ", " ab "]:
        code = zlib.crc32(ngram.encode())
        expected[code % WORDING_WIDTH] += 1 if code >= 2**31 else -1
    assert hash_wording(["Ab"])[0] == pytest.approx(expected / np.sqrt((expected**2).sum()))


def test_case_and_spaces_do_not_matter_but_words_do():
    lower, upper, other = hash_wording(["midnight oil", "Midnight  OIL\n", "Midnight Sun"])
    assert np.array_equal(lower, upper)
    assert 0.2 < lower @ other < 0.9


def test_an_empty_text_is_a_row_of_zeros():
    assert not hash_wording([""]).any()


def test_texts_without_spaces_have_ngrams_too():
    first, second = hash_wording(["北京大学", "北京"])
    assert first @ second > 0.3


def test_of_a_very_long_draft_the_beginning_is_read():
    readings = [Reading(Completion("x" * 1_000_000))]
    assert [len(text) for text in draft_texts(readings)] == [MAX_ANSWER_CHARS]
