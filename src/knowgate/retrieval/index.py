"""Build an index folder or update one: only new and changed documents are embedded again.

The new folder replaces the old one when it is complete; until then the old one stays usable.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import Field

from knowgate.core.files import atomic_folder, sha256_text, sha256_texts
from knowgate.core.options import Count, Options, with_options
from knowgate.core.validation import expand_path
from knowgate.errors import BadInput, BadSetting, BrokenIndex
from knowgate.retrieval import dense
from knowgate.retrieval.bm25 import build_bm25_matrix
from knowgate.retrieval.chunking import MAX_PASSAGE_WORDS, split_document
from knowgate.retrieval.dense import ProgressCallback
from knowgate.retrieval.documents import Corpus, Document, find_documents
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, load_embedder
from knowgate.retrieval.index_folder import (
    ANN_FILE,
    BM25_FOLDER,
    VECTORS_FILE,
    DocumentRow,
    DocumentTable,
    IndexKind,
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

MAX_NAMED_PROBLEMS = 5
NO_TEXT = "no text"  # the key of files without text in IndexReport.skipped
_PROGRESS_EVERY = 100  # documents


class IndexOptions(Options):
    """Options of `build_index`."""

    kind: IndexKind = Field(
        "bm25",
        description="Index for search by shared words (bm25), by meaning (dense) or both (hybrid).",
        json_schema_extra={"flag": "--retriever"},
    )
    max_words: Count = Field(MAX_PASSAGE_WORDS, description="Longest passage in words.")


@dataclass(frozen=True)
class IndexReport:
    """What an index holds and what building it changed.

    Args:
        documents: The number of documents in the index.
        passages: The number of passages in the index.
        added: Documents that are new.
        changed: Documents whose text changed.
        removed: Documents that are gone.
        unchanged: Documents that stayed the same.
        skipped: Counts files that were not indexed, by suffix; those without text under `no text`.
        written: False if nothing had changed, so that the folder was left untouched.
        problems: Documents that could not be read, and why. They are not in the index.
    """

    documents: int
    passages: int
    added: int
    changed: int
    removed: int
    unchanged: int
    skipped: Mapping[str, int]
    written: bool
    problems: Mapping[str, str] = field(default_factory=dict)

    def summarize_problems(self) -> str:
        """Count the documents that could not be read and name the first ones; '' if there are none."""
        if not self.problems:
            return ""
        first = list(self.problems.items())[:MAX_NAMED_PROBLEMS]
        names = "; ".join(f"{name!a}: {' '.join(reason.split())[:300]}" for name, reason in first)
        more = f"; and {len(self.problems) - MAX_NAMED_PROBLEMS} more" if len(self.problems) > len(first) else ""
        return f"{len(self.problems)} could not be read and are left out: {names}{more}"


class _NothingChangedError(Exception):
    """Raised inside `atomic_folder` to keep the existing folder."""


def _ignore_progress(stage: str, done: int, total: int) -> None:
    """Do nothing."""


@with_options(IndexOptions)
def build_index(
    source: str | Path,
    out: str | Path,
    *,
    embedder: str | Embedder | None = None,
    progress: ProgressCallback = _ignore_progress,
    options: IndexOptions,
) -> IndexReport:
    """Index documents, or update an existing index of them.

    Args:
        source: A folder of documents (txt, md, html, pdf), or a JSONL file of {"id", "title", "text"}.
        out: The index folder to write.
        embedder: Embedding model for `kind` dense and hybrid: an object or a spec of `load_embedder`. Default: minilm.
        progress: Called with (stage, done, total) during the work; total is 0 while unknown.
        options: See below; the fields can be passed as keywords.

    Returns:
        What the index holds and what changed.

    Raises:
        BadInput: There are no documents, or `out` holds something other than an index.

    Example:
        >>> build_index("docs", "docs.index", kind="hybrid")  # doctest: +SKIP
    """
    source, out = expand_path(source), expand_path(out)
    if out.exists() and not (out.is_dir() and is_replaceable(out)):
        raise BadInput(f"'{out}' exists and is not an index. Choose a new or empty folder.")
    corpus = find_documents(source)
    embedding_model = _choose_embedder(options.kind, embedder)
    settings = _make_settings(options, embedding_model)
    written = True
    try:
        with atomic_folder(out.resolve()) as folder:
            previous = read_previous_index(out)  # inside, where no other process writes it
            scan = scan_documents(corpus, folder, previous, max_words=options.max_words, progress=progress)
            manifest = _make_manifest(options.kind, settings, scan)
            if manifest == previous.manifest:
                raise _NothingChangedError
            _write_parts(folder, manifest, scan, previous, embedder=embedding_model, progress=progress)
    except _NothingChangedError:
        written = False
    return _make_report(scan, corpus, previous, written)


def _choose_embedder(kind: IndexKind, embedder: str | Embedder | None) -> Embedder | None:
    if kind == "bm25":
        if embedder is not None:
            raise BadSetting("kind='bm25' uses no `embedder`. Choose kind='dense' or kind='hybrid', or leave it out.")
        return None
    return load_embedder(embedder or DEFAULT_EMBEDDER) if isinstance(embedder, str | None) else embedder


def _make_settings(options: IndexOptions, embedder: Embedder | None) -> IndexSettings:
    stem = None if options.kind == "dense" else can_stem()
    if embedder is None:
        return IndexSettings(options.max_words, stem)
    spec = getattr(embedder, "spec", type(embedder).__name__)
    return IndexSettings(options.max_words, stem, embedder=spec, embedder_fingerprint=embedder.fingerprint)


def _make_manifest(kind: IndexKind, settings: IndexSettings, scan: CorpusScan) -> IndexManifest:
    """Make the manifest; its fingerprint does not cover the embedder's path, because moving a model changes nothing."""
    method = json.dumps([kind, settings.max_words, settings.stem, settings.embedder_fingerprint])
    documents = (text for row in scan.rows for text in (row.id, row.sha256))
    fingerprint = sha256_texts(itertools.chain([method], documents))
    return IndexManifest(kind, settings, len(scan.rows), len(scan.previous_rows), fingerprint)


