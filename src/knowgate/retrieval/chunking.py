"""Split documents into passages: whole paragraphs up to a size; longer ones are split at sentence ends.

Sizes are in words. A Chinese or Japanese character counts as 120/250 of a word, because 250 characters say about as
much as 120 words. Passages do not overlap: each ends with a paragraph, a sentence or, at worst, a word. The patterns
read each character only a few times, so a page of dots takes no longer than any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from knowgate.retrieval.documents import Document
from knowgate.retrieval.tokenizer import CJK_CHARACTER, CJK_RANGES
from knowgate.types import Passage

MAX_PASSAGE_WORDS = 120
_UNITS_PER_WORD, _UNITS_PER_CJK_CHARACTER = 25, 12  # integers, so that sums are exact

_WORD = re.compile(rf"[^\W{CJK_RANGES}][^\s{CJK_RANGES}]*")
# Where to split, best first. Each piece keeps its separator, so that joining the pieces gives the text again.
_PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE_END = re.compile(
    r"(?<![.!?])[.!?]+[\"'”’)\]]*\s+"  # English: needs a space; the lookbehind tries a row of dots only once
    r"|[。！？；…]+[”’」』）】]*\s*"  # Chinese: needs no space
    r"|\n(?=[^\S\n]*(?:[-*+•|]|\d+[.)])\s)"  # before the next list item or table row
)
_WORD_END = re.compile(rf"\s+|(?<=[{CJK_RANGES}])(?=\w)|(?<=\w)(?=[{CJK_RANGES}])")
_SEPARATORS = (_PARAGRAPH_END, _SENTENCE_END, _WORD_END)
_HEADING = re.compile(r"#{1,6}[ \t]")


def split_document(document: Document, max_words: int = MAX_PASSAGE_WORDS) -> list[Passage]:
    """Split a document into passages with the ids `docid#0`, `docid#1`, ...

    A document that fits into one passage keeps its own id.
    """
    texts = split_text(document.text, max_words)
    if len(texts) == 1:
        return [Passage(document.id, texts[0], document.title)]
    return [Passage(f"{document.id}#{number}", text, document.title) for number, text in enumerate(texts)]


def split_text(text: str, max_words: int = MAX_PASSAGE_WORDS) -> list[str]:
    """Split a text into pieces of at most `max_words`, except for single words that are longer than that."""
    return [stripped for piece in _pack(text, 0, max_words * _UNITS_PER_WORD) if (stripped := piece.strip())]


def count_words(text: str) -> float:
    """Return the length of a text in words; a Chinese or Japanese character counts as 0.48."""
    return _count_units(text) / _UNITS_PER_WORD


def _count_units(text: str) -> int:
    words = sum(1 for _ in _WORD.finditer(text))
    characters = sum(1 for _ in CJK_CHARACTER.finditer(text))
    return words * _UNITS_PER_WORD + characters * _UNITS_PER_CJK_CHARACTER


def _pack(text: str, level: int, limit: int) -> list[str]:
    """Fill passages with the pieces of one separator level; split pieces that are too long at the next level."""
    if level == len(_SEPARATORS) or _count_units(text) <= limit:
        return [text]
    passages: list[str] = []
    current, size = [""], 0  # the pieces of the passage being filled, and their units
    for piece in _split_at(text, level):
        size += _count_units(piece)
        if size <= limit:
            current.append(piece)
            continue
        body, heading = "".join(current), ""
        if level < len(_SEPARATORS) - 1:
            body, heading = _split_trailing_heading(body)
        *complete, last = _pack(heading + piece, level + 1, limit)
        passages += [body, *complete]
        current, size = [last], _count_units(last)
    return [*passages, "".join(current)]


def _split_at(text: str, level: int) -> Iterator[str]:
    start = 0
    for separator in _SEPARATORS[level].finditer(text):
        yield text[start : separator.end()]
        start = separator.end()
    yield text[start:]


def _split_trailing_heading(text: str) -> tuple[str, str]:
    """Split off a Markdown heading on the last line: it belongs to the text that follows."""
    line_start = text.rfind("\n", 0, len(text.rstrip())) + 1
    return (text[:line_start], text[line_start:]) if _HEADING.match(text, line_start) else (text, "")
