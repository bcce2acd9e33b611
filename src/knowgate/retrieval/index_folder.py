"""What an index folder says of itself: `index.json` (how it was built) and `documents.jsonl` (from what).

Documents are kept apart so that opening an index to search does not read a line per document.
"""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, overload

import numpy as np

from knowgate.core.artifacts import check_artifact_folder, check_digests, compute_digests
from knowgate.core.files import read_jsonl, sha256_text, write_json
from knowgate.core.schema import NonNegativeInt, NumberRange, read_record
from knowgate.core.validation import read_json
from knowgate.errors import BadInput, BadSetting, BrokenIndex
from knowgate.retrieval import dense as ann
from knowgate.retrieval.bm25 import Bm25Retriever, load_bm25_matrix
from knowgate.retrieval.dense import DenseRetriever, ExactVectorSearch, VectorSearch
from knowgate.retrieval.embeddings import load_embedder
from knowgate.retrieval.hybrid import HybridRetriever
from knowgate.retrieval.passage_store import OFFSETS_FILE, PASSAGES_FILE, PassageStore, read_array
from knowgate.retrieval.tokenizer import Tokenizer, can_stem
from knowgate.types import Embedder, Passage, Vector

DIGEST_BYTES = 32  # bytes of a SHA-256
INDEX_FORMAT, INDEX_VERSION = "knowgate-index", 1
MANIFEST_FILE, DOCUMENTS_FILE, BM25_FOLDER, VECTORS_FILE, ANN_FILE = (
    "index.json",
    "documents.jsonl",
    "bm25",
    "dense.npy",
    "dense.ivf",
)
INDEX_FILES = frozenset(
    {MANIFEST_FILE, DOCUMENTS_FILE, PASSAGES_FILE, OFFSETS_FILE, BM25_FOLDER, VECTORS_FILE, ANN_FILE}
)


@dataclass(frozen=True)
class IndexSettings:
    """How passages are cut and searched. `stem` is None without BM25, the embedder '' without vectors."""

    max_words: Annotated[int, NumberRange(1)]
    stem: bool | None = None
    embedder: str = ""
    embedder_fingerprint: str = ""


@dataclass(frozen=True)
class IndexManifest:
    """`fingerprint` names the documents and the settings; `files` are digests, which earlier versions wrote not."""

    kind: Literal["bm25", "dense", "hybrid"]
    settings: IndexSettings
    documents: NonNegativeInt
    passages: Annotated[int, NumberRange(1)]
    fingerprint: str
    files: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class DocumentRow:
    """A document of the index: the hash of its text, and its passages as rows `first` to `first + count`."""

    id: str
    sha256: str
    first: NonNegativeInt
    count: Annotated[int, NumberRange(1)]


class DocumentTable(Sequence[DocumentRow]):
    """Very many of them, in a fifth of the memory that they take one by one."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._digests = bytearray()
        self._first, self._count = array("q"), array("q")

    def append(self, row: DocumentRow) -> None:
        self._ids.append(row.id)
        self._digests += bytes.fromhex(row.sha256)
        self._first.append(row.first)
        self._count.append(row.count)

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> DocumentRow: ...
    @overload
    def __getitem__(self, place: slice) -> list[DocumentRow]: ...
    def __getitem__(self, place: int | slice) -> DocumentRow | list[DocumentRow]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        row = range(len(self))[place]
        digest = self._digests[DIGEST_BYTES * row : DIGEST_BYTES * (row + 1)].hex()
        return DocumentRow(self._ids[row], digest, self._first[row], self._count[row])


def write_index_manifest(folder: Path, manifest: IndexManifest) -> None:
    """The last file to be written: it names all others."""
    full = {**dataclasses.asdict(manifest), "files": compute_digests(folder, exclude=[MANIFEST_FILE])}
    write_json(folder / MANIFEST_FILE, {"format": INDEX_FORMAT, "version": INDEX_VERSION, **full})


def read_index_manifest(folder: Path) -> IndexManifest:
    """The manifest, or BrokenIndex with what to type."""
    if not folder.is_dir() or not (folder / MANIFEST_FILE).is_file():
        raise broken_index_error(folder, f"there is no {MANIFEST_FILE}")
    try:
        record = read_json(folder / MANIFEST_FILE)
    except BadInput as error:
        raise broken_index_error(folder, str(error).rstrip(".")) from None
    if not isinstance(record, dict) or record.get("format") != INDEX_FORMAT:
        raise broken_index_error(folder, f"{MANIFEST_FILE} was not written by knowgate")
    if record.get("version") != INDEX_VERSION:
        raise broken_index_error(
            folder, f"it has version {str(record.get('version'))[:40]}, this knowgate reads version {INDEX_VERSION}"
        )
    check_artifact_folder(folder, lambda problem: broken_index_error(folder, problem))
    try:
        return read_record(IndexManifest, record, MANIFEST_FILE, ignore_unknown=True)
    except BadInput as error:
        raise broken_index_error(folder, str(error).rstrip(".")) from None


def check_index_files(folder: Path, manifest: IndexManifest, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Refuse files that are not those the index was written with; wanted: by name, those that are about to be read."""
    files = {name: digest for name, digest in manifest.files.items() if wanted(name)}
    check_digests(folder, files, lambda problem: broken_index_error(folder, problem))


