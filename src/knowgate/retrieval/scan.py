"""Reads the documents once, writes their passages, and notes what an earlier index of them still holds.

Knows nothing of BM25 or of embedding.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from knowgate.errors import BadInput, BrokenIndex
from knowgate.files import sha256_text
from knowgate.retrieval.documents import Corpus, Document
from knowgate.retrieval.manifest import (
    DocumentRow,
    DocumentRows,
    Manifest,
    broken,
    check_parts,
    read_documents,
    read_manifest,
)
from knowgate.retrieval.opening import open_matrix, open_store, open_vectors
from knowgate.retrieval.passages import cut
from knowgate.retrieval.store import PassageWriter
from knowgate.retrieval.vectors import Progress
from knowgate.types import Vector

_PROGRESS_EVERY = 100


@dataclass(frozen=True)
class EarlierIndex:
    """The index that is there already; empty when there is none that can be used."""

    manifest: Manifest | None = None
    rows: Mapping[str, DocumentRow] = field(default_factory=dict)
    vectors: Vector | None = None

    def find(self, document: str, max_words: int) -> DocumentRow | None:
        """The row of a document, if its passages were cut to the same size."""
        same_size = self.manifest is not None and self.manifest.settings.max_words == max_words
        return self.rows.get(document) if same_size else None


@dataclass
class Scan:
    """The documents as they are now. `kept` holds for each passage its row in the earlier index, or -1.

    problems: documents that could not be read, and why.
    """

    rows: DocumentRows = field(default_factory=DocumentRows)
    kept: array[int] = field(default_factory=lambda: array("q"))
    added: int = 0
    changed: int = 0
    without_text: int = 0
    problems: dict[str, str] = field(default_factory=dict)


def read_earlier(folder: Path) -> EarlierIndex:
    """The index in a folder if it is whole; one that is broken or of another version does not count."""
    try:
        manifest = read_manifest(folder)
        check_parts(folder, manifest)
        store = open_store(folder, manifest)
        if manifest.kind != "dense":
            open_matrix(folder, store)
        vectors = open_vectors(folder, manifest) if manifest.kind != "bm25" else None
        rows = {row.id: row for row in read_documents(folder)}
        if any(row.first + row.count > manifest.passages for row in rows.values()):
            raise broken(folder, "its documents have more passages than it holds")
        return EarlierIndex(manifest, rows, vectors)
    except BrokenIndex:
        return EarlierIndex()


def scan_documents(corpus: Corpus, folder: Path, earlier: EarlierIndex, *, max_words: int, progress: Progress) -> Scan:
    """Write the passages of all documents to `folder`."""
    scan = Scan(problems=dict(corpus.problems))
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


def _add(scan: Scan, writer: PassageWriter, document: Document, earlier: EarlierIndex, *, max_words: int) -> None:
    if document.problem:
        scan.problems[document.id] = document.problem
        return
    passages = cut(document, max_words)
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
