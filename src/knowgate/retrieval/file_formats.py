"""HTML to plain text: paragraphs kept, scripts and styles dropped. Whatever the page, in time linear in its length.

Tags end where the HTML standard (section 13.2.5) has them end. The standard library's parser is not used: it looks for
the end of the page again from every quote and comment that is never closed, and stops at sections it does not know.
Knows nothing of files or passages, and does not try to tell an article from its navigation.
"""

from __future__ import annotations

import atexit
import html
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from knowgate.errors import BadInput, MissingExtra

_HIDDEN = frozenset({"script", "style", "template", "noscript"})
_RAW = {tag: re.compile(rf"</{tag}(?=[\s/>])", re.IGNORECASE) for tag in ("script", "style")}  # no tags inside these
_INLINE = frozenset({
    "a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "del", "dfn", "em", "font", "i", "img", "ins", "kbd",
    "label", "mark", "q", "s", "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr",
})  # fmt: skip
_LINE = frozenset({"br", "tr", "li", "dt", "dd", "option"})
_TAG = re.compile(r"</?([a-zA-Z][^\s/>]*)")
_GAP = re.compile(r"[\s/]*")
_ATTRIBUTE = re.compile(r"=?[^\s/>=]*")
_EQUALS = re.compile(r"\s*=\s*")
_UNQUOTED = re.compile(r"[^\s>]*")
_NO_CHARACTER = re.compile(r"&#(?:[0-9]{10,}|[xX][0-9a-fA-F]{10,});?")  # Unicode ends at seven digits


class HtmlToken(NamedTuple):
    """A piece of a page: text, or a tag that opens or closes (or both, as <br/>)."""

    text: str = ""
    tag: str = ""
    opens: bool = False
    closes: bool = False


@dataclass(frozen=True)
class HtmlPage:
    """The title (from <title>, else the first <h1>, else '') and the text of a page."""

    title: str
    text: str


def read_html(markup: str) -> HtmlPage:
    """Title and text of a page."""
    sheet = _Sheet()
    for piece in tokenize_html(markup):
        sheet.add(piece)
    title = sheet.text_of("title") or sheet.text_of("h1")
    return HtmlPage(title=title, text=_tidy("".join(sheet.body)))


# --- markup to pieces ------------------------------------------------------------------------------------------------


def tokenize_html(markup: str) -> Iterator[HtmlToken]:
    """The texts and tags of a page in order. What is opened and never closed (a comment, a tag) takes the rest."""
    place = 0
    while place < len(markup):
        start = markup.find("<", place)
        if start != place:
            yield HtmlToken(_unescaped(markup[place : start if start >= 0 else len(markup)]))
        if start < 0:
            return
        found = _TAG.match(markup, start)
        if not found:
            place = _after_other(markup, start)
            if place == start + 1:
                yield HtmlToken("<")
            continue
        place = _after_tag(markup, found.end())
        tag, closes = found[1].lower(), markup[start + 1] == "/"
        if place <= len(markup):
            yield HtmlToken(tag=tag, opens=not closes, closes=closes or markup[place - 2] == "/")
        if not closes and tag in _RAW and markup[place - 2 : place - 1] != "/":
            ended = _RAW[tag].search(markup, place)
            place = ended.start() if ended else len(markup)


def _after_other(markup: str, start: int) -> int:
    """Where a comment, a declaration or an instruction ends; one further where '<' is only a character."""
    if markup.startswith("<!--", start):
        return _after(markup, "-->", start + 2)  # <!--> is a whole comment
    is_remark = markup[start + 1 : start + 2] in ("!", "?") or markup.startswith("</", start)
    return _after(markup, ">", start) if is_remark else start + 1


def _after(markup: str, end: str, start: int) -> int:
    found = markup.find(end, start)
    return len(markup) if found < 0 else found + len(end)


def _after_tag(markup: str, place: int) -> int:
    """Where a tag ends whose name ends at `place`: a '>' inside quotes is a value. Beyond the page if it does not."""
    beyond = len(markup) + 1
    while True:
        place = _skip(_GAP, markup, place)
        if place == len(markup):
            return beyond
        if markup[place] == ">":
            return place + 1
        place = _skip(_ATTRIBUTE, markup, place)
        equals = _EQUALS.match(markup, place)
        if equals:
            place = _after_value(markup, equals.end())


