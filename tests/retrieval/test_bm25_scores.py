from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from knowgate.core.nearest_neighbors import select_top_rows
from knowgate.retrieval import bm25
from knowgate.retrieval.bm25 import K1, B, Postings, select_candidate_rows

# --- the score matrix -------------------------------------------------------------------------------


def make_terms(n_passages):
    """Passages of frequent and rare terms; some are empty."""
    rng = random.Random(0)
    return [[f"w{int(rng.paretovariate(0.7))}" for _ in range(rng.choice([0, 1, 5, 30]))] for _ in range(n_passages)]


def index_with_bm25s(passages):
    import bm25s

    vocabulary = {}
    rows = [[vocabulary.setdefault(term, len(vocabulary)) for term in terms] for terms in passages]
    matrix = bm25s.BM25(k1=K1, b=B, method="lucene")
    matrix.index((rows, vocabulary), create_empty_token=False, show_progress=False)
    return matrix


@pytest.mark.parametrize("block", [1, 7, 64, 1_000])
def test_the_score_matrix_equals_that_of_bm25s(tmp_path, monkeypatch, block):
    monkeypatch.setattr(bm25, "BLOCK_PASSAGES", block)
    passages, postings = make_terms(200), Postings(tmp_path)
    postings.add(iter(passages))
    scores, expected = postings.compute_scores(), index_with_bm25s(passages)
    assert postings.vocabulary == expected.vocab_dict
    assert scores["num_docs"] == expected.scores["num_docs"]
    for name in ("data", "indices", "indptr"):
        assert scores[name].dtype == expected.scores[name].dtype
        assert scores[name].tobytes() == expected.scores[name].tobytes()


def test_counted_blocks_are_stored_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(bm25, "BLOCK_PASSAGES", 50)
    postings = Postings(tmp_path)
    postings.add(make_terms(200))
    assert len(list(tmp_path.glob("block-*.npy"))) == 4
    assert isinstance(postings.compute_scores()["data"], np.memmap)


# --- the best rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 999, 1_000, 12_345])
@pytest.mark.parametrize("k", [1, 3, 12, 2_000])
@pytest.mark.parametrize("positive_share", [0.0, 0.0005, 0.3])
def test_candidate_rows_contain_the_k_best(n, k, positive_share):
    rng = np.random.default_rng([n, k])
    scores = np.where(rng.random(n) < positive_share, rng.integers(1, 40, n) / 8, 0).astype(np.float32)  # many ties
    rows = select_candidate_rows(scores, k)
    assert (scores[rows] > 0).all()
    expected = sorted(np.flatnonzero(scores > 0).tolist(), key=lambda row: (-scores[row], row))[:k]
    assert rows[select_top_rows(scores[rows], k)].tolist() == expected


def test_most_rows_of_a_large_index_are_no_candidates():
    scores = np.random.default_rng(0).random(100_000).astype(np.float32)
    assert len(select_candidate_rows(scores, 3)) < 1_000


def test_importing_bm25s_does_not_import_jax_which_would_reserve_the_gpu(tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')", encoding="utf-8")
    code = "import sys; from knowgate.retrieval.bm25 import import_bm25s as f; f(); f(); print('jax' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
