"""Read documents one at a time, from a folder of files or from a JSONL file.

The id of a document is its path inside the folder, or the id of its record. A file that cannot be read becomes a
document with a `problem`, and reading continues. A broken record ends the reading, because its file is one unit.
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

DOCUMENT_SUFFIXES = (".txt", ".md", ".html", ".htm", ".pdf")
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_DOCUMENT_BYTES = 64 << 20  # twenty times the longest novel; takes about a minute to index
_HTML_SUFFIXES = (".html", ".htm")
# The character sets that browsers read, by their Python names. Python's other codecs are not character sets, or take
# quadratic time (punycode).
_CHARSET_NAMES = (
    "utf-8 ascii iso8859-1 iso8859-2 iso8859-3 iso8859-4 iso8859-5 iso8859-6 iso8859-7 iso8859-8 iso8859-9 iso8859-10 "
    "iso8859-13 iso8859-14 iso8859-15 iso8859-16 koi8-r koi8-u mac-roman mac-cyrillic cp866 cp874 cp1250 cp1251 cp1252 "
    "cp1253 cp1254 cp1255 cp1256 cp1257 cp1258 tis-620 gb2312 gbk gb18030 big5 big5hkscs cp950 euc_jp iso2022_jp "
    "shift_jis cp932 euc_kr cp949 johab"
)
_CHARSETS = frozenset(_CHARSET_NAMES.split())
_RECORD_FORMAT = 'Write {"id": ..., "title": ..., "text": ...}; the title is optional.'


@dataclass(frozen=True)
class Document:
    """A document.

    Args:
        id: Unique within the corpus.
        title: Its title; a file without one uses its file name.
        text: Its text; empty if the file has none, such as a scanned PDF.
        problem: Why the file cannot be read; '' if it can.
    """

    id: str
    title: str
    text: str
    problem: str = ""


@dataclass(frozen=True)
class Corpus:
    """The documents of a folder or a JSONL file. Iterating reads them.

    Args:
        source: The folder or the JSONL file.
        files: The files to read; empty for a JSONL file.
        skipped: Counts files that are not read, by suffix.
        problems: Paths that should be documents but cannot be opened, and why.
    """

    source: Path
    files: tuple[Path, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of documents; 0 if it is only known at the end."""
        return len(self.files)

    def __iter__(self) -> Iterator[Document]:
        documents = _read_files(self) if self.files else _read_records(self.source)
        return _check_unique_ids(documents, self.source)


def find_documents(source: Path) -> Corpus:
    """Find the documents of a folder (recursively, sorted by path) or of a JSONL file."""
    if source.is_dir():
        return _find_in_folder(source)
    if not source.exists():
        raise BadInput(f"there is no folder or file {str(source)!r}. Name a folder of documents or a JSONL file.")
    check_regular_file(source)
    if not source.name.endswith(RECORD_SUFFIXES):
        raise BadInput(f"'{source}' is neither a folder nor a file ending in {' or '.join(RECORD_SUFFIXES)}.")
    return Corpus(source)


def _find_in_folder(folder: Path) -> Corpus:
    listing = list_files(folder, DOCUMENT_SUFFIXES)
    paths = [Path(path) for path in listing.files]
    files = tuple(folder / path for path in paths if path.suffix.lower() in DOCUMENT_SUFFIXES)
    if not files:
        problem = "".join(f" '{path}' is left out: {reason}." for path, reason in list(listing.problems.items())[:1])
        raise BadInput(f"no documents in '{folder}': files ending in {', '.join(DOCUMENT_SUFFIXES)} are read.{problem}")
    skipped = Counter(
        path.suffix.lower() or path.name for path in paths if path.suffix.lower() not in DOCUMENT_SUFFIXES
    )
    return Corpus(folder, files, dict(skipped), listing.problems)


def _check_unique_ids(documents: Iterable[Document], source: Path) -> Iterator[Document]:
    seen: set[str] = set()
    for document in documents:
        if document.id in seen:
            raise BadInput(f"two documents of {source} have the id '{document.id}'. Make the ids unique.")
        seen.add(document.id)
        yield document


# --- the files of a folder ------------------------------------------------------------------------


@dataclass
class FolderListing:
    """The files below a folder as relative paths, sorted; `problems` tells why a path cannot be read."""

    files: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def list_files(folder: Path, suffixes: tuple[str, ...]) -> FolderListing:
    """List all files below a folder except hidden ones; links to files are followed, links to folders are not.

    Args:
        folder: Where to start.
        suffixes: Paths with these suffixes that are not regular files are reported as problems.
    """
    listing, pending = FolderListing(), [""]
    while pending:  # a stack instead of recursion, whose depth is limited to about a thousand
        subfolder = pending.pop()
        try:
            entries = sorted(_scan_visible(folder, subfolder))
        except OSError as error:
            listing.problems[subfolder or "."] = f"the folder cannot be read: {error.strerror}"
            continue
        for name, kind in entries:
            path = f"{subfolder}{name}"
            if kind == "folder":
                pending.append(f"{path}/")
            elif kind == "file":
                listing.files.append(path)
            elif name.lower().endswith(suffixes):
                listing.problems[path] = kind
    listing.files.sort()
    return listing


