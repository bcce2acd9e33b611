"""Build or update an index folder. An update embeds only new and changed documents.

The new index is written to a temporary folder, which replaces the old index when it is complete. Until then, the old
index stays usable.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from knowgate.core import split_batches
from knowgate.core.files import atomic_folder, sha256_text, sha256_texts
from knowgate.core.options import Count, Options, option, with_options
from knowgate.core.validation import expand_path
from knowgate.errors import BadInput, BadSetting, BrokenIndex
from knowgate.retrieval import index_folder
from knowgate.retrieval.bm25 import build_bm25_matrix
from knowgate.retrieval.chunking import MAX_PASSAGE_WORDS, split_document
from knowgate.retrieval.documents import Corpus, Document, find_documents
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, check_vectors, load_embedder
from knowgate.retrieval.index_folder import DocumentRow, IndexKind, IndexManifest, IndexSettings
from knowgate.retrieval.passage_store import PassageStore, PassageWriter, create_array
from knowgate.retrieval.passages import format_passage
from knowgate.retrieval.tokenizer import Tokenizer, can_stem
from knowgate.types import Embedder, Vector

MAX_NAMED_PROBLEMS = 5  # unreadable documents that a summary names
NO_TEXT = "no text"  # the key under which IndexReport.skipped counts files without text
_PROGRESS_EVERY = 100  # documents between two calls of the progress callback
NO_ROW = -1  # instead of a row number: the passage has no vector in the previous index
_EMBEDDED_AT_ONCE = 512  # passages embedded, or vectors copied, at once
ProgressCallback = Callable[[str, int, int], None]  # stage, done, total (0 while the total is unknown)


class IndexOptions(Options):
    """Options of `build_index`."""

    kind: IndexKind = option(
        "bm25",
        "How to search the documents: by shared words (bm25), by meaning (dense) or both (hybrid).",
        flag_name="retriever",
    )
    max_words: Count = option(MAX_PASSAGE_WORDS, "Maximum length of a passage in words.")


@dataclass
class IndexReport:
    """The contents of an index, and what changed since its previous version.

    Args:
        documents: The number of documents in the index.
        passages: The number of passages in the index.
        added: The number of new documents.
        changed: The number of documents whose text changed.
        removed: The number of documents that no longer exist.
        unchanged: The number of documents that stayed the same.
        skipped: The number of files that were not indexed, by suffix. Files without text are counted as `no text`.
        written: Whether the folder was written. False if nothing changed.
        problems: The documents that could not be read, with the reason for each. They are not in the index.
    """

    documents: int = 0
    passages: int = 0
    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    written: bool = True
    problems: dict[str, str] = field(default_factory=dict)

    def summarize_problems(self) -> str:
        """Describe the unreadable documents in one line, or return ''.

        At most five documents are named, with reasons.
        """
        if not self.problems:
            return ""
        n = len(self.problems)
        first = list(self.problems.items())[:MAX_NAMED_PROBLEMS]
        names = "; ".join(f"{name!a}: {' '.join(reason.split())[:300]}" for name, reason in first)
        more = f"; and {n - len(first)} more" if n > len(first) else ""
        return f"{n} of the documents could not be read and will be missing from the index: {names}{more}"


class _NothingChangedError(Exception):
    """Raised inside `atomic_folder` to discard the new folder and keep the existing one."""


@with_options(IndexOptions)
def build_index(
    source: str | Path,
    out: str | Path,
    *,
    embedder: str | Embedder | None = None,
    progress: ProgressCallback = lambda stage, done, total: None,
    options: IndexOptions,
) -> IndexReport:
    """Build a search index of documents, or update an existing index.

    An update embeds only new and changed documents. If nothing changed, nothing is written.

    Args:
        source: A folder of documents (txt, md, html, pdf), or a JSONL file of {"id", "title", "text"} records.
        out: The index folder to write.
        embedder: The embedding model for the kinds `dense` and `hybrid`, as an object or as a spec for
            `load_embedder`. Default: `minilm`.
        progress: Called during the work with the stage, the number of finished items and their total. The total is 0
            while it is unknown.
        options: The fields of `IndexOptions`. You can also pass them as keyword arguments.

    Returns:
        A report of what the index contains and what changed.

    Raises:
        BadInput: There are no documents with text, or `out` contains something other than an index.
        BadSetting: `embedder` was given for the kind `bm25`, which uses none.

    Example:
        >>> build_index("docs", "docs.index", kind="hybrid")  # doctest: +SKIP
    """
    source = expand_path(source)
    out = expand_path(out)
    if out.exists() and not (out.is_dir() and index_folder.is_replaceable(out)):
        raise BadInput(f"'{out}' exists and is not an index, so it is not overwritten. Choose a new or empty folder.")
    corpus = find_documents(source)
    embedding_model = _choose_embedder(options.kind, embedder)
    settings = _make_settings(options, embedding_model)
    report = IndexReport(skipped=dict(corpus.skipped), problems=dict(corpus.problems))
    try:
        with atomic_folder(out.resolve()) as folder:
            previous = read_previous_index(out)  # read here, because `atomic_folder` holds a lock
            scan = CorpusScan(folder, previous, options.max_words, report)
            scan.read(corpus, progress)
            manifest = _make_manifest(options.kind, settings, scan)
            _write_changed_index(manifest, scan, embedding_model, progress)
    except _NothingChangedError:
        report.written = False
    return report


def _choose_embedder(kind: IndexKind, embedder: str | Embedder | None) -> Embedder | None:
    """Return the embedding model of an index, or None for the kind bm25."""
    if kind == "bm25":
        if embedder is not None:
            raise BadSetting(
                "kind='bm25' uses no `embedder`. Leave `embedder` out, or choose kind='dense' or 'hybrid'."
            )
        return None
    if embedder is None or isinstance(embedder, str):
        return load_embedder(embedder or DEFAULT_EMBEDDER)
    return embedder


def _make_settings(options: IndexOptions, embedder: Embedder | None) -> IndexSettings:
    """Return the settings to store in the manifest of the index."""
    stem = None if options.kind == "dense" else can_stem()  # a dense index contains no words
    if embedder is None:
        return IndexSettings(options.max_words, stem)
    spec = getattr(embedder, "spec", type(embedder).__name__)
    return IndexSettings(options.max_words, stem, embedder=spec, embedder_fingerprint=embedder.fingerprint)


def _make_manifest(kind: IndexKind, settings: IndexSettings, scan: CorpusScan) -> IndexManifest:
    """Make the manifest of a scanned corpus.

    The fingerprint covers the settings and the documents.
    """
    method = json.dumps([kind, settings.max_words, settings.stem, settings.embedder_fingerprint])
    documents = index_folder.read_document_rows(scan.folder)  # reading them from the file again saves memory
    ids_and_hashes = (text for row in documents for text in (row.id, row.sha256))
    fingerprint = sha256_texts(itertools.chain([method], ids_and_hashes))
    return IndexManifest(kind, settings, scan.report.documents, scan.report.passages, fingerprint)


@dataclass(frozen=True)
class PreviousIndex:
    """The existing index before an update. All fields are empty without a usable index.

    Args:
        manifest: Its manifest.
        rows: Its documents by id.
        vectors: Its vectors, if its kind has them.
    """

    manifest: IndexManifest | None = None
    rows: Mapping[str, DocumentRow] = field(default_factory=dict)
    vectors: Vector | None = None

    def has_same_document(self, document: DocumentRow, max_words: int) -> bool:
        """Return whether the index has the same document, split in the same way."""
        if self.manifest is None or self.manifest.settings.max_words != max_words:
            return False
        old = self.rows.get(document.id)
        return old is not None and old.sha256 == document.sha256 and old.count == document.count

    def get_vectors(self, embedder: Embedder) -> Vector | None:
        """Return the vectors of the index, or None if another embedding model made them."""
        is_same = self.manifest and self.manifest.settings.embedder_fingerprint == embedder.fingerprint
        return self.vectors if is_same else None


def read_previous_index(folder: Path) -> PreviousIndex:
    """Read and check the existing index before an update.

    A missing or damaged index gives an empty `PreviousIndex`.
    """
    try:
        manifest = index_folder.read_index_manifest(folder)
        index_folder.check_index_files(folder, manifest)
        # Passages and BM25 scores are opened only to check them.
        index_folder.open_passage_store(folder, manifest)
        if manifest.kind != "dense":
            index_folder.open_bm25_matrix(folder, manifest)
        vectors = index_folder.open_vectors(folder, manifest) if manifest.kind != "bm25" else None
        rows = {row.id: row for row in index_folder.read_document_rows(folder)}
    except BrokenIndex:
        return PreviousIndex()
    is_consistent = all(row.first + row.count <= manifest.passages for row in rows.values())
    return PreviousIndex(manifest, rows, vectors) if is_consistent else PreviousIndex()


@dataclass
class CorpusScan:
    """Reads all documents once, writes their passages, and compares them with the previous index.

    Args:
        folder: The folder to write.
        previous: The index that is updated.
        max_words: The maximum number of words in a passage.
        report: Counts the documents and passages.
        previous_rows: For each passage its row in the previous index, or -1 if its document is new or changed.
    """

    folder: Path
    previous: PreviousIndex
    max_words: int
    report: IndexReport
    previous_rows: array[int] = field(default_factory=lambda: array("q"))

    def read(self, corpus: Corpus, progress: ProgressCallback) -> None:
        """Read all documents and write `documents.jsonl` and the passages.

        Raises:
            BadInput: No document contains text.
        """
        total = len(corpus.files)  # 0 for a JSONL file, whose number of documents is not known before it is read
        path = self.folder / index_folder.DOCUMENTS_FILE
        with PassageWriter(self.folder) as writer, path.open("w", encoding="utf-8", newline="\n") as file:
            for number, document in enumerate(corpus, start=1):
                row = self._add(document, writer)
                if row:
                    file.write(json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n")
                if number % _PROGRESS_EVERY == 0:
                    progress("read", number, total)
        self._check_documents(corpus.source)
        self.report.passages = len(writer)
        self.report.removed = len(self.previous.rows) - self.report.changed - self.report.unchanged
        progress("read", number, total)

    def _check_documents(self, source: Path) -> None:
        """Raise BadInput if no document contains text, naming the first problem."""
        if self.report.documents:
            return
        problems = [f" {problem}" for problem in self.report.problems.values()]
        raise BadInput(
            f"the documents of '{source}' contain no text, so there is nothing to index. Choose documents "
            f"that contain text.{''.join(problems[:1])}"
        )

    def _add(self, document: Document, writer: PassageWriter) -> DocumentRow | None:
        """Write the passages of a document and compare it with the previous index.

        Returns:
            The entry for `documents.jsonl`, or None if the document has no text or could not be read.
        """
        if document.problem:
            self.report.problems[document.id] = document.problem
            return None
        passages = split_document(document, self.max_words)
        if not passages:
            self.report.skipped[NO_TEXT] = self.report.skipped.get(NO_TEXT, 0) + 1
            return None
        digest = sha256_text(document.title, document.text)
        row = DocumentRow(document.id, digest, first=len(writer), count=len(passages))
        writer.write(passages)
        self._compare(row)
        return row

    def _compare(self, row: DocumentRow) -> None:
        """Count a document as unchanged, changed or added, and note the previous index's row of each of its passages."""
        self.report.documents += 1
        if self.previous.has_same_document(row, self.max_words):
            self.report.unchanged += 1
            first = self.previous.rows[row.id].first
            self.previous_rows.extend(range(first, first + row.count))
            return
        self.previous_rows.extend([NO_ROW] * row.count)
        if row.id in self.previous.rows:
            self.report.changed += 1
        else:
            self.report.added += 1


