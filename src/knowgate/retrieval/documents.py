"""Documents from a folder of files or from a JSONL file, one at a time.

A document's id is its path inside the folder, or the record's own id. Knows nothing of passages or indexes.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knowgate.errors import BadInput
from knowgate.retrieval.html import read_html
from knowgate.retrieval.pdf import read_pdf

SUFFIXES = (".txt", ".md", ".html", ".htm", ".pdf")
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz")
_FORM = 'A record is {"id": ..., "title": ..., "text": ...}; the title may be left out.'


@dataclass(frozen=True)
class Document:
    """One document; `text` is empty when a file holds none (a scanned PDF, say)."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """What there is to read. Iterating reads; `skipped` counts files by suffixes that are not read."""

    source: Path
    files: tuple[Path, ...] = ()  # empty for a JSONL file
    skipped: Mapping[str, int] = field(default_factory=dict)

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
        raise BadInput(f"there is no folder or file '{source}'. Name a folder of documents or a JSONL file.")
    if not source.name.endswith(RECORD_SUFFIXES):
        raise BadInput(f"'{source}' is neither a folder nor a file ending in {' or '.join(RECORD_SUFFIXES)}.")
    return Corpus(source)


def _find_files(folder: Path) -> Corpus:
    inside = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    seen = sorted((path for path in inside if not _is_hidden(path)), key=Path.as_posix)
    files = tuple(folder / path for path in seen if path.suffix.lower() in SUFFIXES)
    if not files:
        raise BadInput(f"no documents in '{folder}': files ending in {', '.join(SUFFIXES)} are read.")
    skipped = Counter(path.suffix.lower() or path.name for path in seen if path.suffix.lower() not in SUFFIXES)
    return Corpus(folder, files, dict(skipped))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


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
        yield _read_file(path, path.relative_to(corpus.source).as_posix())


def _read_file(path: Path, name: str) -> Document:
    suffix = path.suffix.lower()
    title, text = "", ""
    if suffix == ".pdf":
        text = read_pdf(path)
    elif suffix in {".html", ".htm"}:
        page = read_html(_read_text(path))
        title, text = page.title, page.text
    else:
        text = _read_text(path)
        title = _markdown_title(text) if suffix == ".md" else ""
    return Document(_clean(name), _clean(title or path.stem), _clean(text))


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read: {error.strerror}. Let it be read or take it out of the folder."
        ) from None
    if b"\0" in data:
        raise BadInput(f"{path} holds binary data, not text. Rename it or take it out of the folder.")
    charset = _declared_charset(data) if path.suffix.lower() in {".html", ".htm"} else "utf-8"
    try:
        return data.decode("utf-8-sig" if charset == "utf-8" else charset)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not {charset.upper()} text. Save it as UTF-8.") from None
    except LookupError:
        raise BadInput(f"{path} declares an unknown character set '{charset}'. Save it as UTF-8.") from None


def _declared_charset(data: bytes) -> str:
    found = re.search(rb"<meta[^>]*charset\s*=\s*[\"']?\s*([\w.:-]+)", data[:2048], re.IGNORECASE)
    return found.group(1).decode("ascii", "replace").lower() if found else "utf-8"


def _markdown_title(text: str) -> str:
    found = re.search(r"^#{1,6}[ \t]+(.+?)[ \t#]*$", text, re.MULTILINE)
    return found.group(1) if found else ""


def _clean(text: str) -> str:
    """One kind of line end, and no half characters (lone surrogates), which cannot be written as UTF-8."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-8", "replace").decode("utf-8").strip()


# --- records -------------------------------------------------------------------------------------


def _from_records(path: Path) -> Iterator[Document]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield _document(line, f"{path} line {number}")


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            yield from (line.decode("utf-8") for line in lines)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not a UTF-8 text file.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadInput(f"{path} is a broken gzip file: {error}.") from None


def _document(line: str, where: str) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where} is not valid JSON: {error.msg}. {_FORM}") from None
    except RecursionError:
        raise BadInput(f"{where} is nested too deeply. {_FORM}") from None
    if not isinstance(record, dict):
        raise BadInput(f"{where} is not a JSON object. {_FORM}")
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
