"""Scores of all passages: those of bm25s, to the last bit, however a term is added."""

from __future__ import annotations

import random

import numpy as np
import pytest

from knowgate.core.nearest_neighbors import NearestHits
from knowgate.retrieval import bm25_scores as scoring
from knowgate.retrieval.bm25 import _select_few, build_bm25_matrix
from knowgate.retrieval.bm25_scores import TermScorer
from knowgate.retrieval.tokenizer import Tokenizer
from knowgate.types import Passage

WORDS = [f"w{rank}" for rank in range(60)]


@pytest.fixture(scope="module")
def matrix():
    """200 passages; the k-th word is in about one of k of them."""
    dice = random.Random(0)
    texts = [" ".join(word for k, word in enumerate(WORDS, 1) if dice.random() < 1 / k) for _ in range(200)]
    return build_bm25_matrix([Passage(str(i), f"{text} end{i}") for i, text in enumerate(texts)], Tokenizer(stem=False))


@pytest.mark.parametrize("most_bytes", [0, 4 * 200 * 3, 1 << 20])
def test_scores_are_those_of_bm25s_whether_terms_are_added_as_columns_or_one_by_one(matrix, monkeypatch, most_bytes):
    monkeypatch.setattr(scoring, "MAX_COLUMN_BYTES", most_bytes)
    scores = TermScorer(matrix.scores)
    dice = random.Random(1)
    for _ in range(30):
        terms = matrix.get_tokens_ids(dice.choices(WORDS, k=dice.randint(1, 9)))
        assert np.array_equal(scores(terms), matrix.get_scores(terms))
    assert len(scores._columns) <= most_bytes // (4 * 200)
    assert (len(scores._columns) > 0) == (most_bytes > 0)


def test_only_common_terms_become_columns(matrix):
    scores = TermScorer(matrix.scores)
    rare = matrix.get_tokens_ids(["end7"])
    scores(rare)
    assert not scores._columns
    scores(matrix.get_tokens_ids(["w0"]))
    assert len(scores._columns) == 1


def test_a_select_few_are_those_that_sorting_gives_and_equal_ones_go_by_row():
    dice = np.random.default_rng(0)
    for k in (1, 3, 16):
        scores = dice.integers(0, 5, 40).astype(np.float32)
        rows = np.flatnonzero(scores > 0)
        sorted_hits, few = NearestHits(rows, scores[rows]).best(k), _select_few(scores.copy(), k)
        assert few.rows.tolist() == sorted_hits.rows.tolist()
        assert few.scores.tolist() == sorted_hits.scores.tolist()


def test_passages_without_a_word_of_the_query_are_not_among_the_best():
    assert _select_few(np.array([0, 2, 0], np.float32), 3).rows.tolist() == [1]
    assert _select_few(np.zeros(2, np.float32), 3).rows.tolist() == []
