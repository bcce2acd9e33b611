from __future__ import annotations

from pathlib import Path

import pytest

from knowgate.retrieval.dense import AnnVectorSearch, ExactVectorSearch, build_ann_index
from tests.support.retrieval_fakes import unit_vectors

pytest.importorskip("faiss")


def test_the_inverted_file_agrees_with_exact_search_when_every_list_is_visited(tmp_path: Path):
    vectors = unit_vectors(2000)
    build_ann_index(vectors, tmp_path / "ivf")
    search = AnnVectorSearch(tmp_path / "ivf", vectors, visited=10_000)
    exact = ExactVectorSearch(vectors).nearest(vectors[:20], 5)
    found = search.nearest(vectors[:20], 5)
    assert [hits.rows.tolist() for hits in found] == [hits.rows.tolist() for hits in exact]
    assert found[0].scores.tolist() == exact[0].scores.tolist()


def test_the_inverted_file_orders_equal_scores_by_row(tmp_path: Path):
    vectors = unit_vectors(2000)
    vectors[[7, 400, 1999]] = vectors[3]
    build_ann_index(vectors, tmp_path / "ivf")
    (found,) = AnnVectorSearch(tmp_path / "ivf", vectors, visited=10_000).nearest(vectors[3:4], 3)
    assert found.rows.tolist() == [3, 7, 400]
