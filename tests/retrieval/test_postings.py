"""Scores worked out block by block are those that bm25s works out at once, to the last bit."""

import random

import numpy as np
import pytest

from knowgate.core.files import sha256_text
from knowgate.retrieval import bm25_scores as postings
from knowgate.retrieval.bm25 import K1, B
from knowgate.retrieval.bm25_scores import Postings
from knowgate.retrieval.index_folder import DocumentRow, DocumentTable


def texts(n, seed=0):
    """Words that are frequent and rare, some passages without any."""
    dice = random.Random(seed)
    return [[f"w{int(dice.paretovariate(0.7))}" for _ in range(dice.choice([0, 1, 5, 30]))] for _ in range(n)]


def at_once(passages):
    import bm25s

    vocabulary = {}
    rows = [[vocabulary.setdefault(term, len(vocabulary)) for term in terms] for terms in passages]
    matrix = bm25s.BM25(k1=K1, b=B, method="lucene")
    matrix.index((rows, vocabulary), create_empty_token=False, show_progress=False)
    return matrix


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("block", [1, 7, 64, 1_000])
def test_the_matrix_is_that_of_bm25s(tmp_path, monkeypatch, block, on_disk):
    monkeypatch.setattr(postings, "BLOCK_PASSAGES", block)
    passages, made = texts(200), Postings(tmp_path if on_disk else None)
    made.add(iter(passages))
    found, wanted = made.compute_scores(K1, B), at_once(passages)
    assert made.vocabulary == wanted.vocab_dict
    assert found["num_docs"] == wanted.scores["num_docs"]
    for name in ("data", "indices", "indptr"):
        assert found[name].dtype == wanted.scores[name].dtype
        assert found[name].tobytes() == wanted.scores[name].tobytes()


def test_blocks_wait_on_disk_and_not_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(postings, "BLOCK_PASSAGES", 50)
    made = Postings(tmp_path)
    made.add(texts(200))
    assert len(list(tmp_path.glob("block-*.npy"))) == 4
    assert isinstance(made.compute_scores(K1, B)["data"], np.memmap)


def test_rows_of_documents_are_the_same_when_they_are_packed():
    rows = [DocumentRow(f"doc {n}", sha256_text(str(n)), 3 * n, 3) for n in range(5)]
    packed = DocumentTable()
    for row in rows:
        packed.append(row)
    assert list(packed) == rows
    assert (len(packed), packed[-1], packed[1:3]) == (5, rows[-1], rows[1:3])
    with pytest.raises(IndexError):
        packed[5]
