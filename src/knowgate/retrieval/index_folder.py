"""The files of an index folder, and the functions that open it as a retriever.

`index.json`, the manifest, says how the index was built and holds a digest of every file. The list of documents is a
separate file, `documents.jsonl`, so that an index opens quickly. Passages, BM25 scores and vectors are memory-mapped.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from knowgate.core.artifacts import check_artifact_folder, check_digests, compute_digests
from knowgate.core.files import read_jsonl, sha256_text, write_json
from knowgate.core.schema import NonNegativeInt, NumberRange, read_record
from knowgate.core.validation import read_json
from knowgate.errors import BadInput, BadSetting, BrokenIndex
from knowgate.retrieval.bm25 import Bm25Retriever, load_bm25_matrix
from knowgate.retrieval.dense import DenseRetriever, HybridRetriever
from knowgate.retrieval.embeddings import load_embedder
from knowgate.retrieval.passage_store import OFFSETS_FILE, PASSAGES_FILE, PassageStore, read_array
from knowgate.retrieval.tokenizer import Tokenizer
from knowgate.types import Embedder, Passage, Vector

INDEX_FORMAT, INDEX_VERSION = "knowgate-index", 1
MANIFEST_FILE, DOCUMENTS_FILE = "index.json", "documents.jsonl"
BM25_FOLDER, VECTORS_FILE = "bm25", "dense.npy"
ANN_FILE = "dense.ivf"  # version 0.1 wrote it for large indexes; it is no longer read
BM25_FILES = frozenset({PASSAGES_FILE, OFFSETS_FILE, BM25_FOLDER})
DENSE_FILES = frozenset({PASSAGES_FILE, OFFSETS_FILE, VECTORS_FILE})
INDEX_FILES = BM25_FILES | DENSE_FILES | {ANN_FILE, MANIFEST_FILE, DOCUMENTS_FILE}
IndexKind = Literal["bm25", "dense", "hybrid"]


# --- manifest -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IndexSettings:
    """How documents were split and indexed.

    Args:
        max_words: The maximum number of words in a passage.
        stem: Whether words were stemmed. None if the index has no BM25 scores.
        embedder: The spec of the embedding model. '' if the index has no vectors.
        embedder_fingerprint: A hash that identifies the weights of the embedding model.
    """

    max_words: Annotated[int, NumberRange(1)]
    stem: bool | None = None
    embedder: str = ""
    embedder_fingerprint: str = ""


@dataclass(frozen=True)
class IndexManifest:
    """The contents of `index.json`, which describes an index.

    Args:
        kind: How the index can be searched: `bm25`, `dense` or `hybrid` (both).
        settings: How the index was built.
        documents: The number of documents.
        passages: The number of passages.
        fingerprint: A hash that identifies the documents and the settings.
        files: The digest of each file. Early versions of knowgate wrote none.
    """

    kind: IndexKind
    settings: IndexSettings
    documents: NonNegativeInt
    passages: Annotated[int, NumberRange(1)]
    fingerprint: str
    files: Mapping[str, str] = field(default_factory=dict, compare=False)


def write_index_manifest(folder: Path, manifest: IndexManifest) -> None:
    """Write `index.json` with the digests of all other files.

    Call this after all other files are written.
    """
    record = {**dataclasses.asdict(manifest), "files": compute_digests(folder, exclude=[MANIFEST_FILE])}
    write_json(folder / MANIFEST_FILE, {"format": INDEX_FORMAT, "version": INDEX_VERSION, **record})


def read_index_manifest(folder: Path) -> IndexManifest:
    """Read and check the manifest `index.json` of an index folder.

    Raises:
        BrokenIndex: The folder is not an index, or the index is damaged or of another version.
    """
    if not (folder / MANIFEST_FILE).is_file():
        raise broken_index_error(folder, f"the file {MANIFEST_FILE} is missing")
    with _report_damage(folder):
        record = read_json(folder / MANIFEST_FILE)
    if not isinstance(record, dict) or record.get("format") != INDEX_FORMAT:
        raise broken_index_error(folder, f"{MANIFEST_FILE} is not the manifest of a knowgate index")
    if record.get("version") != INDEX_VERSION:
        version = str(record.get("version"))[:40]
        raise broken_index_error(folder, f"the index has version {version}, but knowgate reads version {INDEX_VERSION}")
    check_artifact_folder(folder, lambda problem: broken_index_error(folder, problem))
    with _report_damage(folder):
        return read_record(IndexManifest, record, MANIFEST_FILE, ignore_unknown=True)


def check_index_files(folder: Path, manifest: IndexManifest, names: Collection[str] = INDEX_FILES) -> None:
    """Raise BrokenIndex if a file of an index changed since it was written.

    Args:
        folder: The index folder.
        manifest: Its manifest, which holds the digests.
        names: The files and subfolders to check. Default: all.
    """
    files = {path: digest for path, digest in manifest.files.items() if path.partition("/")[0] in names}
    check_digests(folder, files, lambda problem: broken_index_error(folder, problem))


def is_replaceable(folder: Path) -> bool:
    """Return whether a folder may be overwritten.

    It must be empty or contain only an index.
    """
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    if MANIFEST_FILE not in names or not names <= INDEX_FILES:
        return False
    try:
        record = read_json(folder / MANIFEST_FILE)
    except BadInput:  # the manifest is damaged, so the other files tell whether this was an index
        return {PASSAGES_FILE, OFFSETS_FILE} <= names
    return isinstance(record, dict) and record.get("format") == INDEX_FORMAT


def broken_index_error(folder: Path, problem: str) -> BrokenIndex:
    """Return the error for an index folder that cannot be opened, where `problem` says why."""
    return BrokenIndex(f"the index '{folder}' cannot be opened: {problem}. Rebuild it with `knowgate index`.")


@contextlib.contextmanager
def _report_damage(folder: Path, file: str = "") -> Iterator[None]:
    """Raise errors about missing or damaged files as BrokenIndex, naming the index folder and the file."""
    try:
        yield
    except (BadInput, OSError, ValueError, TypeError, RuntimeError) as error:
        cause = " ".join(str(error).split()).rstrip(".")[:200]
        raise broken_index_error(folder, f"{file}: {cause}" if file else cause) from None


# --- documents ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DocumentRow:
    """A line of `documents.jsonl`: a document of an index.

    Args:
        id: The id of the document.
        sha256: A hash of its title and text.
        first: The row of its first passage. The passages of a document are adjacent.
        count: The number of its passages.
    """

    id: str
    sha256: str
    first: NonNegativeInt
    count: Annotated[int, NumberRange(1)]


def read_document_rows(folder: Path) -> Iterator[DocumentRow]:
    """Yield the documents of an index in order; raise BrokenIndex at a damaged line."""
    with _report_damage(folder, DOCUMENTS_FILE):
        for number, record in read_jsonl(folder / DOCUMENTS_FILE):
            yield read_record(DocumentRow, record, f"line {number}")


# --- opening --------------------------------------------------------------------------------------


def open_bm25(folder: str | Path) -> Bm25Retriever:
    """Open an index folder for BM25 search.

    Raises:
        BrokenIndex: The index is damaged or has no BM25 scores.
        MissingExtra: The index contains stemmed words, and PyStemmer is not installed.
    """
    folder = Path(folder)
    manifest = _read_manifest_for("bm25", folder, BM25_FOLDER, BM25_FILES)
    stem = manifest.settings.stem
    if stem is None:
        raise broken_index_error(folder, f"{MANIFEST_FILE} does not say whether words are stemmed")
    tokenizer = Tokenizer(stem)
    tokenizer("word")  # fails now rather than in the first search if PyStemmer is missing
    matrix = open_bm25_matrix(folder, manifest)
    store = open_passage_store(folder, manifest)
    fingerprint = sha256_text("bm25", manifest.fingerprint)
    retriever = Bm25Retriever(matrix, store, tokenizer=tokenizer, fingerprint=fingerprint)
    retriever.folder = folder.absolute()
    return retriever


def open_dense(folder: str | Path, embedder: Embedder | None = None) -> DenseRetriever:
    """Open an index folder for dense search, which finds passages by meaning.

    Args:
        folder: The index folder.
        embedder: The embedding model that the index was built with. Default: load the one that the manifest names.

    Raises:
        BrokenIndex: The index is damaged, has no vectors, or was built with another embedding model.
    """
    folder = Path(folder)
    manifest = _read_manifest_for("dense", folder, VECTORS_FILE, DENSE_FILES)
    store = open_passage_store(folder, manifest)
    vectors = open_vectors(folder, manifest)
    settings = manifest.settings
    embedder = embedder or load_embedder(settings.embedder)
    if embedder.fingerprint != settings.embedder_fingerprint:
        raise broken_index_error(
            folder,
            f"the index was built with the embedding model '{settings.embedder}' (fingerprint "
            f"{settings.embedder_fingerprint[:12]}), but the current model has fingerprint {embedder.fingerprint[:12]}",
        )
    fingerprint = sha256_text("dense", manifest.fingerprint)
    return DenseRetriever(vectors, store, embedder=embedder, fingerprint=fingerprint)


def open_hybrid(folder: str | Path, embedder: Embedder | None = None) -> HybridRetriever:
    """Open an index folder for BM25 and dense search, whose rankings are merged; takes the arguments of `open_dense`."""
    return HybridRetriever([open_bm25(folder), open_dense(folder, embedder)])


def _read_manifest_for(kind: str, folder: Path, required: str, names: Collection[str]) -> IndexManifest:
    """Read the manifest of an index, and check that the index supports `kind` searches.

    Args:
        kind: `bm25` or `dense`.
        folder: The index folder.
        required: A file or subfolder that exists only if the index was built for this kind of search.
        names: All files and subfolders that this kind of search reads. Their digests are checked.
    """
    manifest = read_index_manifest(folder)
    if not (folder / required).exists():
        raise BrokenIndex(
            f"the index '{folder}' was built as '{manifest.kind}' and cannot be searched as '{kind}'. "
            "Rebuild it with kind='hybrid' to search it both ways."
        )
    check_index_files(folder, manifest, names)
    return manifest


def open_passage_store(folder: Path, manifest: IndexManifest) -> PassageStore:
    """Open the passages of an index, and check their number."""
    with _report_damage(folder):
        store = PassageStore(folder)
    if len(store) != manifest.passages:
        raise broken_index_error(folder, f"the index should contain {manifest.passages} passages but has {len(store)}")
    return store


def open_bm25_matrix(folder: Path, manifest: IndexManifest) -> Any:
    """Open the BM25 scores of an index, and check that they fit the passages."""
    with _report_damage(folder, BM25_FOLDER):
        matrix = load_bm25_matrix(folder / BM25_FOLDER)
    if matrix.scores["num_docs"] != manifest.passages:
        raise broken_index_error(folder, f"the files in '{BM25_FOLDER}' were made for another number of passages")
    return matrix


def open_vectors(folder: Path, manifest: IndexManifest) -> Vector:
    """Memory-map the vectors of an index, and check that they fit the passages."""
    with _report_damage(folder, VECTORS_FILE):
        vectors: Vector = read_array(folder / VECTORS_FILE, kind=np.floating, axes=2)
    if len(vectors) != manifest.passages or vectors.dtype != np.float32 or not vectors.shape[1]:
        raise broken_index_error(folder, f"{VECTORS_FILE} does not hold one float32 vector per passage")
    return vectors


class IndexedPassage(NamedTuple):
    """A passage and its position (row) in the index."""

    row: int
    passage: Passage


def iterate_passages_by_document(folder: str | Path, seed: int = 0) -> Iterator[IndexedPassage]:
    """Yield all passages of an index in random order.

    One passage of each document comes first, then a second one each.

    Args:
        folder: The index folder.
        seed: Changes the order.
    """
    path = Path(folder)
    if not path.is_dir():
        raise BadSetting(f"'{folder}' is not a folder, so its passages cannot be listed. Name the folder of an index.")
    store = open_passage_store(path, read_index_manifest(path))
    documents = sorted(read_document_rows(path), key=lambda document: _hash_for_order(seed, document.id))
    shuffled = [_shuffle_rows(document, seed) for document in documents]
    for position in range(max(map(len, shuffled), default=0)):
        for rows in shuffled:
            if position < len(rows):
                yield IndexedPassage(rows[position], store[rows[position]])


def _shuffle_rows(document: DocumentRow, seed: int) -> list[int]:
    """Return the rows of a document's passages in random order.

    Adding other documents does not change the order.
    """
    numbers = sorted(range(document.count), key=lambda number: _hash_for_order(seed, f"{document.id} {number}"))
    return [document.first + number for number in numbers]


def _hash_for_order(seed: int, name: str) -> str:
    """Return a sort key that gives a random but repeatable order; the constant must not change."""
    return sha256_text("in turn", str(seed), name)
