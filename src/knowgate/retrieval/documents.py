"""Read documents one at a time, from a folder of files or from a JSONL file.

The id of a document is its path relative to the folder, or the `id` of its JSONL record. A file that cannot be read
becomes a document with a `problem`, and reading continues. A broken JSONL record raises an error instead.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knowgate.core.artifacts import links_outside
from knowgate.core.files import read_jsonl
from knowgate.core.validation import check_regular_file, check_unique_ids
from knowgate.errors import BadInput
from knowgate.retrieval.file_formats import read_html, read_pdf
from knowgate.retrieval.passages import MAX_LABEL_CHARS

DOCUMENT_SUFFIXES = (".txt", ".md", ".html", ".htm", ".pdf")
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_DOCUMENT_BYTES = 64 << 20  # twenty times the longest novel; such a file takes about a minute to index
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
    """A document to index, as plain text.

    Args:
        id: Identifies the document. It is unique within the corpus.
        title: The title of the document. A file without a title uses its file name.
        text: The text of the document. It is empty if the file contains no text, such as a scanned PDF.
        problem: Why the file could not be read, or '' if it was read.
    """

    id: str
    title: str
    text: str
    problem: str = ""


@dataclass
class Corpus:
    """The documents of a folder or a JSONL file.

    Iterating reads one document at a time.

    Args:
        source: The folder or the JSONL file.
        files: The files of the folder to read. Empty if `source` is a JSONL file.
        skipped: The number of files of each unsupported type, by suffix.
        problems: Paths with a supported suffix that cannot be opened, such as broken links, and the reason for each.
    """

    source: Path
    files: list[Path] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    problems: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Document]:
        documents = _read_files(self) if self.files else _read_records(self.source)
        return check_unique_ids(documents, "document", f"'{self.source}'")


def find_documents(source: Path) -> Corpus:
    """Find the documents of a folder or a JSONL file. Texts are read later.

    Raises:
        BadInput: `source` does not exist, contains no supported files, or is a file of another type.
    """
    if source.is_dir():
        return _find_in_folder(source)
    if not source.exists():
        raise BadInput(f"there is no folder or file {str(source)!r}. Name a folder of documents or a JSONL file.")
    check_regular_file(source)
    if not source.name.endswith(RECORD_SUFFIXES):
        raise BadInput(
            f"'{source}' is neither a folder nor a file ending in {' or '.join(RECORD_SUFFIXES)}. Put single documents "
            "into a folder."
        )
    return Corpus(source)


def _find_in_folder(folder: Path) -> Corpus:
    """Find the documents of a folder and its subfolders, except hidden ones.

    Raises:
        BadInput: The folder contains no documents.
    """
    corpus = Corpus(folder)
    pending = [folder]  # A stack of subfolders, because Python limits recursion to a depth of about a thousand.
    while pending:
        pending += _add_files(corpus, pending.pop())
    if not corpus.files:
        problems = [f" '{name}' is left out: {reason}." for name, reason in corpus.problems.items()]
        raise BadInput(
            f"the folder '{folder}' contains no documents. Put files ending in {', '.join(DOCUMENT_SUFFIXES)} into "
            f"it.{''.join(problems[:1])}"
        )
    corpus.files.sort(key=Path.as_posix)
    return corpus


def _add_files(corpus: Corpus, folder: Path) -> list[Path]:
    """Add the files of a folder to the corpus, and return its subfolders. Hidden ones are left out."""
    subfolders = []
    try:
        visible = (path for path in folder.iterdir() if not path.name.startswith("."))
        for path in visible:
            if path.is_dir() and not path.is_symlink():
                subfolders.append(path)
            else:
                _add_file(corpus, path)
    except OSError as error:
        relative = folder.relative_to(corpus.source).as_posix()
        corpus.problems[relative] = f"the folder cannot be read: {error.strerror}"
    return subfolders


def _add_file(corpus: Corpus, path: Path) -> None:
    """Add a file to the corpus as a document, a problem or a skipped file."""
    suffix = path.suffix.lower()
    problem = _find_problem(path, corpus.source)
    if suffix in DOCUMENT_SUFFIXES and problem:
        corpus.problems[path.relative_to(corpus.source).as_posix()] = problem
    elif suffix in DOCUMENT_SUFFIXES:
        corpus.files.append(path)
    elif not problem:
        corpus.skipped[suffix or path.name] += 1


def _find_problem(path: Path, folder: Path) -> str:
    """Return why a file is not safe to read, or ''.

    Links to outside files could make private files searchable.
    """
    if links_outside(path, folder):
        return "a link to a file outside the folder, which is not followed"
    if not path.is_file():
        return "not a regular file: a link to a folder, a broken link, a pipe, a socket or a device"
    return ""


# --- the files of a folder ------------------------------------------------------------------------


def _read_files(corpus: Corpus) -> Iterator[Document]:
    """Read the files of a folder.

    An unreadable file becomes a document with a `problem`.
    """
    for path in corpus.files:
        relative = path.relative_to(corpus.source).as_posix()
        # File names may contain bytes that are not UTF-8. They are written as escapes such as \udcff.
        document_id = relative.encode("utf-8", "backslashreplace").decode()
        try:
            yield _read_file(path, document_id)
        except BadInput as error:
            yield Document(document_id, "", "", problem=str(error))
        except OSError as error:
            problem = f"{path} cannot be read: {error.strerror}. Fix its permissions or remove it from the folder."
            yield Document(document_id, "", "", problem)


def _read_file(path: Path, document_id: str) -> Document:
    """Read one file. The file name is the default title."""
    _check_size(path)
    suffix = path.suffix.lower()
    title = ""
    if suffix in _HTML_SUFFIXES:
        title, text = read_html(_read_text(path))
    else:
        text = read_pdf(path) if suffix == ".pdf" else _read_text(path)
    if suffix == ".md":
        title = _find_markdown_title(text)
    return Document(document_id, _clean(title or path.stem)[:MAX_LABEL_CHARS], _clean(text))


def _check_size(path: Path) -> None:
    """Raise BadInput unless a path is a regular file of at most `MAX_DOCUMENT_BYTES` bytes."""
    check_regular_file(path)
    size = path.stat().st_size
    if size > MAX_DOCUMENT_BYTES:
        raise BadInput(
            f"{path} is too large: it has {size:,} bytes, but at most {MAX_DOCUMENT_BYTES:,} are allowed. Split it."
        )


def _read_text(path: Path) -> str:
    """Read a text file as UTF-8, or an HTML file in the character set that it declares.

    Raises:
        BadInput: The file is binary, or has another character set.
        OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        data = file.read(MAX_DOCUMENT_BYTES)
    if b"\0" in data:
        raise BadInput(f"{path} holds binary data, not text. Give it another suffix or remove it from the folder.")
    charset = _find_declared_charset(data, path) if path.suffix.lower() in _HTML_SUFFIXES else "utf-8"
    try:
        return data.decode("utf-8-sig" if charset == "utf-8" else charset)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not {charset.upper()} text. Save it as UTF-8.") from None