def _after_value(markup: str, place: int) -> int:
    quote = markup[place : place + 1]
    return _after(markup, quote, place + 1) if quote in ("'", '"') else _skip(_UNQUOTED, markup, place)


def _skip(pattern: re.Pattern[str], markup: str, place: int) -> int:
    found = pattern.match(markup, place)
    return found.end() if found else place


def _unescaped(text: str) -> str:
    return html.unescape(_NO_CHARACTER.sub("\ufffd", text)) if "&" in text else text


# --- pieces to text --------------------------------------------------------------------------------------------------


@dataclass
class _Sheet:
    """What is visible of a page so far. Only the first title and the first h1 count as headings."""

    body: list[str] = field(default_factory=list)
    headings: dict[str, list[str]] = field(default_factory=lambda: {"title": [], "h1": []})
    closed: set[str] = field(default_factory=set)
    open: str = ""
    hidden: list[str] = field(default_factory=list)

    def add(self, piece: HtmlToken) -> None:
        if piece.opens:
            self._open(piece.tag)
        if piece.closes:
            self._close(piece.tag)
        if not piece.tag:
            self._write(piece.text)

    def text_of(self, tag: str) -> str:
        return " ".join("".join(self.headings[tag]).split())

    def _open(self, tag: str) -> None:
        if tag in _HIDDEN:
            self.hidden.append(tag)
        elif tag in self.headings and tag not in self.closed:
            self.open = tag
        self._break(tag)

    def _close(self, tag: str) -> None:
        if self.hidden and tag == self.hidden[-1]:
            self.hidden.pop()
        if tag == self.open:
            self.closed.add(tag)
            self.open = ""
        self._break(tag)

    def _write(self, text: str) -> None:
        if self.hidden:
            return
        if self.open:
            self.headings[self.open].append(text)
        if self.open != "title":
            self.body.append(re.sub(r"\s+", " ", text))

    def _break(self, tag: str) -> None:
        if tag in _LINE:
            self.body.append("\n")
        elif tag not in _INLINE:
            self.body.append(" " if tag in {"td", "th"} else "\n\n")


def _tidy(text: str) -> str:
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


PDF_TIMEOUT = 60.0  # of one file; a thousand pages take about 30
PDF_WORKER = Path(__file__).with_name("pdf_worker.py")


def read_pdf(path: Path, *, seconds: float = PDF_TIMEOUT) -> str:
    """The text of all pages, a blank line between pages."""
    try:
        import pypdf  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(f"reading {path}", "pdf") from error
    reply = _reader().read(path, seconds)
    if reply.get("problem") == "encrypted":
        raise BadInput(f"{path} is encrypted. Save it without a password or take it out of the folder.")
    if "text" not in reply:
        why = reply.get("problem") or "its reader ended"
        raise BadInput(f"{path} cannot be read as PDF: {why}. Repair it or take it out of the folder.")
    return reply["text"]


class PdfReaderProcess:
    """The process that reads, started when there is something to read; one file at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, path: Path, seconds: float) -> dict[str, str]:
        """What the worker says of a file. It is ended when it takes longer than that."""
        with self._lock:
            process = self._running()
            late = threading.Event()
            clock = threading.Timer(seconds, _end, (process, late))
            clock.start()
            try:
                reply = self._asked(process, path)
            finally:
                clock.cancel()
            if late.is_set():
                self.close()
                return {"problem": f"it took longer than {seconds:g} seconds"}
            return reply

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _running(self) -> Any:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # -P: this folder's html.py must not stand for Python's
            command = [sys.executable, "-P", str(PDF_WORKER)]
            self._process = subprocess.Popen(  # our own file, in this Python  # nosec B603
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        return self._process

    def _asked(self, process: Any, path: Path) -> dict[str, str]:
        try:
            process.stdin.write(json.dumps(str(path.absolute())).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it was ended meanwhile
            line = b""
        if not line:
            self.close()
            return {}
        reply: dict[str, str] = json.loads(line)
        return reply


def _end(process: Any, late: threading.Event) -> None:
    late.set()
    process.kill()


@cache
def _reader() -> PdfReaderProcess:
    reader = PdfReaderProcess()
    atexit.register(reader.close)
    return reader
