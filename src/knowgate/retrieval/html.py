"""HTML to plain text with the standard library: paragraphs kept, scripts and styles dropped.

Knows nothing of files or passages, and does not try to tell an article from its navigation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html.parser import HTMLParser

_HIDDEN = frozenset({"script", "style", "template", "noscript"})
_INLINE = re.compile(
    "a|abbr|b|bdi|bdo|cite|code|data|del|dfn|em|font|i|img|ins|kbd|label|mark|q|s|samp|small|span|strong|sub|sup|time|tt|u|var|wbr"
)
_LINE = frozenset({"br", "tr", "li", "dt", "dd", "option"})


@dataclass(frozen=True)
class Page:
    """The title (from <title>, else the first <h1>, else '') and the text of a page."""

    title: str
    text: str


def read_html(markup: str) -> Page:
    """Title and text of a page."""
    parser = _Parser()
    parser.feed(markup)
    parser.close()
    title = parser.text_of("title") or parser.text_of("h1")
    return Page(title=title, text=_tidy("".join(parser.body)))


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.body: list[str] = []
        self._headings: dict[str, list[str]] = {"title": [], "h1": []}
        self._closed: set[str] = set()  # only the first title and the first h1 count
        self._open: str = ""
        self._hidden: list[str] = []

    def text_of(self, tag: str) -> str:
        return " ".join("".join(self._headings[tag]).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _HIDDEN:
            self._hidden.append(tag)
        elif tag in self._headings and tag not in self._closed:
            self._open = tag
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden and tag == self._hidden[-1]:
            self._hidden.pop()
        if tag == self._open:
            self._closed.add(tag)
            self._open = ""
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if self._open:
            self._headings[self._open].append(data)
        if self._open != "title":
            self.body.append(re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in _LINE:
            self.body.append("\n")
        elif not _INLINE.fullmatch(tag):
            self.body.append(" " if tag in {"td", "th"} else "\n\n")


def _tidy(text: str) -> str:
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
