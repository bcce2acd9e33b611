"""Document frequencies of words in a compact table."""

import numpy as np
import pytest

from knowgate.data.signals.question_text import (
    count_word_frequencies,
    frequency_features,
    hash_word,
    popularity_features,
)
from knowgate.types import Passage, Question

PASSAGES = [Passage("1", "Rome rome is old", title="Rome"), Passage("2", "Oslo is cold"), Passage("3", "it is")]


def test_a_word_counts_once_per_passage():
    counts = np.expm1(count_word_frequencies(PASSAGES))
    assert [round(counts[hash_word(word)]) for word in ("rome", "oslo", "is", "paris")] == [1, 1, 3, 0]


def test_features_are_the_rarest_word_the_mean_and_the_rarest_name():
    rarest, mean, name = frequency_features([Question("is Rome cold")], count_word_frequencies(PASSAGES))[0]
    assert (rarest, name) == (pytest.approx(np.log(2)), pytest.approx(np.log(2)))
    assert mean == pytest.approx((np.log(4) + 2 * np.log(2)) / 3)


def test_a_name_that_the_index_does_not_know_has_frequency_0():
    assert frequency_features([Question("is Atlantis old")], count_word_frequencies(PASSAGES))[0][2] == 0


def test_popularity_is_read_from_the_question_and_marked_if_unknown():
    questions = [Question("?", meta={"popularity": 9}), Question("?"), Question("?", meta={"popularity": "high"})]
    assert popularity_features(questions) == pytest.approx(np.array([[np.log(10), 1], [0, 0], [0, 0]]))
