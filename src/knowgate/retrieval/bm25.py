"""BM25 search with bm25s: term scores in a sparse matrix, memory-mapped when opened from disk.

Scores are Lucene's variant (k1 = 1.5, b = 0.75):
    sum over query terms of idf * tf / (tf + k1 * (1 - b + b * length / mean length)),
    idf = ln(1 + (N - df + 0.5) / (df + 0.5))
Reference: Robertson and Zaragoza 2009; Lù 2024 (bm25s).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from knowgate.core.files import sha256_text
from knowgate.core.nearest_neighbors import NearestHits
from knowgate.core.schema import NonNegativeInt, read_record
from knowgate.core.validation import read_json
from knowgate.errors import BadInput, BrokenIndex
from knowgate.retrieval.bm25_scores import Postings, TermScorer, select_candidate_rows
from knowgate.retrieval.passage_store import MAX_SCANNED_VALUES, read_array
from knowgate.retrieval.passages import check_k, format_passage
from knowgate.retrieval.tokenizer import Tokenizer, can_stem
from knowgate.types import Passage

K1, B = 1.5, 0.75


class Bm25Retriever:
    """Finds passages that share words with the query, ranked by their BM25 score.

    Passages without any word of the query are never returned, so there can be fewer than `k` results.

    Args:
        matrix: A `bm25s.BM25` index, which holds the score of each term in each passage.
        passages: The passages, in the order of the rows of `matrix`.
        tokenizer: The tokenizer that the index was built with. It splits the queries in the same way.
        fingerprint: A hash that identifies the documents and the settings of the index.
    """

    name = "bm25"

    def __init__(self, matrix: Any, passages: Sequence[Passage], *, tokenizer: Tokenizer, fingerprint: str):
        self._matrix = matrix
        self._score_terms = TermScorer(matrix.scores)
        self._passages = passages
        self._tokenizer = tokenizer
        self.fingerprint = fingerprint

    @classmethod
    def from_passages(cls, passages: Sequence[Passage], *, stem: bool | None = None) -> Bm25Retriever:
        """Build a retriever over passages in memory, without writing files.

        Args:
            passages: The passages to search.
            stem: Whether to reduce English words to their stems. Default: True if PyStemmer is installed.
        """
        tokenizer = Tokenizer(can_stem() if stem is None else stem)
        fields = [field for passage in passages for field in (passage.id, passage.title, passage.text)]
        fingerprint = sha256_text(cls.name, str(tokenizer.stem), *fields)
        return cls(build_bm25_matrix(passages, tokenizer), passages, tokenizer=tokenizer, fingerprint=fingerprint)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to `k` passages for each query, best first."""
        check_k(k)
        return [self._search(query, k) for query in queries]

    def search_texts(self, queries: Sequence[str], k: int) -> list[list[str]]:
        """Return only the texts of the passages that `search` returns, which takes half the time."""
        check_k(k)
        return [[self._passages[row].text for row in self._find_hits(query, k).rows.tolist()] for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        hits = self._find_hits(query, k)
        passages = [self._passages[row] for row in hits.rows.tolist()]
        pairs = zip(passages, hits.scores.tolist(), strict=True)
        return [Passage(passage.id, passage.text, passage.title, score) for passage, score in pairs]

    def _find_hits(self, query: str, k: int) -> NearestHits:
        """Return the rows and scores of the best passages; empty if the index has none of the query's terms."""
        terms = self._matrix.get_tokens_ids(self._tokenizer(query))
        if not terms:
            return NearestHits(np.zeros(0, np.intp), np.zeros(0, np.float32))
        try:
            scores = self._score_terms(terms)
        except (IndexError, ValueError) as error:
            raise BrokenIndex(
                f"the BM25 files of the index are damaged ({error}). Rebuild the index with `knowgate index`."
            ) from None
        rows = select_candidate_rows(scores, k)
        return NearestHits(rows, scores[rows]).top(k)


def build_bm25_matrix(passages: Iterable[Passage], tokenizer: Tokenizer, scratch: Path | None = None) -> Any:
    """Build a `bm25s.BM25` index, which holds the BM25 score of each term in each passage.

    Args:
        passages: The passages to index. They are read once, in order.
        tokenizer: Splits the passages into terms.
        scratch: A folder for intermediate files and the resulting arrays. With None, everything stays in memory.

    Raises:
        BadInput: The passages contain no words.
    """
    import bm25s  # Imported here because it takes 0.2 s, which would slow down every import of knowgate.

    postings = Postings(scratch)
    postings.add(tokenizer(format_passage(passage)) for passage in passages)
    if not postings.vocabulary:
        raise BadInput("the documents contain no words to index. Choose documents that contain text.")
    matrix = bm25s.BM25(k1=K1, b=B, method="lucene")
    matrix.scores, matrix.vocab_dict = postings.compute_scores(K1, B), postings.vocabulary
    matrix.unique_token_ids_set = set(postings.vocabulary.values())
    # Other BM25 variants also score terms that a passage lacks. Lucene's variant does not.
    matrix.nonoccurrence_array = None
    return matrix


@dataclass(frozen=True)
class Bm25Params:
    """The contents of `params.index.json`, the settings file of a saved bm25s index.

    Only the values that knowgate writes are accepted. bm25s itself would follow any setting in the file.
    """

    k1: float
    b: float
    num_docs: NonNegativeInt
    method: Literal["lucene"]
    idf_method: Literal["lucene"]
    dtype: Literal["float32"]
    int_dtype: Literal["int32", "int64"]
    delta: float = 0.5
    backend: Literal["numpy", "auto"] = "numpy"


@dataclass(frozen=True)
class Bm25Vocabulary:
    """The contents of `vocab.index.json`, which maps each term to its column in the score matrix."""

    words: dict[str, NonNegativeInt]


def load_bm25_matrix(folder: Path) -> Any:
    """Check the files of a saved `bm25s.BM25` index and open it with memory maps.

    Raises:
        BadInput: A file is damaged.
        OSError: A file is missing or cannot be read.
    """
    import bm25s

    params = read_record(Bm25Params, read_json(folder / "params.index.json"), "params.index.json", ignore_unknown=True)
    vocabulary = read_record(Bm25Vocabulary, {"words": read_json(folder / "vocab.index.json")}, "vocab.index.json")
    _check_arrays(folder, params.num_docs, max(vocabulary.words.values(), default=-1))
    matrix = bm25s.BM25.load(folder, mmap=True, show_progress=False, load_vocab=False)
    matrix.vocab_dict = dict(vocabulary.words)
    matrix.unique_token_ids_set = set(vocabulary.words.values())
    return matrix


def _check_arrays(folder: Path, n_passages: int, last_term: int) -> None:
    """Raise BadInput unless the three arrays of the sparse score matrix (CSC format) fit together.

    The scores of term `t` are `data[starts[t]:starts[t + 1]]`, and `rows` names the passage of each score. Row numbers
    are checked only in arrays of up to `MAX_SCANNED_VALUES` values, because reading larger ones takes seconds.
    """
    data = read_array(folder / "data.csc.index.npy", kind=np.floating, axes=1)
    rows = read_array(folder / "indices.csc.index.npy", kind=np.integer, axes=1)
    starts = read_array(folder / "indptr.csc.index.npy", kind=np.integer, axes=1)
    is_consistent = (
        len(starts) > 0
        and starts[0] == 0
        and int(starts[-1]) == len(data) == len(rows)
        and bool((np.diff(starts) >= 0).all())
        and last_term < len(starts) - 1
    )
    if not is_consistent:
        raise BadInput("the BM25 arrays (data, indices, indptr) do not match each other.")
    if 0 < len(rows) <= MAX_SCANNED_VALUES and not (int(rows.min()) >= 0 and int(rows.max()) < n_passages):
        raise BadInput(f"the BM25 arrays name passages outside the {n_passages} of the index.")