# --- documents and passages -----------------------------------------------------------------------


@dataclass(frozen=True)
class PreviousIndex:
    """The index that is updated; empty if there is none that can be used."""

    manifest: IndexManifest | None = None
    rows: Mapping[str, DocumentRow] = field(default_factory=dict)
    vectors: Vector | None = None

    def find(self, document_id: str, max_words: int) -> DocumentRow | None:
        """Return the row of a document if its passages were split to the same size."""
        has_same_size = self.manifest is not None and self.manifest.settings.max_words == max_words
        return self.rows.get(document_id) if has_same_size else None


@dataclass
class CorpusScan:
    """The documents as they are now.

    Args:
        rows: One row per document with text.
        previous_rows: For each passage its row in the previous index, or -1 if it is new.
        added: Documents that the previous index lacks.
        changed: Documents whose text differs from the previous index.
        without_text: Documents without text.
        problems: Documents that could not be read, and why.
    """

    rows: DocumentTable = field(default_factory=DocumentTable)
    previous_rows: array[int] = field(default_factory=lambda: array("q"))
    added: int = 0
    changed: int = 0
    without_text: int = 0
    problems: dict[str, str] = field(default_factory=dict)


def read_previous_index(folder: Path) -> PreviousIndex:
    """Read the index in a folder; a missing or broken one, or one of another version, counts as empty."""
    try:
        manifest = read_index_manifest(folder)
        check_index_files(folder, manifest)
        open_passage_store(folder, manifest)
        if manifest.kind != "dense":
            open_bm25_matrix(folder, manifest)
        vectors = open_vectors(folder, manifest) if manifest.kind != "bm25" else None
        rows = {row.id: row for row in read_document_rows(folder)}
        if any(row.first + row.count > manifest.passages for row in rows.values()):
            raise broken_index_error(folder, "its documents have more passages than it holds")
        return PreviousIndex(manifest, rows, vectors)
    except BrokenIndex:
        return PreviousIndex()