def write_document_rows(folder: Path, rows: Iterable[DocumentRow]) -> None:
    with (folder / DOCUMENTS_FILE).open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n")


def read_document_rows(folder: Path) -> Iterator[DocumentRow]:
    try:
        for number, record in read_jsonl(folder / DOCUMENTS_FILE):
            yield read_record(DocumentRow, record, f"line {number}")
    except (OSError, BadInput) as error:
        raise broken_index_error(folder, f"{DOCUMENTS_FILE}: {str(error).rstrip('.')}") from None


def is_replaceable(folder: Path) -> bool:
    """Whether a folder is empty, or an index (whole or broken) and nothing else: else it is not overwritten."""
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    if MANIFEST_FILE not in names or not names <= INDEX_FILES:
        return False
    try:
        record = read_json(folder / MANIFEST_FILE)
    except BadInput:
        return {PASSAGES_FILE, OFFSETS_FILE} <= names
    return isinstance(record, dict) and record.get("format") == INDEX_FORMAT


def broken_index_error(folder: Path, problem: str) -> BrokenIndex:
    return BrokenIndex(
        f"'{folder}' is not an index that can be opened: {problem}. Rebuild it: knowgate index SOURCE --out {folder}"
    )


def open_bm25(folder: str | Path) -> Bm25Retriever:
    """The BM25 part of an index. An index of stemmed words needs PyStemmer to stem the queries alike."""
    folder = Path(folder)
    manifest = _manifest_with(folder, BM25_FOLDER)
    stem = bool(manifest.settings.stem)
    if stem and not can_stem():
        raise BrokenIndex(
            f"'{folder}' was built with stemmed words, and PyStemmer is not installed here. Install it: "
            f"pip install 'knowgate[stem]', or rebuild without it: knowgate index SOURCE --out {folder}"
        )
    store = open_passage_store(folder, manifest)
    matrix = open_bm25_matrix(folder, store)
    fingerprint = sha256_text("bm25", manifest.fingerprint)
    return Bm25Retriever(matrix, store, tokenizer=Tokenizer(stem), fingerprint=fingerprint)


