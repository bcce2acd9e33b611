"""Documents from a folder of files or from a JSONL file, one at a time.

A document's id is its path inside the folder, or the record's own id. A file that cannot be read is a document with a
problem, not the end of the others; a broken record is, since its file is one piece. Knows nothing of passages or
indexes.
"""

from __future__ import annotations

import codecs
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knowgate.core.files import read_jsonl
from knowgate.core.validation import check_regular_file
from knowgate.errors import BadInput
from knowgate.retrieval.file_formats import read_html, read_pdf


@dataclass
class FolderListing:
    """Paths inside the folder. problems: why what should have been read (a folder, a pipe, a dead link) was not."""

    files: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def list_files(folder: Path, suffixes: tuple[str, ...]) -> FolderListing:
    """Every file but hidden ones, in the order of paths. Links to files are followed, links to folders are not.

    suffixes: of files that are missed where they are no ordinary ones.
    """
    found, waiting = FolderListing(), [""]
    while waiting:  # a list, not recursion, which ends at a depth of a thousand
        inside = waiting.pop()
        try:
            entries = sorted(_visible(folder, inside))
        except OSError as error:
            found.problems[inside or "."] = f"the folder cannot be read: {error.strerror}"
            continue
        for name, kind in entries:
            path = f"{inside}{name}"
            if kind == "folder":
                waiting.append(f"{path}/")
            elif kind == "file":
                found.files.append(path)
            elif name.lower().endswith(suffixes):
                found.problems[path] = kind
    found.files.sort()
    return found


def _visible(folder: Path, inside: str) -> Iterator[tuple[str, str]]:
    with os.scandir(folder / inside) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                yield entry.name, _kind(entry)


def _kind(entry: os.DirEntry[str]) -> str:
    """'file', 'folder', or why it is neither."""
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir(follow_symlinks=False):
            return "folder"
        if entry.is_symlink():
            return "a link to a folder, which is not followed" if entry.is_dir() else "a link that leads nowhere"
    except OSError as error:  # links in a circle, say
        return f"cannot be looked at: {error.strerror}"
    return "not an ordinary file (a pipe, a socket or a device)"


DOCUMENT_SUFFIXES = (".txt", ".md", ".html", ".htm", ".pdf")
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_DOCUMENT_BYTES = 64 << 20  # bytes of one document: twenty times the longest novel; takes about a minute to index
_MARKUP = (".html", ".htm")
# What browsers read, by Python's names. Other codecs are no character sets, or take quadratic time (punycode).
_CHARSETS = frozenset({
    "utf-8", "ascii", "iso8859-1", "iso8859-2", "iso8859-3", "iso8859-4", "iso8859-5", "iso8859-6", "iso8859-7",
    "iso8859-8", "iso8859-9", "iso8859-10", "iso8859-13", "iso8859-14", "iso8859-15", "iso8859-16", "koi8-r", "koi8-u",
    "mac-roman", "mac-cyrillic", "cp866", "cp874", "cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1255", "cp1256",
    "cp1257", "cp1258", "tis-620", "gb2312", "gbk", "gb18030", "big5", "big5hkscs", "cp950", "euc_jp", "iso2022_jp",
    "shift_jis", "cp932", "euc_kr", "cp949", "johab",
})  # fmt: skip
_FORM = 'A record is {"id": ..., "title": ..., "text": ...}; the title may be left out.'


@dataclass(frozen=True)
class Document:
    """One document; `text` is empty when a file holds none (a scanned PDF, say). problem: why it cannot be read."""

    id: str
    title: str
    text: str
    problem: str = ""