def scan_documents(
    corpus: Corpus, folder: Path, previous: PreviousIndex, *, max_words: int, progress: ProgressCallback
) -> CorpusScan:
    """Read all documents once and write their passages to `folder`."""
    scan = CorpusScan(problems=dict(corpus.problems))
    with PassageWriter(folder) as writer:
        for number, document in enumerate(corpus, start=1):
            _add_document(scan, writer, document, previous, max_words=max_words)
            if number % _PROGRESS_EVERY == 0:
                progress("read", number, corpus.total)
    if not scan.previous_rows:
        problem = f" {next(iter(scan.problems.values()))}" if scan.problems else ""
        raise BadInput(f"the documents of '{corpus.source}' contain no text.{problem}")
    progress("read", number, corpus.total)
    return scan


def _add_document(
    scan: CorpusScan, writer: PassageWriter, document: Document, previous: PreviousIndex, *, max_words: int
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
    old_row = previous.find(document.id, max_words)
    if old_row and (old_row.sha256, old_row.count) == (row.sha256, row.count):
        scan.previous_rows.extend(range(old_row.first, old_row.first + old_row.count))
        return
    scan.previous_rows.extend([-1] * row.count)
    if document.id in previous.rows:
        scan.changed += 1
    else:
        scan.added += 1


# --- files ----------------------------------------------------------------------------------------


def _write_parts(
    folder: Path,
    manifest: IndexManifest,
    scan: CorpusScan,
    previous: PreviousIndex,
    *,
    embedder: Embedder | None,
    progress: ProgressCallback,
) -> None:
    store = PassageStore(folder)
    if manifest.kind != "dense":
        progress("bm25", 0, len(store))
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            matrix = build_bm25_matrix(store, Tokenizer(bool(manifest.settings.stem)), Path(scratch))
            matrix.save(folder / BM25_FOLDER, show_progress=False)
        progress("bm25", len(store), len(store))
    if embedder is not None:
        _write_dense(folder, store, scan, previous, embedder=embedder, progress=progress)
    write_document_rows(folder, scan.rows)
    write_index_manifest(folder, manifest)


def _write_dense(
    folder: Path,
    store: PassageStore,
    scan: CorpusScan,
    previous: PreviousIndex,
    *,
    embedder: Embedder,
    progress: ProgressCallback,
) -> None:
    """Write the vectors, reusing those of the previous index if the same model made them, and the ANN index."""
    previous_fingerprint = previous.manifest.settings.embedder_fingerprint if previous.manifest else ""
    reused = previous.vectors if previous_fingerprint == embedder.fingerprint else None
    previous_rows = np.array(scan.previous_rows, dtype=np.int64)
    if reused is None:
        previous_rows[:] = -1
    vectors = dense.write_vectors(
        folder / VECTORS_FILE,
        store,
        previous_rows=previous_rows,
        previous_vectors=reused,
        embedder=embedder,
        progress=progress,
    )
    if len(vectors) > dense.MIN_ANN_ROWS and dense.has_faiss():
        progress("ann", 0, len(vectors))
        dense.build_ann_index(vectors, folder / ANN_FILE)
        progress("ann", len(vectors), len(vectors))


def _make_report(scan: CorpusScan, corpus: Corpus, previous: PreviousIndex, written: bool) -> IndexReport:
    remaining = len(scan.rows) - scan.added
    return IndexReport(
        documents=len(scan.rows),
        passages=len(scan.previous_rows),
        added=scan.added,
        changed=scan.changed,
        removed=len(previous.rows) - remaining,
        unchanged=remaining - scan.changed,
        skipped={**corpus.skipped, **({NO_TEXT: scan.without_text} if scan.without_text else {})},
        written=written,
        problems=scan.problems,
    )
