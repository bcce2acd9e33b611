from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
import pytest

from knowgate.errors import BadInput, BadSetting
from knowgate.retrieval.bm25 import MAX_QUERY_TERMS, Bm25Retriever
from knowgate.types import Passage
from tests.support.retrieval_fakes import build_bm25

TEXTS = ["red apple red", "green apple tree grows", "blue sky"]


def retriever(texts: Sequence[str] = TEXTS) -> Bm25Retriever:
    passages = [Passage(str(number), text) for number, text in enumerate(texts)]
    return build_bm25(passages, stem=False)


def by_hand(query: str, text: str) -> float:
    """BM25 as in Lucene, written out."""
    documents = [item.split() for item in TEXTS]
    mean = sum(map(len, documents)) / len(documents)
    total = 0.0
    for term in query.split():
        df = sum(term in document for document in documents)
        tf = text.split().count(term)
        idf = log(1 + (len(documents) - df + 0.5) / (df + 0.5))
        total += idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * len(text.split()) / mean))
    return total


def test_scores_are_those_of_the_formula():
    (found,) = retriever().search(["red apple"], 3)
    assert [passage.id for passage in found] == ["0", "1"]
    assert [passage.score for passage in found] == pytest.approx(
        [by_hand("red apple", TEXTS[0]), by_hand("red apple", TEXTS[1])], rel=1e-6
    )


def test_passages_that_share_no_word_are_not_returned():
    (found,) = retriever().search(["sky"], 100)
    assert [passage.id for passage in found] == ["2"]


@pytest.mark.parametrize("query", ["", "the of and", "unheard", "?!"])
def test_a_query_without_known_words_finds_nothing(query: str):
    assert retriever().search([query], 5) == [[]]


def test_no_queries_give_no_results():
    assert retriever().search([], 5) == []


def test_equal_scores_keep_the_order_of_the_corpus():
    (found,) = retriever(["same words"] * 5).search(["same"], 3)
    assert [passage.id for passage in found] == ["0", "1", "2"]


def test_titles_are_searched():
    passages = [Passage("a", "capital of France", title="Paris"), Passage("b", "capital of Italy")]
    (found,) = build_bm25(passages).search(["paris"], 2)
    assert [passage.id for passage in found] == ["a"]


def test_chinese_is_matched_by_character_bigrams():
    (found,) = retriever(["北京是中国的首都", "东京是日本的首都", "水"]).search(["中国首都"], 3)
    assert [passage.id for passage in found] == ["0", "1"]


def test_passages_without_words_are_indexed():
    (found,) = retriever(["...", "red apple", "!"]).search(["apple"], 3)
    assert [passage.id for passage in found] == ["1"]


def test_a_corpus_without_words_is_an_error():
    with pytest.raises(BadInput, match="no words to index"):
        retriever(["...", "the"])


def test_k_must_be_positive():
    with pytest.raises(BadSetting, match="k=0 is not allowed"):
        retriever().search(["red"], 0)


def test_the_scores_of_a_repeated_word_are_read_once():
    class CountingArray(np.ndarray):
        n_slices = 0

        def __getitem__(self, key):
            CountingArray.n_slices += isinstance(key, slice)
            return super().__getitem__(key)

    repeating = retriever()
    scores = repeating._matrix.scores
    scores["data"] = np.asarray(scores["data"]).view(CountingArray)
    (found,) = repeating.search(["red apple " * 1_000], 3)
    assert CountingArray.n_slices == 2
    expected = [1_000 * by_hand("red apple", TEXTS[0]), 1_000 * by_hand("red apple", TEXTS[1])]
    assert [passage.score for passage in found] == pytest.approx(expected, rel=1e-6)


def test_only_the_first_different_words_of_a_query_are_searched():
    words = [f"w{number}" for number in range(MAX_QUERY_TERMS + 100)]
    (found,) = retriever(words).search([" ".join(["w0", *words])], 5_000)
    assert {passage.id for passage in found} == {str(number) for number in range(MAX_QUERY_TERMS)}