@dataclass(frozen=True)
class Corpus:
    """What there is to read. Iterating reads; `skipped` counts files by suffixes that are not read.

    problems: paths inside the folder that should have been read and why they cannot be.
    """

    source: Path
    files: tuple[Path, ...] = ()  # empty for a JSONL file
    skipped: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many documents there will be; 0 when that shows only at the end."""
        return len(self.files)

    def __iter__(self) -> Iterator[Document]:
        documents = _from_files(self) if self.files else _from_records(self.source)
        return _without_doubles(documents, self.source)


def find_documents(source: Path) -> Corpus:
    """The documents of a folder (recursively, in the order of their paths) or of a JSONL file."""
    if source.is_dir():
        return _find_files(source)
    if not source.exists():
        raise BadInput(f"there is no folder or file {str(source)!r}. Name a folder of documents or a JSONL file.")
    check_regular_file(source)
    if not source.name.endswith(RECORD_SUFFIXES):
        raise BadInput(f"'{source}' is neither a folder nor a file ending in {' or '.join(RECORD_SUFFIXES)}.")
    return Corpus(source)


def _find_files(folder: Path) -> Corpus:
    found = list_files(folder, DOCUMENT_SUFFIXES)
    seen = [Path(path) for path in found.files]
    files = tuple(folder / path for path in seen if path.suffix.lower() in DOCUMENT_SUFFIXES)
    if not files:
        missed = "".join(f" '{path}' is missed: {why}." for path, why in list(found.problems.items())[:1])
        raise BadInput(f"no documents in '{folder}': files ending in {', '.join(DOCUMENT_SUFFIXES)} are read.{missed}")
    skipped = Counter(path.suffix.lower() or path.name for path in seen if path.suffix.lower() not in DOCUMENT_SUFFIXES)
    return Corpus(folder, files, dict(skipped), found.problems)


def _without_doubles(documents: Iterable[Document], source: Path) -> Iterator[Document]:
    seen: set[str] = set()
    for document in documents:
        if document.id in seen:
            raise BadInput(f"two documents of {source} have the id '{document.id}'. Ids must be unique.")
        seen.add(document.id)
        yield document


# --- files ---------------------------------------------------------------------------------------


def _from_files(corpus: Corpus) -> Iterator[Document]:
    for path in corpus.files:
        name = _name(path.relative_to(corpus.source).as_posix())
        try:
            yield _read_file(path, name)
        except BadInput as error:
            yield Document(name, "", "", problem=str(error))


def _name(path: str) -> str:
    """A path as text; what is no character of it, as escapes, so that two of them stay two."""
    return path.encode("utf-8", "backslashreplace").decode()


def _read_file(path: Path, name: str) -> Document:
    _check_size(path)
    suffix = path.suffix.lower()
    title, text = "", ""
    if suffix == ".pdf":
        text = read_pdf(path)
    elif suffix in _MARKUP:
        page = read_html(_read_text(path))
        title, text = page.title, page.text
    else:
        text = _read_text(path)
        title = _markdown_title(text) if suffix == ".md" else ""
    return Document(name, _clean(title or path.stem), _clean(text))


def _check_size(path: Path) -> None:
    try:
        check_regular_file(path)
        size = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from None
    if size > MAX_DOCUMENT_BYTES:
        raise BadInput(f"{path} has {size:,} bytes; a document has at most {MAX_DOCUMENT_BYTES:,}. Split it.")


def _unreadable(path: Path, error: OSError) -> BadInput:
    return BadInput(f"{path} cannot be read: {error.strerror}. Let it be read or take it out of the folder.")


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_DOCUMENT_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from None
    if b"\0" in data:
        raise BadInput(f"{path} holds binary data, not text. Rename it or take it out of the folder.")
    charset = _declared_charset(data, path) if path.suffix.lower() in _MARKUP else "utf-8"
    try:
        return data.decode("utf-8-sig" if charset == "utf-8" else charset)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not {charset.upper()} text. Save it as UTF-8.") from None


def _declared_charset(data: bytes, path: Path) -> str:
    found = re.search(rb"<meta[^>]*charset\s*=\s*[\"']?\s*([\w.:-]+)", data[:2048], re.IGNORECASE)
    declared = found.group(1).decode("ascii", "replace").lower() if found else "utf-8"
    try:
        charset = codecs.lookup(declared).name
    except LookupError:
        charset = ""
    if charset not in _CHARSETS:
        raise BadInput(f"{path} declares an unknown character set '{declared[:40]}'. Save it as UTF-8.")
    return charset


def _markdown_title(text: str) -> str:
    found = re.search(r"^#{1,6}[ \t]+(\S.*)$", text, re.MULTILINE)
    return found.group(1).rstrip(" \t#") or found.group(1) if found else ""


def _clean(text: str) -> str:
    """One kind of line end, and no half characters (lone surrogates), which cannot be written as UTF-8."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-8", "replace").decode("utf-8").strip()


# --- records -------------------------------------------------------------------------------------


def _from_records(path: Path) -> Iterator[Document]:
    for number, record in read_jsonl(path, allow_surrogates=True):
        yield _document(record, f"{path} line {number}")


def _document(record: Mapping[str, Any], where: str) -> Document:
    text, title = record.get("text"), record.get("title") or ""
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where} has no text. {_FORM}")
    if not isinstance(title, str):
        raise BadInput(f"{where} has a title that is not a string. {_FORM}")
    return Document(_record_id(record, where), _clean(title), _clean(text))


def _record_id(record: Mapping[str, Any], where: str) -> str:
    value = record.get("id")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadInput(f"{where} has no id (a string or a number). {_FORM}")
    return _clean(str(value))
