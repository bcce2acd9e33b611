"""Builds an index folder, or brings one up to date: only new and changed texts are embedded again.

The new folder takes the place of the old one when it is whole; until then the old one stays as it is.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import numpy as np

from knowgate.doors import user_path
from knowgate.embedding import DEFAULT, open_embedder
from knowgate.errors import BadInput, BadSetting, UnknownName
from knowgate.files import new_folder, sha256_texts
from knowgate.retrieval import ann
from knowgate.retrieval.bm25 import build_matrix, save_matrix
from knowgate.retrieval.documents import Corpus, find_documents
from knowgate.retrieval.manifest import (
    ANN,
    BM25,
    DENSE,
    Manifest,
    Settings,
    may_replace,
    write_documents,
    write_manifest,
)
from knowgate.retrieval.passages import MAX_WORDS
from knowgate.retrieval.scan import EarlierIndex, Scan, read_earlier, scan_documents
from knowgate.retrieval.store import PassageStore
from knowgate.retrieval.tokens import Tokenizer, can_stem
from knowgate.retrieval.vectors import Progress, write_vectors
from knowgate.types import Embedder

NAMED = 5  # documents that could not be read, in a sentence
Kind = Literal["bm25", "dense", "hybrid"]
KINDS: tuple[Kind, ...] = ("bm25", "dense", "hybrid")
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
        first = list(self.problems.items())[:NAMED]
        named = "; ".join(f"{name!a}: {' '.join(why.split())[:300]}" for name, why in first)
        more = f"; and {len(self.problems) - NAMED} more" if len(self.problems) > NAMED else ""
        return f"{len(self.problems)} could not be read and are left out: {named}{more}"


class _NothingChangedError(Exception):
    """Leaves `new_folder` without replacing anything."""


def build_index(
    source: str | Path,
    out: str | Path,
    *,
    kind: str = "bm25",
    embedder: str | Embedder | None = None,
    max_words: int = MAX_WORDS,
    progress: Progress = lambda stage, done, total: None,
) -> IndexReport:
    """Index the documents of `source` in the folder `out`; `progress` is called with (stage, done, total)."""
    source, out = user_path(source), user_path(out)
    _check(out, kind, max_words)
    corpus = find_documents(source)
    chosen = _embedder(kind, embedder)
    settings = _settings(kind, chosen, max_words)
    written = True
    try:
        with new_folder(out.resolve()) as folder:
            earlier = read_earlier(out)  # once nobody else writes it
            scan = scan_documents(corpus, folder, earlier, max_words=max_words, progress=progress)
            manifest = _manifest(cast(Kind, kind), settings, scan)
            if manifest == earlier.manifest:
                raise _NothingChangedError
            _write_parts(folder, manifest, scan, earlier, embedder=chosen, progress=progress)
    except _NothingChangedError:
        written = False
    return _report(scan, corpus, earlier, written)


def _check(out: Path, kind: str, max_words: int) -> None:
    if kind not in KINDS:
        raise UnknownName("retriever", kind, KINDS)
    if max_words < 1:
        raise BadSetting(f"max_words is {max_words}; a passage holds at least 1 word.")
    if out.exists() and not (out.is_dir() and may_replace(out)):
        raise BadInput(f"'{out}' exists and holds other things than an index. Choose a new or empty folder.")


def _embedder(kind: str, embedder: str | Embedder | None) -> Embedder | None:
    if kind != "bm25":
        return open_embedder(embedder or DEFAULT) if isinstance(embedder, str | None) else embedder
    if embedder is not None:
        raise BadSetting("an index of kind 'bm25' uses no embedder. Choose kind 'dense' or 'hybrid'.")
    return None


def _settings(kind: str, embedder: Embedder | None, max_words: int) -> Settings:
    stem = None if kind == "dense" else can_stem()
    if embedder is None:
        return Settings(max_words, stem)
    name = getattr(embedder, "spec", type(embedder).__name__)
    return Settings(max_words, stem, embedder=name, embedder_fingerprint=embedder.fingerprint)


def _manifest(kind: Kind, settings: Settings, scan: Scan) -> Manifest:
    """The fingerprint leaves out where the embedding model lies: moving a folder changes no search."""
    way = json.dumps([kind, settings.max_words, settings.stem, settings.embedder_fingerprint])
    documents = (text for row in scan.rows for text in (row.id, row.sha256))
    return Manifest(kind, settings, len(scan.rows), len(scan.kept), sha256_texts(itertools.chain([way], documents)))


def _write_parts(
    folder: Path,
    manifest: Manifest,
    scan: Scan,
    earlier: EarlierIndex,
    *,
    embedder: Embedder | None,
    progress: Progress,
) -> None:
    store = PassageStore(folder)
    if manifest.kind != "dense":
        progress("bm25", 0, len(store))
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            save_matrix(build_matrix(store, Tokenizer(bool(manifest.settings.stem)), Path(scratch)), folder / BM25)
        progress("bm25", len(store), len(store))
    if embedder is not None:
        _write_dense(folder, store, scan, _usable(earlier, embedder), embedder=embedder, progress=progress)
    write_documents(folder, scan.rows)
    write_manifest(folder, manifest)


def _usable(earlier: EarlierIndex, embedder: Embedder) -> EarlierIndex:
    """The earlier index, if the same model made its vectors."""
    made_by = earlier.manifest.settings.embedder_fingerprint if earlier.manifest else ""
    return earlier if made_by == embedder.fingerprint else EarlierIndex()


def _write_dense(
    folder: Path, store: PassageStore, scan: Scan, earlier: EarlierIndex, *, embedder: Embedder, progress: Progress
) -> None:
    kept = np.array(scan.kept, dtype=np.int64)
    if earlier.vectors is None:
        kept[:] = -1
    vectors = write_vectors(
        folder / DENSE, store, kept=kept, earlier=earlier.vectors, embedder=embedder, progress=progress
    )
    if len(vectors) > ann.ANN_ROWS and ann.has_faiss():
        progress("ann", 0, len(vectors))
        ann.build_ann(vectors, folder / ANN)
        progress("ann", len(vectors), len(vectors))


def _report(scan: Scan, corpus: Corpus, earlier: EarlierIndex, written: bool) -> IndexReport:
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
