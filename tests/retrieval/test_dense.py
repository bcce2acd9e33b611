from __future__ import annotations

import numpy as np
import pytest

from knowgate.errors import ModelError
from knowgate.retrieval.dense import DenseRetriever
from knowgate.types import Passage, Vector
from tests.support.retrieval_fakes import CountingEmbedder, unit_vectors


def retriever(vectors: Vector, embedder: object = None) -> DenseRetriever:
    passages = [Passage(str(row), f"text {row}") for row in range(len(vectors))]
    return DenseRetriever(
        vectors,
        passages,
        embedder=embedder or CountingEmbedder(),  # type: ignore[arg-type]
        fingerprint="f",
    )


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
