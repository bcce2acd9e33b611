"""The passages of an index folder, in turn over its documents: the first few of them show something of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from knowgate.errors import BadSetting
from knowgate.files import sha256_text
from knowgate.retrieval.manifest import DocumentRow, read_documents, read_manifest
from knowgate.retrieval.opening import open_store
from knowgate.types import Passage


class Placed(NamedTuple):
    """A passage and its row in the index."""

    row: int
    passage: Passage


def passages_in_turn(folder: str | Path, seed: int = 0) -> Iterator[Placed]:
    """One passage of each document, then another of each that has more. The order of documents, and of the passages in
    each, is that of hashes: it depends on the seed and on nothing that a document says."""
    path = Path(folder)
    if not path.is_dir():
        raise BadSetting(f"the passages behind '{folder}' cannot be listed; that takes an index folder.")
    store, documents = open_store(path, read_manifest(path)), list(read_documents(path))
    orders = [_shuffled(document, seed) for document in sorted(documents, key=lambda one: _place(seed, one.id))]
    for turn in range(max(map(len, orders), default=0)):
        for rows in orders:
            if turn < len(rows):
                yield Placed(rows[turn], store[rows[turn]])


def _shuffled(document: DocumentRow, seed: int) -> list[int]:
    rows = range(document.first, document.first + document.count)
    return sorted(rows, key=lambda row: _place(seed, f"{document.id} {row - document.first}"))


def _place(seed: int, name: str) -> str:
    return sha256_text("in turn", str(seed), name)