def _scan_visible(folder: Path, subfolder: str) -> Iterator[tuple[str, str]]:
    """Yield name and kind (see `_classify`) of each entry that is not hidden."""
    with os.scandir(folder / subfolder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                yield entry.name, _classify(entry)


def _classify(entry: os.DirEntry[str]) -> str:
    """Return 'file', 'folder', or the reason why the entry is neither."""
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir(follow_symlinks=False):
            return "folder"
        if entry.is_symlink():
            return "a link to a folder, which is not followed" if entry.is_dir() else "a broken link"
    except OSError as error:  # such as a circular link
        return f"cannot be accessed: {error.strerror}"
    return "not a regular file (a pipe, a socket or a device)"


def _read_files(corpus: Corpus) -> Iterator[Document]:
    for path in corpus.files:
        relative = path.relative_to(corpus.source).as_posix()
        document_id = relative.encode("utf-8", "backslashreplace").decode()  # bytes that are not UTF-8 become escapes
        try:
            yield _read_file(path, document_id)
        except BadInput as error:
            yield Document(document_id, "", "", problem=str(error))


def _read_file(path: Path, document_id: str) -> Document:
    _check_size(path)
    suffix = path.suffix.lower()
    title = ""
    if suffix == ".pdf":
        text = read_pdf(path)
    elif suffix in _HTML_SUFFIXES:
        page = read_html(_read_text(path))
        title, text = page.title, page.text
    else:
        text = _read_text(path)
        title = _find_markdown_title(text) if suffix == ".md" else ""
    return Document(document_id, _clean(title or path.stem), _clean(text))


def _check_size(path: Path) -> None:
    try:
        check_regular_file(path)
        size = path.stat().st_size
    except OSError as error:
        raise _unreadable_file_error(path, error) from None
    if size > MAX_DOCUMENT_BYTES:
        raise BadInput(f"{path} has {size:,} bytes; a document may have {MAX_DOCUMENT_BYTES:,}. Split it.")


def _unreadable_file_error(path: Path, error: OSError) -> BadInput:
    return BadInput(f"{path} cannot be read: {error.strerror}. Fix its permissions or remove it from the folder.")


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_DOCUMENT_BYTES)
    except OSError as error:
        raise _unreadable_file_error(path, error) from None
    if b"\0" in data:
        raise BadInput(f"{path} holds binary data, not text. Rename it or remove it from the folder.")
    charset = _find_declared_charset(data, path) if path.suffix.lower() in _HTML_SUFFIXES else "utf-8"
    try:
        return data.decode("utf-8-sig" if charset == "utf-8" else charset)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not {charset.upper()} text. Save it as UTF-8.") from None


def _find_declared_charset(data: bytes, path: Path) -> str:
    """Return the Python name of the character set in a page's <meta> tag; UTF-8 if it has none."""
    match = re.search(rb"<meta[^>]*charset\s*=\s*[\"']?\s*([\w.:-]+)", data[:2048], re.IGNORECASE)
    declared = match.group(1).decode("ascii", "replace").lower() if match else "utf-8"
    try:
        charset = codecs.lookup(declared).name
    except LookupError:
        charset = ""
    if charset not in _CHARSETS:
        raise BadInput(f"{path} declares an unknown character set '{declared[:40]}'. Save it as UTF-8.")
    return charset


def _find_markdown_title(text: str) -> str:
    match = re.search(r"^#{1,6}[ \t]+(\S.*)$", text, re.MULTILINE)
    return match.group(1).rstrip(" \t#") or match.group(1) if match else ""


def _clean(text: str) -> str:
    """Normalize line ends and replace lone surrogates, which cannot be written as UTF-8."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-8", "replace").decode("utf-8").strip()


# --- the records of a JSONL file ------------------------------------------------------------------


def _read_records(path: Path) -> Iterator[Document]:
    for number, record in read_jsonl(path, allow_surrogates=True):
        yield _parse_record(record, f"{path} line {number}")


def _parse_record(record: Mapping[str, Any], where: str) -> Document:
    document_id, text, title = record.get("id"), record.get("text"), record.get("title") or ""
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where} has no text. {_RECORD_FORMAT}")
    if not isinstance(title, str):
        raise BadInput(f"{where} has a title that is not a string. {_RECORD_FORMAT}")
    if isinstance(document_id, bool) or not isinstance(document_id, str | int) or document_id == "":
        raise BadInput(f"{where} has no id (a string or a number). {_RECORD_FORMAT}")
    return Document(_clean(str(document_id)), _clean(title), _clean(text))
