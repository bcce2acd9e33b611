"""Builds an index folder, or brings one up to date: only new and changed texts are embedded again.

The new folder takes the place of the old one when it is whole; until then the old one stays as it is.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import numpy as np

from knowgate.core.files import atomic_folder, sha256_text, sha256_texts
from knowgate.core.validation import expand_path
from knowgate.errors import BadInput, BadSetting, BrokenIndex, UnknownName
from knowgate.retrieval import dense as ann
from knowgate.retrieval.bm25 import build_bm25_matrix, save_bm25_matrix
from knowgate.retrieval.chunking import MAX_PASSAGE_WORDS, split_document
from knowgate.retrieval.dense import ProgressCallback, write_vectors
from knowgate.retrieval.documents import Corpus, Document, find_documents
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, load_embedder
from knowgate.retrieval.index_folder import (
    ANN_FILE,
    BM25_FOLDER,
    VECTORS_FILE,
    DocumentRow,
    DocumentTable,
    IndexManifest,
    IndexSettings,
    broken_index_error,
    check_index_files,
    is_replaceable,
    open_bm25_matrix,
    open_passage_store,
    open_vectors,
    read_document_rows,
    read_index_manifest,
    write_document_rows,
    write_index_manifest,
)
from knowgate.retrieval.passage_store import PassageStore, PassageWriter
from knowgate.retrieval.tokenizer import Tokenizer, can_stem
from knowgate.types import Embedder, Vector

_PROGRESS_EVERY = 100


@dataclass(frozen=True)
class PreviousIndex:
    """The index that is there already; empty when there is none that can be used."""

    manifest: IndexManifest | None = None
    rows: Mapping[str, DocumentRow] = field(default_factory=dict)
    vectors: Vector | None = None

    def find(self, document: str, max_words: int) -> DocumentRow | None:
        """The row of a document, if its passages were cut to the same size."""
        same_size = self.manifest is not None and self.manifest.settings.max_words == max_words
        return self.rows.get(document) if same_size else None


@dataclass
class CorpusScan:
    """The documents as they are now. `kept` holds for each passage its row in the earlier index, or -1.

    problems: documents that could not be read, and why.
    """

    rows: DocumentTable = field(default_factory=DocumentTable)
    kept: array[int] = field(default_factory=lambda: array("q"))
    added: int = 0
    changed: int = 0
    without_text: int = 0
    problems: dict[str, str] = field(default_factory=dict)


def read_previous_index(folder: Path) -> PreviousIndex:
    """The index in a folder if it is whole; one that is broken or of another version does not count."""
    try:
        manifest = read_index_manifest(folder)
        check_index_files(folder, manifest)
        store = open_passage_store(folder, manifest)
        if manifest.kind != "dense":
            open_bm25_matrix(folder, store)
        vectors = open_vectors(folder, manifest) if manifest.kind != "bm25" else None
        rows = {row.id: row for row in read_document_rows(folder)}
        if any(row.first + row.count > manifest.passages for row in rows.values()):
            raise broken_index_error(folder, "its documents have more passages than it holds")
        return PreviousIndex(manifest, rows, vectors)
    except BrokenIndex:
        return PreviousIndex()


def scan_documents(
    corpus: Corpus, folder: Path, earlier: PreviousIndex, *, max_words: int, progress: ProgressCallback
) -> CorpusScan:
    """Write the passages of all documents to `folder`."""
    scan = CorpusScan(problems=dict(corpus.problems))
    with PassageWriter(folder) as writer:
        for number, document in enumerate(corpus, start=1):
            _add(scan, writer, document, earlier, max_words=max_words)
            if number % _PROGRESS_EVERY == 0:
                progress("read", number, corpus.total)
    if not scan.kept:
        first = f" {next(iter(scan.problems.values()))}" if scan.problems else ""
        raise BadInput(f"the documents of '{corpus.source}' hold no text.{first}")
    progress("read", number, corpus.total)
    return scan


def _add(
    scan: CorpusScan, writer: PassageWriter, document: Document, earlier: PreviousIndex, *, max_words: int
) -> None:
    if document.problem:
        scan.problems[document.id] = document.problem
        return
    passages = split_document(document, max_words)
    if not passages:
        scan.without_text += 1
        return
    row = DocumentRow(document.id, sha256_text(document.title, document.text), len(writer), len(passages))
    writer.write(passages)
    scan.rows.append(row)
    before = earlier.find(document.id, max_words)
    if before and (before.sha256, before.count) == (row.sha256, row.count):
        scan.kept.extend(range(before.first, before.first + before.count))
        return
    scan.kept.extend([-1] * row.count)
    if document.id in earlier.rows:
        scan.changed += 1
    else:
        scan.added += 1


MAX_NAMED_PROBLEMS = 5  # documents that could not be read, in a sentence
IndexKind = Literal["bm25", "dense", "hybrid"]
INDEX_KINDS: tuple[IndexKind, ...] = ("bm25", "dense", "hybrid")
NO_TEXT = "no text"  # how files without text are named in IndexReport.skipped


@dataclass(frozen=True)
class IndexReport:
    """What an index holds and what this run did. `skipped` counts files by suffix, and those without text.

    problems: documents that could not be read, and why: they are not in the index.
    """

    documents: int
    passages: int
    added: int
    changed: int
    removed: int
    unchanged: int
    skipped: Mapping[str, int]
    written: bool  # False: nothing had changed and the folder was left untouched
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def missed(self) -> str:
        """The documents that could not be read, counted and the first of them named; '' where there are none."""
        if not self.problems:
            return ""
        first = list(self.problems.items())[:MAX_NAMED_PROBLEMS]
        named = "; ".join(f"{name!a}: {' '.join(why.split())[:300]}" for name, why in first)
        more = (
            f"; and {len(self.problems) - MAX_NAMED_PROBLEMS} more" if len(self.problems) > MAX_NAMED_PROBLEMS else ""
        )
        return f"{len(self.problems)} could not be read and are left out: {named}{more}"


class _NothingChangedError(Exception):
    """Leaves `new_folder` without replacing anything."""


def build_index(
    source: str | Path,
    out: str | Path,
    *,
    kind: str = "bm25",
    embedder: str | Embedder | None = None,
    max_words: int = MAX_PASSAGE_WORDS,
    progress: ProgressCallback = lambda stage, done, total: None,
) -> IndexReport:
    """Index the documents of `source` in the folder `out`; `progress` is called with (stage, done, total)."""
    source, out = expand_path(source), expand_path(out)
    _check(out, kind, max_words)
    corpus = find_documents(source)
    chosen = _embedder(kind, embedder)
    settings = _settings(kind, chosen, max_words)
    written = True
    try:
        with atomic_folder(out.resolve()) as folder:
            earlier = read_previous_index(out)  # once nobody else writes it
            scan = scan_documents(corpus, folder, earlier, max_words=max_words, progress=progress)
            manifest = _manifest(cast(IndexKind, kind), settings, scan)
            if manifest == earlier.manifest:
                raise _NothingChangedError
            _write_parts(folder, manifest, scan, earlier, embedder=chosen, progress=progress)
    except _NothingChangedError:
        written = False
    return _report(scan, corpus, earlier, written)


def _check(out: Path, kind: str, max_words: int) -> None:
    if kind not in INDEX_KINDS:
        raise UnknownName("retriever", kind, INDEX_KINDS)
    if max_words < 1:
        raise BadSetting(f"max_words is {max_words}; a passage holds at least 1 word.")
    if out.exists() and not (out.is_dir() and is_replaceable(out)):
        raise BadInput(f"'{out}' exists and holds other things than an index. Choose a new or empty folder.")


def _embedder(kind: str, embedder: str | Embedder | None) -> Embedder | None:
    if kind != "bm25":
        return load_embedder(embedder or DEFAULT_EMBEDDER) if isinstance(embedder, str | None) else embedder
    if embedder is not None:
        raise BadSetting("an index of kind 'bm25' uses no embedder. Choose kind 'dense' or 'hybrid'.")
    return None


def _settings(kind: str, embedder: Embedder | None, max_words: int) -> IndexSettings:
    stem = None if kind == "dense" else can_stem()
    if embedder is None:
        return IndexSettings(max_words, stem)
    name = getattr(embedder, "spec", type(embedder).__name__)
    return IndexSettings(max_words, stem, embedder=name, embedder_fingerprint=embedder.fingerprint)


def _manifest(kind: IndexKind, settings: IndexSettings, scan: CorpusScan) -> IndexManifest:
    """The fingerprint leaves out where the embedding model lies: moving a folder changes no search."""
    way = json.dumps([kind, settings.max_words, settings.stem, settings.embedder_fingerprint])
    documents = (text for row in scan.rows for text in (row.id, row.sha256))
    return IndexManifest(
        kind, settings, len(scan.rows), len(scan.kept), sha256_texts(itertools.chain([way], documents))
    )


def _write_parts(
    folder: Path,
    manifest: IndexManifest,
    scan: CorpusScan,
    earlier: PreviousIndex,
    *,
    embedder: Embedder | None,
    progress: ProgressCallback,
) -> None:
    store = PassageStore(folder)
    if manifest.kind != "dense":
        progress("bm25", 0, len(store))
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            save_bm25_matrix(
                build_bm25_matrix(store, Tokenizer(bool(manifest.settings.stem)), Path(scratch)), folder / BM25_FOLDER
            )
        progress("bm25", len(store), len(store))
    if embedder is not None:
        _write_dense(folder, store, scan, _usable(earlier, embedder), embedder=embedder, progress=progress)
    write_document_rows(folder, scan.rows)
    write_index_manifest(folder, manifest)


def _usable(earlier: PreviousIndex, embedder: Embedder) -> PreviousIndex:
    """The earlier index, if the same model made its vectors."""
    made_by = earlier.manifest.settings.embedder_fingerprint if earlier.manifest else ""
    return earlier if made_by == embedder.fingerprint else PreviousIndex()


def _write_dense(
    folder: Path,
    store: PassageStore,
    scan: CorpusScan,
    earlier: PreviousIndex,
    *,
    embedder: Embedder,
    progress: ProgressCallback,
) -> None:
    kept = np.array(scan.kept, dtype=np.int64)
    if earlier.vectors is None:
        kept[:] = -1
    vectors = write_vectors(
        folder / VECTORS_FILE, store, kept=kept, earlier=earlier.vectors, embedder=embedder, progress=progress
    )
    if len(vectors) > ann.MIN_ANN_ROWS and ann.has_faiss():
        progress("ann", 0, len(vectors))
        ann.build_ann_index(vectors, folder / ANN_FILE)
        progress("ann", len(vectors), len(vectors))


def _report(scan: CorpusScan, corpus: Corpus, earlier: PreviousIndex, written: bool) -> IndexReport:
    still_there = len(scan.rows) - scan.added
    return IndexReport(
        documents=len(scan.rows),
        passages=len(scan.kept),
        added=scan.added,
        changed=scan.changed,
        removed=len(earlier.rows) - still_there,
        unchanged=still_there - scan.changed,
        skipped={**corpus.skipped, **({NO_TEXT: scan.without_text} if scan.without_text else {})},
        written=written,
        problems=scan.problems,
    )
