from __future__ import annotations

import numpy as np
import pytest

from knowgate.errors import ModelError
from knowgate.retrieval.dense import DenseRetriever, ExactVectorSearch
from knowgate.types import Passage, Vector
from tests.support.retrieval_fakes import CountingEmbedder, unit_vectors


def retriever(vectors: Vector, embedder: object = None) -> DenseRetriever:
    passages = [Passage(str(row), f"text {row}") for row in range(len(vectors))]
    return DenseRetriever(
        ExactVectorSearch(vectors),
        passages,
        embedder=embedder or CountingEmbedder(),  # type: ignore[arg-type]
        width=vectors.shape[1],
        fingerprint="f",
    )


def test_block_by_block_search_agrees_with_sorting_all_scores():
    vectors, queries = unit_vectors(1000), unit_vectors(1300)[1000:]
    found = ExactVectorSearch(vectors, block_rows=64).nearest(queries, 10)
    exact = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    expected = np.argsort(-exact, axis=1, kind="stable")[:, :10]
    assert [hits.rows.tolist() for hits in found] == expected.tolist()


def test_equal_scores_are_ordered_by_row_across_blocks():
    vectors = np.tile(unit_vectors(1), (10, 1))
    (hits,) = ExactVectorSearch(vectors, block_rows=3).nearest(vectors[:1], 4)
    assert hits.rows.tolist() == [0, 1, 2, 3]


def test_a_text_finds_itself_with_cosine_one():
    embedder = CountingEmbedder()
    vectors = embedder.embed([f"text {number}" for number in range(20)])
    (found,) = retriever(vectors, embedder).search(["text 7"], 3)
    assert found[0].id == "7"
    assert found[0].score == pytest.approx(1.0)
    assert len(found) == 3


def test_a_k_larger_than_the_corpus_returns_all_passages():
    assert [len(found) for found in retriever(unit_vectors(4)).search(["a", "b"], 100)] == [4, 4]


def test_an_empty_batch_does_not_call_the_model():
    embedder = CountingEmbedder()
    assert retriever(unit_vectors(4), embedder).search([], 3) == []
    assert embedder.seen == []


def test_a_vector_that_is_not_a_number_is_an_error():
    class Broken(CountingEmbedder):
        def vector(self, text: str) -> Vector:
            return np.full(8, np.nan, np.float32)

    with pytest.raises(ModelError, match="not numbers"):
        retriever(unit_vectors(4), Broken()).search(["a"], 1)


def test_a_model_of_another_width_is_an_error():
    with pytest.raises(ModelError, match="returns vectors of 5 numbers, but the index holds vectors of 8"):
        retriever(unit_vectors(4), CountingEmbedder(5)).search(["a"], 1)