def _find_declared_charset(data: bytes, path: Path) -> str:
    """Return the character set in the <meta> tag of an HTML page.

    The default is utf-8.

    Raises:
        BadInput: Browsers do not support this character set.
    """
    match = re.search(rb"<meta[^>]*charset\s*=\s*[\"']?\s*([\w.:-]+)", data[:2048], re.IGNORECASE)
    declared = match.group(1).decode("ascii", "replace").lower() if match else "utf-8"
    try:
        charset = codecs.lookup(declared).name
    except LookupError:
        charset = ""
    if charset not in _CHARSETS:
        raise BadInput(f"{path} declares an unknown character set '{declared[:40]}'. Save the page as UTF-8.")
    return charset


def _find_markdown_title(text: str) -> str:
    """Return the first heading of a Markdown text, or ''."""
    match = re.search(r"^#{1,6}[ \t]+(\S.*)$", text, re.MULTILINE)
    if match is None:
        return ""
    heading = match.group(1)
    # A heading may end in "##" (closed headings). A heading of nothing but "#" signs is kept as it is.
    return heading.rstrip(" \t#") or heading


def _clean(text: str) -> str:
    """Normalize line ends, strip white space, and replace lone surrogates, which UTF-8 cannot represent."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-8", "replace").decode("utf-8").strip()


# --- the records of a JSONL file ------------------------------------------------------------------


def _read_records(path: Path) -> Iterator[Document]:
    for number, record in read_jsonl(path, allow_surrogates=True):
        yield _parse_record(record, f"{path} line {number}")


def _parse_record(record: Mapping[str, Any], where: str) -> Document:
    """Make a document from a JSONL record.

    Args:
        record: The parsed line, with `id`, `text` and optionally `title`.
        where: The file and the line number, for error messages.

    Raises:
        BadInput: A field is missing or has the wrong type.
    """
    document_id = record.get("id")
    text = record.get("text")
    title = record.get("title") or ""
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where} has no text. {_RECORD_FORMAT}")
    if not isinstance(title, str):
        raise BadInput(f"{where} has a title that is not a string. {_RECORD_FORMAT}")
    if isinstance(document_id, bool) or not isinstance(document_id, str | int) or document_id == "":
        raise BadInput(f"{where} has no id (a string or a number). {_RECORD_FORMAT}")
    return Document(_clean(str(document_id)), _clean(title)[:MAX_LABEL_CHARS], _clean(text))
