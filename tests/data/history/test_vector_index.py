"""The vector index: exact search against a full sort, and the faiss index against exact search."""

from __future__ import annotations

import numpy as np
import pytest

from knowgate.data.history.vector_index import IndexLocation, VectorIndex, erase_rows, open_ann_index, write_ann_index
from tests.support.index_builder import wait_for_builder


def make_unit_vectors(rows, width=16, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def make_clustered_vectors(rows, width=16, seed=0):
    """Vectors like those of questions: 200 topics with noise."""
    rng = np.random.default_rng(seed)
    topics = np.random.default_rng(99).standard_normal((200, width))
    vectors = topics[rng.integers(0, 200, rows)] + 0.6 * rng.standard_normal((rows, width))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def make_exact_index(vectors):
    index = VectorIndex(16)
    index.add(range(len(vectors)), vectors)
    return index


def test_exact_neighbors_equal_a_full_sort():
    vectors, queries = make_unit_vectors(3000), make_unit_vectors(5, seed=1)
    index = VectorIndex(16)
    for start in range(0, 3000, 700):
        index.add(range(start, min(start + 700, 3000)), vectors[start : start + 700])
    for query, hits in zip(queries, index.nearest(queries, 7), strict=True):
        scores = vectors.astype(np.float64) @ query.astype(np.float64)
        assert [number for number, _ in hits] == list(np.argsort(-scores)[:7])


def test_equal_neighbors_are_ordered_by_id():
    index = VectorIndex(16)
    for start in range(0, 300, 70):
        index.add(range(start, min(start + 70, 300)), np.tile(make_unit_vectors(1), (min(70, 300 - start), 1)))
    (hits,) = index.nearest(make_unit_vectors(1), 5)
    assert [number for number, _ in hits] == [0, 1, 2, 3, 4]
    assert len({similarity for _, similarity in hits}) == 1


def test_dropped_rows_are_not_found():
    vectors = make_unit_vectors(100)
    index = make_exact_index(vectors)
    index.keep_in_memory(set(range(50)))
    assert len(index) == 50
    assert all(number < 50 for number, _ in index.nearest(vectors[70:71], 50)[0])


# --- with faiss -----------------------------------------------------------------------------------


@pytest.fixture
def location(tmp_path, monkeypatch):
    pytest.importorskip("faiss")
    monkeypatch.setattr("knowgate.data.history.vector_index.EXACT_SEARCH_ROWS", 100)
    return IndexLocation(tmp_path / "log-lists", "scope", "log")


def build_index(location, vectors):
    """Return an index whose rows are all in the faiss index."""
    index = VectorIndex(16, location)
    index.add(range(len(vectors)), vectors)
    index.nearest(vectors[:1], 1)  # starts the builder; the search itself is exact
    wait_for_builder(index)
    return index


def test_a_faiss_index_with_all_lists_probed_equals_exact_search(location):
    vectors, queries = make_unit_vectors(400), make_unit_vectors(5, seed=1)
    vectors[[8, 9, 10]] = vectors[5]
    index, exact = build_index(location, vectors), make_exact_index(vectors)
    assert index.last_indexed_id == 399
    assert [number for number, _ in index.nearest(vectors[5:6], 3)[0]] == [5, 8, 9]
    assert index.nearest(queries, 10) == exact.nearest(queries, 10)


def test_a_few_probed_lists_hold_nearly_all_exact_neighbors(location, monkeypatch):
    monkeypatch.setattr("knowgate.data.history.vector_index.MIN_PROBED_ROWS", 1000)
    vectors, queries = make_clustered_vectors(10_000), make_clustered_vectors(50, seed=1)
    index, exact = build_index(location, vectors), make_exact_index(vectors)
    pairs = zip(index.nearest(queries, 10), exact.nearest(queries, 10), strict=True)
    assert np.mean([len(dict(hits).keys() & dict(expected).keys()) / 10 for hits, expected in pairs]) > 0.9


def test_new_rows_are_found_at_once_and_later_moved_into_the_index(location, monkeypatch):
    vectors = make_clustered_vectors(3000)
    monkeypatch.setattr("knowgate.data.history.vector_index.FRESH_ROWS", 500)
    index = build_index(location, vectors[:2000])
    index.add(range(2000, 2400), vectors[2000:2400])
    assert index.nearest(vectors[2300:2301], 1)[0][0][0] == 2300
    assert index.last_indexed_id == 1999
    index.add(range(2400, 3000), vectors[2400:])
    index.nearest(vectors[:1], 1)
    wait_for_builder(index)
    assert (index.last_indexed_id, len(index)) == (2999, 3000)
    assert index.nearest(vectors[::300], 5) == make_exact_index(vectors).nearest(vectors[::300], 5)
    assert len(list(location.folder.glob("*.faiss"))) == 1


def test_the_next_process_opens_the_stored_index_of_the_same_log(location):
    vectors = make_clustered_vectors(2000)
    build_index(location, vectors)
    again = VectorIndex(16, location)
    assert (again.last_indexed_id, len(again)) == (1999, 2000)
    assert again.nearest(vectors[:3], 4) == make_exact_index(vectors).nearest(vectors[:3], 4)
    other_log = IndexLocation(location.folder, location.name, "another log")
    assert VectorIndex(16, other_log).last_indexed_id == -1
    assert VectorIndex(8, location).last_indexed_id == -1


@pytest.mark.parametrize("pattern", ["*.faiss", "*.json"])
def test_a_damaged_index_is_ignored(location, pattern):
    build_index(location, make_clustered_vectors(500))
    (file,) = location.folder.glob(pattern)
    file.write_bytes(file.read_bytes()[:60])
    assert VectorIndex(16, location).last_indexed_id == -1


def test_erased_rows_leave_the_files_and_are_not_found(location):
    vectors = make_clustered_vectors(600)
    build_index(location, vectors)
    erase_rows(location.folder, [7, 11])
    index = VectorIndex(16, location)
    assert len(index) == 598
    assert 7 not in [number for number, _ in index.nearest(vectors[7:8], 600)[0]]
    (file,) = location.folder.glob("*.faiss")
    assert vectors[7].tobytes() not in file.read_bytes()
    assert vectors[8].tobytes() in file.read_bytes()


def test_files_of_earlier_versions_are_removed_when_rows_are_erased(location):
    location.folder.mkdir()
    (location.folder / "scope-abc.vectors.npy").touch()
    erase_rows(location.folder, [1])
    assert list(location.folder.glob("*.npy")) == []


def test_an_index_is_extended_by_later_rows(location):
    vectors, lists = make_unit_vectors(600), []
    for first, end in ((0, 100), (100, 350), (350, 600)):
        old = open_ann_index(location, 16)
        write_ann_index(location, np.arange(first, end), vectors[first:end], old)
        index = open_ann_index(location, 16)
        lists.append((len(index), index.index.nlist, index.manifest.last))
    assert lists == [(100, 20, 99), (350, 20, 349), (600, 20, 599)]
    found = [index.nearest(vector, 1)[0][0] for vector in vectors[::100]]
    assert found == list(range(0, 600, 100))


def test_search_stays_exact_if_the_index_cannot_be_stored(location, caplog):
    location.folder.write_text("a file where the folder should be")
    vectors = make_clustered_vectors(500)
    index = build_index(location, vectors)
    assert index.last_indexed_id == -1
    assert "so searches are slower" in caplog.text
    assert index.nearest(vectors[:2], 3) == make_exact_index(vectors).nearest(vectors[:2], 3)


def test_search_is_exact_without_faiss(location, monkeypatch):
    monkeypatch.setattr("knowgate.data.history.vector_index.has_faiss", lambda: False)
    vectors = make_clustered_vectors(500)
    index = build_index(location, vectors)
    assert index.last_indexed_id == -1
    assert index.nearest(vectors[:2], 3) == make_exact_index(vectors).nearest(vectors[:2], 3)
