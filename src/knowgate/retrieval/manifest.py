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
from typing import Annotated, Literal, overload

from knowgate.doors import read_json
from knowgate.errors import BadInput, BrokenIndex
from knowgate.files import read_jsonl, write_json
from knowgate.folders import check_digests, check_folder, file_digests
from knowgate.retrieval.store import OFFSETS, PASSAGES
from knowgate.typed import AtLeastZero, Between, read_record

DIGEST = 32  # bytes of a SHA-256
FORMAT, VERSION = "knowgate-index", 1
MANIFEST, DOCUMENTS, BM25, DENSE, ANN = "index.json", "documents.jsonl", "bm25", "dense.npy", "dense.ivf"
OWN_NAMES = frozenset({MANIFEST, DOCUMENTS, PASSAGES, OFFSETS, BM25, DENSE, ANN})


@dataclass(frozen=True)
class Settings:
    """How passages are cut and searched. `stem` is None without BM25, the embedder '' without vectors."""

    max_words: Annotated[int, Between(1)]
    stem: bool | None = None
    embedder: str = ""
    embedder_fingerprint: str = ""


@dataclass(frozen=True)
class Manifest:
    """`fingerprint` names the documents and the settings; `files` are digests, which earlier versions wrote not."""

    kind: Literal["bm25", "dense", "hybrid"]
    settings: Settings
    documents: AtLeastZero
    passages: Annotated[int, Between(1)]
    fingerprint: str
    files: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class DocumentRow:
    """A document of the index: the hash of its text, and its passages as rows `first` to `first + count`."""

    id: str
    sha256: str
    first: AtLeastZero
    count: Annotated[int, Between(1)]


class DocumentRows(Sequence[DocumentRow]):
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
        digest = self._digests[DIGEST * row : DIGEST * (row + 1)].hex()
        return DocumentRow(self._ids[row], digest, self._first[row], self._count[row])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file to be written: it names all others."""
    full = {**dataclasses.asdict(manifest), "files": file_digests(folder, leave=[MANIFEST])}
    write_json(folder / MANIFEST, {"format": FORMAT, "version": VERSION, **full})


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
        raise broken(folder, f"it has version {str(record.get('version'))[:40]}, this knowgate reads version {VERSION}")
    check_folder(folder, lambda problem: broken(folder, problem))
    try:
        return read_record(Manifest, record, MANIFEST, others=True)
    except BadInput as error:
        raise broken(folder, str(error).rstrip(".")) from None


def check_parts(folder: Path, manifest: Manifest, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Refuse files that are not those the index was written with; wanted: by name, those that are about to be read."""
    files = {name: digest for name, digest in manifest.files.items() if wanted(name)}
    check_digests(folder, files, lambda problem: broken(folder, problem))


def write_documents(folder: Path, rows: Iterable[DocumentRow]) -> None:
    with (folder / DOCUMENTS).open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n")


def read_documents(folder: Path) -> Iterator[DocumentRow]:
    try:
        for number, record in read_jsonl(folder / DOCUMENTS):
            yield read_record(DocumentRow, record, f"line {number}")
    except (OSError, BadInput) as error:
        raise broken(folder, f"{DOCUMENTS}: {str(error).rstrip('.')}") from None


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
