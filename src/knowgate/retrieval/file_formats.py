"""Extract plain text from HTML pages and PDF files.

HTML: Paragraphs are kept, scripts and styles are dropped. Navigation menus are kept, because they cannot be told apart
from content. A hostile page must not take longer than others, so this parser takes linear time in the length of the
page. Tags end where the HTML standard (section 13.2.5) ends them. Other parsers are not linear. Python's html.parser
searches the rest of the page again after every unclosed quote or comment. selectolax 1.0.2 takes 0.6 s for 10,000
nested <div> and 14 s for 40,000 (200 kB), in native code that cannot be interrupted.

PDF: pypdf (extra `pdf`) runs in a separate process (`pdf_worker.py`), which is killed when a file takes too long.
Scanned pages give no text, because there is no OCR.
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

from knowgate.errors import BadInput, require_extra

_HIDDEN_TAGS = frozenset({"script", "style", "template", "noscript"})
_RAW_TEXT_END = {tag: re.compile(rf"</{tag}(?=[\s/>])", re.IGNORECASE) for tag in ("script", "style")}
_INLINE_TAG_NAMES = (
    "a abbr b bdi bdo cite code data del dfn em font i img ins kbd label mark q s samp small span strong sub sup time "
    "tt u var wbr"
)
_INLINE_TAGS = frozenset(_INLINE_TAG_NAMES.split())
_LINE_TAGS = frozenset({"br", "tr", "li", "dt", "dd", "option"})
_CELL_TAGS = frozenset({"td", "th"})
# Possessive quantifiers (*+) never backtrack, so every pattern takes linear time. A '>' inside a quoted value does not
# end a tag; a tag or comment that is never closed extends to the end of the page.
_COMMENT = re.compile(r"<!(?=--)(?:.*?-->|.*)", re.DOTALL)  # <!--> is a complete comment
_DECLARATION = re.compile(r"<(?:[!?]|/(?![a-zA-Z]))[^>]*+>?")
_TAG = re.compile(
    r"""<(?P<slash>/?)(?P<name>[a-zA-Z][^\s/>]*+)
    (?: [\s/]++
      | (?!>) =?+ [^\s/>=]*+ (?: \s*+ = \s*+ (?: "[^"]*+(?:"|\Z) | '[^']*+(?:'|\Z) | [^\s>]*+ ) )?+
    )*+ (?P<bracket>>?)""",
    re.VERBOSE,
)
_INVALID_REFERENCE = re.compile(r"&#(?:[0-9]{10,}|[xX][0-9a-fA-F]{10,});?")  # code points have at most seven digits


class HtmlToken(NamedTuple):
    """A piece of text or a tag of an HTML page.

    Args:
        text: The text; '' for a tag.
        tag: The lower-case name of the tag; '' for a text.
        opens: Whether the tag opens an element: True for every tag except end tags such as `</p>`.
        closes: Whether the tag closes an element: True for end tags, and for self-closing tags such as `<br/>`.
    """

    text: str = ""
    tag: str = ""
    opens: bool = False
    closes: bool = False


@dataclass(frozen=True)
class HtmlPage:
    """The plain text of an HTML page.

    Args:
        title: The <title> of the page, else its first <h1>, else ''.
        text: The visible text, with blank lines between paragraphs.
    """

    title: str
    text: str


def read_html(markup: str) -> HtmlPage:
    """Extract the title and the visible text of an HTML page."""
    builder = _TextBuilder()
    for token in tokenize_html(markup):
        builder.add(token)
    title = builder.get_heading("title") or builder.get_heading("h1")
    lines = (" ".join(line.split()) for line in "".join(builder.body).split("\n"))
    return HtmlPage(title, re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip())


def tokenize_html(markup: str) -> Iterator[HtmlToken]:
    """Yield the texts and tags of an HTML page in order.

    Comments and declarations are left out, and so is a last tag that has no closing ">".
    """
    position = 0
    while position < len(markup):
        start = markup.find("<", position)
        if start != position:
            yield HtmlToken(_unescape(markup[position : start if start >= 0 else len(markup)]))
        if start < 0:
            return
        tag = _TAG.match(markup, start)
        if tag is None:
            skipped = _COMMENT.match(markup, start) or _DECLARATION.match(markup, start)
            if skipped:
                position = skipped.end()
            else:  # A "<" that starts no tag is text.
                yield HtmlToken("<")
                position = start + 1
            continue
        position = tag.end()
        if not tag["bracket"]:  # A tag without its closing ">" extends to the end of the page.
            continue
        name, is_end_tag = tag["name"].lower(), bool(tag["slash"])
        is_self_closing = markup[position - 2] == "/"  # The character before the closing ">", as in <br/>.
        yield HtmlToken(tag=name, opens=not is_end_tag, closes=is_end_tag or is_self_closing)
        # The content of <script> and <style> is not HTML: skip to the end tag.
        if not is_end_tag and not is_self_closing and name in _RAW_TEXT_END:
            end_tag = _RAW_TEXT_END[name].search(markup, position)
            position = end_tag.start() if end_tag else len(markup)


def _unescape(text: str) -> str:
    """Replace character references such as `&amp;`; numbers too large for a character become U+FFFD."""
    return html.unescape(_INVALID_REFERENCE.sub("\ufffd", text)) if "&" in text else text


@dataclass
class _TextBuilder:
    """Collects the visible text, the first <title> and the first <h1> of an HTML page.

    Args:
        body: The pieces of visible text and line breaks so far.
        headings: The pieces of text in the first <title> and in the first <h1>.
        closed_headings: The headings that are complete. Later tags of the same name are ordinary text.
        open_heading: The heading that is being read; '' outside of headings.
        open_hidden_tags: The open tags whose content is not visible, such as <script>; the innermost comes last.
    """

    body: list[str] = field(default_factory=list)
    headings: dict[str, list[str]] = field(default_factory=lambda: {"title": [], "h1": []})
    closed_headings: set[str] = field(default_factory=set)
    open_heading: str = ""
    open_hidden_tags: list[str] = field(default_factory=list)

    def add(self, token: HtmlToken) -> None:
        """Process the next token of the page."""
        if not token.tag:
            self._add_text(token.text)
        if token.opens:
            self._open(token.tag)
        if token.closes:
            self._close(token.tag)

    def get_heading(self, tag: str) -> str:
        """Return the text of the first `title` or `h1`; '' if the page has none."""
        return " ".join("".join(self.headings[tag]).split())

    def _open(self, tag: str) -> None:
        if tag in _HIDDEN_TAGS:
            self.open_hidden_tags.append(tag)
        elif tag in self.headings and tag not in self.closed_headings:
            self.open_heading = tag
        self._add_break(tag)

    def _close(self, tag: str) -> None:
        if self.open_hidden_tags and tag == self.open_hidden_tags[-1]:
            self.open_hidden_tags.pop()
        if tag == self.open_heading:
            self.closed_headings.add(tag)
            self.open_heading = ""
        self._add_break(tag)

    def _add_text(self, text: str) -> None:
        if self.open_hidden_tags:
            return
        if self.open_heading:
            self.headings[self.open_heading].append(text)
        if self.open_heading != "title":
            self.body.append(re.sub(r"\s+", " ", text))

    def _add_break(self, tag: str) -> None:
        """Add the white space that a tag stands for.

        This is a line break for tags such as <br>, a space for table cells, nothing for inline tags such as <b>, and a
        blank line for all others, such as <p>.
        """
        if tag in _LINE_TAGS:
            self.body.append("\n")
        elif tag in _CELL_TAGS:
            self.body.append(" ")
        elif tag not in _INLINE_TAGS:
            self.body.append("\n\n")


# --- PDF ------------------------------------------------------------------------------------------

PDF_TIMEOUT = 60.0  # seconds per file; a file of a thousand pages takes about 30 seconds
PDF_WORKER = Path(__file__).with_name("pdf_worker.py")


def read_pdf(path: Path, *, timeout: float = PDF_TIMEOUT) -> str:
    """Extract the text of all pages of a PDF, separated by blank lines.

    Raises:
        BadInput: The file is encrypted, damaged or takes longer than `timeout` seconds.
        MissingExtra: pypdf is not installed.
    """
    with require_extra(f"reading {path}", "pdf"):
        import pypdf  # noqa: F401
    response = _get_pdf_process().read(path, timeout)
    if response.get("problem") == "encrypted":
        raise BadInput(f"{path} is encrypted. Save it without a password or remove it from the folder.")
    if "text" not in response:
        problem = response.get("problem") or "the process that reads PDF files crashed"
        raise BadInput(f"{path} cannot be read as PDF: {problem}. Repair it or remove it from the folder.")
    return response["text"]


class PdfReaderProcess:
    """A worker process that reads one PDF file at a time.

    It starts when the first file is read, and is replaced after a crash or a timeout. Concurrent calls wait their turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, path: Path, timeout: float) -> dict[str, str]:
        """Read a PDF file in the worker process.

        Args:
            path: The file.
            timeout: The time limit in seconds. A worker that takes longer is killed.

        Returns:
            {"text": ...}, or {"problem": ...} if the file cannot be read, or {} if the worker crashed.
        """
        with self._lock:
            process = self._ensure_running()
            timed_out = threading.Event()
            timer = threading.Timer(timeout, _kill, (process, timed_out))
            timer.start()
            try:
                response = self._request(process, path)
            finally:
                timer.cancel()
            if timed_out.is_set():
                self.close()
                return {"problem": f"reading it took longer than {timeout:g} seconds"}
            return response

    def close(self) -> None:
        """Kill the worker process, if it is running."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ensure_running(self) -> Any:
        """Return the worker process, starting a new one if none is running."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            # With -P, Python does not import modules from the worker's folder, which could shadow standard ones.
            command = [sys.executable, "-P", str(PDF_WORKER)]
            self._process = subprocess.Popen(  # our own file, in this Python  # nosec B603
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        return self._process

    def _request(self, process: Any, path: Path) -> dict[str, str]:
        """Send a path to the worker and return its response; {} if the worker ended without one."""
        try:
            process.stdin.write(json.dumps(str(path.absolute())).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # The worker was killed in the meantime.
            line = b""
        if not line:
            self.close()
            return {}
        response: dict[str, str] = json.loads(line)
        return response


def _kill(process: Any, timed_out: threading.Event) -> None:
    """Kill the worker and set `timed_out`, which tells a timeout from a crash."""
    timed_out.set()
    process.kill()


@cache
def _get_pdf_process() -> PdfReaderProcess:
    """Return the worker that all threads share; it is killed when Python exits."""
    process = PdfReaderProcess()
    atexit.register(process.close)
    return process
