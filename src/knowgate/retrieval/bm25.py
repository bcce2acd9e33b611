"""BM25 search with bm25s: precomputed term scores in a sparse matrix, memory-mapped when opened from disk.

Scores are Lucene's variant (k1 = 1.5, b = 0.75):
    sum over query terms of idf * tf / (tf + k1 * (1 - b + b * length / mean length)),
    idf = ln(1 + (N - df + 0.5) / (df + 0.5))
Reference: Robertson and Zaragoza 2009; Lù 2024 (bm25s).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from knowgate.core.files import sha256_text
from knowgate.core.nearest_neighbors import NearestHits
from knowgate.core.schema import NonNegativeInt, read_record
from knowgate.core.validation import read_json
from knowgate.errors import BadInput, BrokenIndex
from knowgate.retrieval.bm25_scores import Postings, TermScorer
from knowgate.retrieval.passage_store import MAX_SCANNED_VALUES, PassageStore, format_indexed_text, read_array
from knowgate.retrieval.ranking import check_k, select_candidate_rows
from knowgate.retrieval.tokenizer import Tokenizer, can_stem
from knowgate.types import Passage, Vector

K1, B = 1.5, 0.75
SMALL_K = 16  # passages: so many are found faster one after another than by sorting


class Bm25Retriever:
    """Finds passages that share words with the query. Passages that share none are not returned."""

    name = "bm25"

    def __init__(self, matrix: Any, passages: Sequence[Passage], *, tokenizer: Tokenizer, fingerprint: str):
        self._matrix = matrix
        self._scores = TermScorer(matrix.scores)
        self._passages = passages
        self._tokenizer = tokenizer
        self.fingerprint = fingerprint

    @classmethod
    def from_passages(cls, passages: Sequence[Passage], *, stem: bool | None = None) -> Bm25Retriever:
        """A retriever in memory; `stem` unless told otherwise if PyStemmer is installed."""
        tokenizer = Tokenizer(can_stem() if stem is None else stem)
        fields = [field for passage in passages for field in (passage.id, passage.title, passage.text)]
        fingerprint = sha256_text(cls.name, str(tokenizer.stem), *fields)
        return cls(build_bm25_matrix(passages, tokenizer), passages, tokenizer=tokenizer, fingerprint=fingerprint)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        hits = self._hits(query, k)
        found = zip(hits.rows.tolist(), hits.scores.tolist(), strict=True)
        return [replace(self._passages[row], score=score) for row, score in found]

    def texts_with(self, query: str, k: int, words: Sequence[str]) -> list[str]:
        """Texts of the k best passages that may hold words (see `counting`)."""
        check_k(k)
        rows = self._hits(query, k).rows
        if isinstance(self._passages, PassageStore):  # its lines can be looked at unread
            return self._passages.texts_with(rows, words)
        return [self._passages[row].text for row in rows.tolist()]

    def _hits(self, query: str, k: int) -> NearestHits:
        terms = self._matrix.get_tokens_ids(self._tokenizer(query))
        if not terms:
            return NearestHits(np.zeros(0, np.intp), np.zeros(0, np.float32))
        try:
            scores = self._scores(terms)
        except (IndexError, ValueError) as error:
            raise BrokenIndex(f"the BM25 part of the index is damaged ({error}). Build the index anew.") from None
        if k <= SMALL_K:
            return _few_best(scores, k)
        rows = select_candidate_rows(scores, k)
        return NearestHits(rows, scores[rows]).best(k)


def _few_best(scores: Vector, k: int) -> NearestHits:
    """As `Hits.best`, of those above 0: the first of equal scores comes first. Takes the scores apart."""
    rows: list[int] = []
    values: list[float] = []
    for _ in range(min(k, len(scores))):
        row = int(scores.argmax())
        if not scores[row] > 0:
            break
        rows.append(row)
        values.append(scores[row])
        scores[row] = 0
    return NearestHits(np.array(rows, np.intp), np.array(values, np.float32))


def build_bm25_matrix(passages: Iterable[Passage], tokenizer: Tokenizer, scratch: Path | None = None) -> Any:
    """The bm25s index. scratch: a folder for what is not to be held in memory, which the matrix then lies in."""
    import bm25s  # here and not above: it takes 0.2 s, which importing knowgate should not

    postings = Postings(scratch)
    postings.add(tokenizer(format_indexed_text(passage)) for passage in passages)
    if not postings.vocabulary:
        raise BadInput("there are no words to index in these documents. Name a folder with text in it.")
    matrix = bm25s.BM25(k1=K1, b=B, method="lucene")
    matrix.scores, matrix.vocab_dict = postings.scores(K1, B), postings.vocabulary
    matrix.unique_token_ids_set = set(postings.vocabulary.values())
    matrix.nonoccurrence_array = None  # of other variants
    return matrix


def save_bm25_matrix(matrix: Any, folder: Path) -> None:
    matrix.save(folder, show_progress=False)


def load_bm25_matrix(folder: Path) -> Any:
    """Open with memory maps. A BadInput or OSError means the files are broken."""
    import bm25s

    params = read_record(Bm25Params, read_json(folder / "params.index.json"), "params.index.json", ignore_unknown=True)
    vocabulary = read_record(Bm25Vocabulary, {"words": read_json(folder / "vocab.index.json")}, "vocab.index.json")
    _check_arrays(folder, params.num_docs, vocabulary)
    matrix = bm25s.BM25.load(folder, mmap=True, show_progress=False, load_vocab=False)
    matrix.vocab_dict = dict(vocabulary.words)
    matrix.unique_token_ids_set = set(vocabulary.words.values())
    return matrix


@dataclass(frozen=True)
class Bm25Params:
    """What bm25s is told on opening: it would follow any of it."""

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
    words: dict[str, NonNegativeInt]


def _check_arrays(folder: Path, documents: int, vocabulary: Bm25Vocabulary) -> None:
    data = read_array(folder / "data.csc.index.npy", kind=np.floating, axes=1)
    rows = read_array(folder / "indices.csc.index.npy", kind=np.integer, axes=1)
    starts = read_array(folder / "indptr.csc.index.npy", kind=np.integer, axes=1)
    fit = (
        len(starts) > 0
        and starts[0] == 0
        and int(starts[-1]) == len(data) == len(rows)
        and bool((np.diff(starts) >= 0).all())
        and max(vocabulary.words.values(), default=-1) < len(starts) - 1
    )
    if not fit:
        raise BadInput("the BM25 arrays do not fit each other.")
    if len(rows) <= MAX_SCANNED_VALUES and len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < documents):
        raise BadInput("the BM25 arrays do not fit the passages.")