def _write_changed_index(
    manifest: IndexManifest, scan: CorpusScan, embedder: Embedder | None, progress: ProgressCallback
) -> None:
    """Write the search files and the manifest of an index.

    Raises:
        _NothingChangedError: The previous index has the same manifest.
    """
    if manifest == scan.previous.manifest:
        raise _NothingChangedError
    passages = PassageStore(scan.folder)
    if manifest.kind != "dense":
        progress("bm25", 0, len(passages))
        with tempfile.TemporaryDirectory(dir=scan.folder) as scratch:
            matrix = build_bm25_matrix(passages, Tokenizer(bool(manifest.settings.stem)), Path(scratch))
            matrix.save(scan.folder / index_folder.BM25_FOLDER, show_progress=False)
        progress("bm25", len(passages), len(passages))
    if embedder is not None:
        _write_vectors(scan, passages, embedder, progress)
    index_folder.write_index_manifest(scan.folder, manifest)


def _write_vectors(scan: CorpusScan, passages: PassageStore, embedder: Embedder, progress: ProgressCallback) -> None:
    """Write one vector per passage, reusing the vectors of unchanged passages."""
    path = scan.folder / index_folder.VECTORS_FILE
    vectors: Vector | None = None  # created when the width of a vector is known
    previous_vectors = scan.previous.get_vectors(embedder)
    # For each passage, the row of its vector in `previous_vectors`, or NO_ROW if it must be embedded.
    previous_rows = np.array(scan.previous_rows)
    if previous_vectors is None:
        previous_rows = np.full(len(passages), NO_ROW)
    elif (previous_rows != NO_ROW).any():
        vectors = create_array(path, (len(passages), previous_vectors.shape[1]), np.float32)
        for block in split_batches(np.flatnonzero(previous_rows != NO_ROW), _EMBEDDED_AT_ONCE):
            vectors[block] = previous_vectors[previous_rows[block]]
    new_rows = np.flatnonzero(previous_rows == NO_ROW)
    for start in range(0, len(new_rows), _EMBEDDED_AT_ONCE):
        rows = new_rows[start : start + _EMBEDDED_AT_ONCE]
        texts = [format_passage(passages[int(row)]) for row in rows]
        embedded = check_vectors(embedder.embed(texts), len(texts))
        if vectors is None:
            vectors = create_array(path, (len(passages), embedded.shape[1]), np.float32)
        vectors[rows] = embedded
        progress("embed", start + len(rows), len(new_rows))
