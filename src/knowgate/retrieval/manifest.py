"""What an index folder says of itself: `index.json` (how it was built) and `documents.jsonl` (from what).

Documents are kept apart so that opening an index to search does not read a line per document.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knowgate.doors import read_json
from knowgate.errors import BadInput, BrokenIndex
from knowgate.files import read_jsonl, write_json
from knowgate.retrieval.store import OFFSETS, PASSAGES

FORMAT, VERSION = "knowgate-index", 1
MANIFEST, DOCUMENTS, BM25, DENSE, ANN = "index.json", "documents.jsonl", "bm25", "dense.npy", "dense.ivf"
OWN_NAMES = frozenset({MANIFEST, DOCUMENTS, PASSAGES, OFFSETS, BM25, DENSE, ANN})


@dataclass(frozen=True)
class Settings:
    """How passages are cut and searched. `stem` is None without BM25, the embedder '' without vectors."""

    max_words: int
    stem: bool | None = None
    embedder: str = ""
    embedder_fingerprint: str = ""


@dataclass(frozen=True)
class Manifest:
    """`fingerprint` names the documents and the settings."""

    kind: str
    settings: Settings
    documents: int
    passages: int
    fingerprint: str


@dataclass(frozen=True)
class DocumentRow:
    """A document of the index: the hash of its text, and its passages as rows `first` to `first + count`."""

    id: str
    sha256: str
    first: int
    count: int


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST, {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest, or BrokenIndex with what to type."""
    if not folder.is_dir() or not (folder / MANIFEST).is_file():
        raise broken(folder, f"there is no {MANIFEST}")
    try:
        record = read_json(folder / MANIFEST)
    except BadInput as error:
        raise broken(folder, str(error).rstrip(".")) from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise broken(folder, f"{MANIFEST} was not written by knowgate")
    if record.get("version") != VERSION:
        raise broken(folder, f"it has version {record.get('version')}, this knowgate reads version {VERSION}")
    try:
        return _manifest(record)
    except (KeyError, TypeError) as error:
        raise broken(folder, f"{MANIFEST} is incomplete: {error}") from None


def _manifest(record: dict[str, Any]) -> Manifest:
    values = {item.name: record[item.name] for item in dataclasses.fields(Manifest)}
    return Manifest(**{**values, "settings": Settings(**record["settings"])})


def write_documents(folder: Path, rows: Iterable[DocumentRow]) -> None:
    with (folder / DOCUMENTS).open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n")


def read_documents(folder: Path) -> Iterator[DocumentRow]:
    try:
        for _, record in read_jsonl(folder / DOCUMENTS):
            yield DocumentRow(**record)
    except (OSError, TypeError, BadInput) as error:
        raise broken(folder, f"{DOCUMENTS}: {error}") from None


def may_replace(folder: Path) -> bool:
    """Whether a folder is empty, or an index (whole or broken) and nothing else: else it is not overwritten."""
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    if MANIFEST not in names or not names <= OWN_NAMES:
        return False
    try:
        record = read_json(folder / MANIFEST)
    except BadInput:
        return {PASSAGES, OFFSETS} <= names
    return isinstance(record, dict) and record.get("format") == FORMAT


def broken(folder: Path, problem: str) -> BrokenIndex:
    return BrokenIndex(
        f"'{folder}' is not an index that can be opened: {problem}. Rebuild it: knowgate index SOURCE --out {folder}"
    )
