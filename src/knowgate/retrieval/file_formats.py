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
from collections.abc import Iterable, Iterator
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
_TEXT = re.compile(r"[^<]++")
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


class HtmlPage(NamedTuple):
    """The plain text of an HTML page.

    Args:
        title: The <title> of the page, else its first <h1>, else ''.
        text: The visible text, with blank lines between paragraphs.
    """

    title: str
    text: str


def read_html(markup: str) -> HtmlPage:
    """Extract the title and the visible text of an HTML page.

    Tags become white space. Example: <br> becomes a line break.
    """
    tokens = list(_drop_hidden(tokenize_html(markup)))
    title = _find_element_text(tokens, "title") or _find_element_text(tokens, "h1")
    text = "".join(_lay_out(tokens))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    joined_lines = "\n".join(lines)
    return HtmlPage(title, re.sub(r"\n{3,}", "\n\n", joined_lines).strip())


def _lay_out(tokens: Iterable[HtmlToken]) -> Iterator[str]:
    """Yield the texts outside the title, and white space for the tags."""
    is_in_title = False
    for token in tokens:
        if token.tag == "title":
            is_in_title = not token.closes
        # The self-closing tag <p/> opens and closes an element.
        if token.opens:
            yield _get_break(token.tag)
        if token.closes:
            yield _get_break(token.tag)
        if not is_in_title:
            yield re.sub(r"\s+", " ", token.text)


def _drop_hidden(tokens: Iterable[HtmlToken]) -> Iterator[HtmlToken]:
    """Yield all tokens except those inside hidden elements, such as the text of a <script>.

    The tags of the hidden elements themselves are kept, because they separate words.
    """
    open_tags: list[str] = []  # the hidden elements around the current token; the innermost comes last
    for token in tokens:
        if token.opens and token.tag in _HIDDEN_TAGS:
            open_tags.append(token.tag)
        if not open_tags or token.tag in _HIDDEN_TAGS:
            yield token
        if token.closes and open_tags and token.tag == open_tags[-1]:
            open_tags.pop()


def _find_element_text(tokens: Iterable[HtmlToken], tag: str) -> str:
    """Return the text of the first element with this tag, or ''."""
    texts: list[str] = []
    is_open = False
    for token in tokens:
        if token.tag == tag and token.opens:
            is_open = True
        if token.tag == tag and token.closes and is_open:
            break
        if is_open:
            texts.append(token.text)
    return " ".join("".join(texts).split())


def _get_break(tag: str) -> str:
    """Return the white space that a tag stands for.

    Examples: a line break for <br>, a blank line for <p>.
    """
    if tag in _INLINE_TAGS:
        return ""
    if tag in _CELL_TAGS:
        return " "
    return "\n" if tag in _LINE_TAGS else "\n\n"


def tokenize_html(markup: str) -> Iterator[HtmlToken]:
    """Yield the texts and tags of an HTML page in order, without comments."""
    position = 0
    while position < len(markup):
        if text := _TEXT.match(markup, position):
            yield HtmlToken(_unescape(text[0]))
            position = text.end()
        elif skipped := _COMMENT.match(markup, position) or _DECLARATION.match(markup, position):
            position = skipped.end()
        elif tag := _TAG.match(markup, position):
            position = tag.end()
            if tag["bracket"]:  # A tag without its closing ">" extends to the end of the page and is left out.
                token = _parse_tag(tag)
                yield token
                position = _skip_raw_text(markup, position, token)
        else:  # A "<" that starts no tag is text.
            yield HtmlToken("<")
            position += 1


def _parse_tag(tag: re.Match[str]) -> HtmlToken:
    """Convert a match of `_TAG` to a token."""
    is_end_tag = bool(tag["slash"])
    is_self_closing = tag[0].endswith("/>")
    return HtmlToken(tag=tag["name"].lower(), opens=not is_end_tag, closes=is_end_tag or is_self_closing)


def _skip_raw_text(markup: str, position: int, token: HtmlToken) -> int:
    """Return the position after the content of a <script> or <style>, which is not HTML.

    After other tags, the position stays the same.
    """
    if token.closes or token.tag not in _RAW_TEXT_END:
        return position
    end_tag = _RAW_TEXT_END[token.tag].search(markup, position)
    return end_tag.start() if end_tag else len(markup)


def _unescape(text: str) -> str:
    """Replace character references such as `&amp;`; numbers too large for a character become U+FFFD."""
    return html.unescape(_INVALID_REFERENCE.sub("\ufffd", text)) if "&" in text else text


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
    if "text" not in response:
        raise BadInput(f"{path} cannot be read as PDF: {response['problem']}. Repair it or remove it from the folder.")
    return response["text"]


class PdfReaderProcess:
    """A worker process that reads one PDF file at a time.

    The process is replaced after a crash or a timeout.
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
            {"text": ...}, or {"problem": ...} if the file cannot be read.
        """
        request = json.dumps(str(path.absolute())).encode() + b"\n"
        with self._lock:
            line = self._exchange(request, timeout)
            if not line:
                self.close()
                return {"problem": f"reading it took longer than {timeout:g} seconds, or crashed"}
        response: dict[str, str] = json.loads(line)
        return response

    def _exchange(self, request: bytes, timeout: float) -> bytes:
        """Send a line to the worker and return its answer, or b"" if the worker died."""
        process = self._ensure_running()
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line: bytes = process.stdout.readline()
        except OSError:  # The worker was killed in the meantime.
            return b""
        finally:
            timer.cancel()
        return line

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


@cache
def _get_pdf_process() -> PdfReaderProcess:
    """Return the worker that all threads share; it is killed when Python exits."""
    process = PdfReaderProcess()
    atexit.register(process.close)
    return process
