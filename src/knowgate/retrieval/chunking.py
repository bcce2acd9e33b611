"""Cuts a document into passages: whole paragraphs merged up to a size, long ones cut at sentence ends.

Size is counted in words; a Chinese or Japanese character counts as 120/250 of a word: 250 characters say about
as much as 120 words. No overlap: a passage ends where a paragraph, a sentence or at worst a word ends.
Patterns look at each character a few times at most, whatever the text: a page of dots takes no longer than others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from knowgate.retrieval.documents import Document
from knowgate.retrieval.tokenizer import CJK_CHARACTER, CJK_RANGES
from knowgate.types import Passage

MAX_PASSAGE_WORDS = 120
_UNITS_PER_WORD, _UNITS_PER_CHARACTER = 25, 12  # whole numbers, so that sums are exact

_WORD = re.compile(rf"[^\W{CJK_RANGES}][^\s{CJK_RANGES}]*")
# Places to cut, the best first. A piece keeps what ends it, so the pieces joined are the text again.
_PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE_END = re.compile(
    r"(?<![.!?])[.!?]+[\"'”’)\]]*\s+"  # English, before a space; tried once for a row of dots
    r"|[。！？；…]+[”’」』）】]*\s*"  # Chinese, no space needed
    r"|\n(?=[^\S\n]*(?:[-*+•|]|\d+[.)])\s)"  # the next item of a list or row of a table
)
_WORD_END = re.compile(rf"\s+|(?<=[{CJK_RANGES}])(?=\w)|(?<=\w)(?=[{CJK_RANGES}])")
_CUTS = (_PARAGRAPH_END, _SENTENCE_END, _WORD_END)
_HEADING = re.compile(r"#{1,6}[ \t]")


def split_document(document: Document, max_words: int = MAX_PASSAGE_WORDS) -> list[Passage]:
    """Passages with ids `docid#0`, `docid#1`, ...; a document that is one passage keeps its own id."""
    texts = split_text(document.text, max_words)
    if len(texts) == 1:
        return [Passage(document.id, texts[0], document.title)]
    return [Passage(f"{document.id}#{number}", text, document.title) for number, text in enumerate(texts)]


def split_text(text: str, max_words: int = MAX_PASSAGE_WORDS) -> list[str]:
    """Texts of at most `max_words`, but for single words that are longer by themselves."""
    return [part for piece in _pack(text, 0, max_words * _UNITS_PER_WORD) if (part := piece.strip())]


def count_words(text: str) -> float:
    """Length in words."""
    return _units(text) / _UNITS_PER_WORD


def _units(text: str) -> int:
    words = sum(1 for _ in _WORD.finditer(text))
    characters = sum(1 for _ in CJK_CHARACTER.finditer(text))
    return words * _UNITS_PER_WORD + characters * _UNITS_PER_CHARACTER


def _pack(text: str, level: int, limit: int) -> list[str]:
    """Fill passages with the pieces of this level; a piece that is too long is packed at the next level."""
    if level == len(_CUTS) or _units(text) <= limit:
        return [text]
    packed: list[str] = []
    last, filled = [""], 0  # the passage that is being filled, in pieces
    for piece in _pieces(text, level):
        filled += _units(piece)
        if filled <= limit:
            last.append(piece)
        else:
            before, heading = _without_heading("".join(last)) if level < len(_CUTS) - 1 else ("".join(last), "")
            *whole, end = _pack(heading + piece, level + 1, limit)
            packed += [before, *whole]
            last, filled = [end], _units(end)
    return [*packed, "".join(last)]


def _pieces(text: str, level: int) -> Iterator[str]:
    start = 0
    for found in _CUTS[level].finditer(text):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def _without_heading(text: str) -> tuple[str, str]:
    """(text, heading): a heading that ends the text belongs to what follows."""
    line = text.rfind("\n", 0, len(text.rstrip())) + 1
    return (text[:line], text[line:]) if _HEADING.match(text, line) else (text, "")
