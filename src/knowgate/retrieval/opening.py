"""Opens an index folder for searching, memory-mapped, after checking that its parts fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from knowgate.embedding import open_embedder
from knowgate.errors import BadInput, BrokenIndex
from knowgate.files import sha256_text
from knowgate.retrieval import ann
from knowgate.retrieval.arrays import read_array
from knowgate.retrieval.bm25 import Bm25Retriever, load_matrix
from knowgate.retrieval.dense import DenseRetriever, ExactSearch, RowSearch
from knowgate.retrieval.hybrid import HybridRetriever
from knowgate.retrieval.manifest import ANN, BM25, DENSE, Manifest, broken, check_parts, read_manifest
from knowgate.retrieval.store import OFFSETS, PASSAGES, PassageStore
from knowgate.retrieval.tokens import Tokenizer, can_stem
from knowgate.types import Embedder, Vector


def open_bm25(folder: str | Path) -> Bm25Retriever:
    """The BM25 part of an index. An index of stemmed words needs PyStemmer to stem the queries alike."""
    folder = Path(folder)
    manifest = _manifest_with(folder, BM25)
    stem = bool(manifest.settings.stem)
    if stem and not can_stem():
        raise BrokenIndex(
            f"'{folder}' was built with stemmed words, and PyStemmer is not installed here. Install it: "
            f"pip install 'knowgate[stem]', or rebuild without it: knowgate index SOURCE --out {folder}"
        )
    store = open_store(folder, manifest)
    matrix = open_matrix(folder, store)
    fingerprint = sha256_text("bm25", manifest.fingerprint)
    return Bm25Retriever(matrix, store, tokenizer=Tokenizer(stem), fingerprint=fingerprint)


def open_dense(folder: str | Path, embedder: Embedder | None = None) -> DenseRetriever:
    """The dense part of an index, with the embedder it was built with; another one is refused."""
    folder = Path(folder)
    manifest = _manifest_with(folder, DENSE)
    store, vectors = open_store(folder, manifest), open_vectors(folder, manifest)
    embedder = embedder or open_embedder(manifest.settings.embedder)
    if embedder.fingerprint != manifest.settings.embedder_fingerprint:
        raise broken(
            folder,
            f"it was built with the embedding model '{manifest.settings.embedder}' of fingerprint "
            f"{manifest.settings.embedder_fingerprint[:12]}, the one here has {embedder.fingerprint[:12]}",
        )
    return DenseRetriever(
        _row_search(folder, vectors),
        store,
        embedder=embedder,
        width=vectors.shape[1],
        fingerprint=sha256_text("dense", manifest.fingerprint),
    )


def open_hybrid(folder: str | Path, embedder: Embedder | None = None) -> HybridRetriever:
    """Both parts of an index, fused."""
    return HybridRetriever([open_bm25(folder), open_dense(folder, embedder)])


def open_store(folder: Path, manifest: Manifest) -> PassageStore:
    try:
        store = PassageStore(folder)
    except (BadInput, OSError, ValueError) as error:
        raise broken(folder, _cause(error)) from None
    if len(store) != manifest.passages:
        raise broken(folder, f"it should hold {manifest.passages} passages and holds {len(store)}")
    return store


def open_matrix(folder: Path, store: PassageStore) -> Any:
    try:
        matrix = load_matrix(folder / BM25)
    except (BadInput, OSError, TypeError) as error:  # the last: parameters that bm25s does not know
        raise broken(folder, f"{BM25}: {_cause(error)}") from None
    if matrix.scores["num_docs"] != len(store):
        raise broken(folder, f"{BM25} does not fit the passages")
    return matrix


def open_vectors(folder: Path, manifest: Manifest) -> Vector:
    try:
        vectors: Vector = read_array(folder / DENSE, kind=np.floating, axes=2)
    except (BadInput, OSError) as error:
        raise broken(folder, f"{DENSE}: {_cause(error)}") from None
    if len(vectors) != manifest.passages or vectors.dtype != np.float32 or not vectors.shape[1]:
        raise broken(folder, f"{DENSE} does not fit the passages")
    return vectors


def _cause(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200]


def _manifest_with(folder: Path, part: str) -> Manifest:
    manifest = read_manifest(folder)
    if not (folder / part).exists():
        wanted = "bm25" if part == BM25 else "dense"
        raise BrokenIndex(
            f"'{folder}' was built as '{manifest.kind}' and has no part for '{wanted}'. "
            f"Build both: knowgate index SOURCE --out {folder} --retriever hybrid"
        )
    parts = (PASSAGES, OFFSETS, BM25) if part == BM25 else (PASSAGES, OFFSETS, DENSE, ANN)
    check_parts(folder, manifest, lambda name: name.partition("/")[0] in parts)
    return manifest


def _row_search(folder: Path, vectors: Vector) -> RowSearch:
    """The inverted file where one was built and faiss is installed, else exact search."""
    if not (folder / ANN).exists() or not ann.has_faiss():
        return ExactSearch(vectors)
    try:
        search = ann.AnnSearch(folder / ANN, vectors)
    except RuntimeError as error:  # what faiss raises for any file it cannot read
        raise broken(folder, f"{ANN}: {error}") from None
    if len(search) != len(vectors):
        raise broken(folder, f"{ANN} does not fit {DENSE}")
    return search