def open_dense(folder: str | Path, embedder: Embedder | None = None) -> DenseRetriever:
    """The dense part of an index, with the embedder it was built with; another one is refused."""
    folder = Path(folder)
    manifest = _manifest_with(folder, VECTORS_FILE)
    store, vectors = open_passage_store(folder, manifest), open_vectors(folder, manifest)
    embedder = embedder or load_embedder(manifest.settings.embedder)
    if embedder.fingerprint != manifest.settings.embedder_fingerprint:
        raise broken_index_error(
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


def open_passage_store(folder: Path, manifest: IndexManifest) -> PassageStore:
    try:
        store = PassageStore(folder)
    except (BadInput, OSError, ValueError) as error:
        raise broken_index_error(folder, _cause(error)) from None
    if len(store) != manifest.passages:
        raise broken_index_error(folder, f"it should hold {manifest.passages} passages and holds {len(store)}")
    return store


def open_bm25_matrix(folder: Path, store: PassageStore) -> Any:
    try:
        matrix = load_bm25_matrix(folder / BM25_FOLDER)
    except (BadInput, OSError, TypeError) as error:  # the last: parameters that bm25s does not know
        raise broken_index_error(folder, f"{BM25_FOLDER}: {_cause(error)}") from None
    if matrix.scores["num_docs"] != len(store):
        raise broken_index_error(folder, f"{BM25_FOLDER} does not fit the passages")
    return matrix


def open_vectors(folder: Path, manifest: IndexManifest) -> Vector:
    try:
        vectors: Vector = read_array(folder / VECTORS_FILE, kind=np.floating, axes=2)
    except (BadInput, OSError) as error:
        raise broken_index_error(folder, f"{VECTORS_FILE}: {_cause(error)}") from None
    if len(vectors) != manifest.passages or vectors.dtype != np.float32 or not vectors.shape[1]:
        raise broken_index_error(folder, f"{VECTORS_FILE} does not fit the passages")
    return vectors


def _cause(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200]


def _manifest_with(folder: Path, part: str) -> IndexManifest:
    manifest = read_index_manifest(folder)
    if not (folder / part).exists():
        wanted = "bm25" if part == BM25_FOLDER else "dense"
        raise BrokenIndex(
            f"'{folder}' was built as '{manifest.kind}' and has no part for '{wanted}'. "
            f"Build both: knowgate index SOURCE --out {folder} --retriever hybrid"
        )
    parts = (
        (PASSAGES_FILE, OFFSETS_FILE, BM25_FOLDER)
        if part == BM25_FOLDER
        else (PASSAGES_FILE, OFFSETS_FILE, VECTORS_FILE, ANN_FILE)
    )
    check_index_files(folder, manifest, lambda name: name.partition("/")[0] in parts)
    return manifest


def _row_search(folder: Path, vectors: Vector) -> VectorSearch:
    """The inverted file where one was built and faiss is installed, else exact search."""
    if not (folder / ANN_FILE).exists() or not ann.has_faiss():
        return ExactVectorSearch(vectors)
    try:
        search = ann.AnnVectorSearch(folder / ANN_FILE, vectors)
    except RuntimeError as error:  # what faiss raises for any file it cannot read
        raise broken_index_error(folder, f"{ANN_FILE}: {error}") from None
    if len(search) != len(vectors):
        raise broken_index_error(folder, f"{ANN_FILE} does not fit {VECTORS_FILE}")
    return search


class IndexedPassage(NamedTuple):
    """A passage and its row in the index."""

    row: int
    passage: Passage


def iterate_passages_by_document(folder: str | Path, seed: int = 0) -> Iterator[IndexedPassage]:
    """One passage of each document, then another of each that has more. The order of documents, and of the passages in
    each, is that of hashes: it depends on the seed and on nothing that a document says."""
    path = Path(folder)
    if not path.is_dir():
        raise BadSetting(f"the passages behind '{folder}' cannot be listed; that takes an index folder.")
    store, documents = open_passage_store(path, read_index_manifest(path)), list(read_document_rows(path))
    orders = [_shuffled(document, seed) for document in sorted(documents, key=lambda one: _place(seed, one.id))]
    for turn in range(max(map(len, orders), default=0)):
        for rows in orders:
            if turn < len(rows):
                yield IndexedPassage(rows[turn], store[rows[turn]])


def _shuffled(document: DocumentRow, seed: int) -> list[int]:
    rows = range(document.first, document.first + document.count)
    return sorted(rows, key=lambda row: _place(seed, f"{document.id} {row - document.first}"))


def _place(seed: int, name: str) -> str:
    return sha256_text("in turn", str(seed), name)
