"""Split documents into passages of whole paragraphs; a paragraph that is too long is split into sentences.

Sizes are in words. A Chinese or Japanese character counts as 120/250 of a word, because 250 characters say about as
much as 120 words. Passages do not overlap. Each ends after a paragraph, a sentence or, at worst, a word. The regular
expressions take linear time, so a page of nothing but dots takes no longer than any other page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from knowgate.retrieval.documents import Document
from knowgate.retrieval.tokenizer import CJK_CHARACTER, CJK_RANGES
from knowgate.types import Passage

MAX_PASSAGE_WORDS = 120
_UNITS_PER_WORD, _UNITS_PER_CJK_CHARACTER = 25, 12  # lengths are counted in integer units, so that sums are exact

_WORD = re.compile(rf"[^\W{CJK_RANGES}][^\s{CJK_RANGES}]*")
# Where to split, from the best place to the worst. Each piece keeps the separator at its end, so that joining all
# pieces gives the original text.
_PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE_END = re.compile(
    # English: a space must follow. The lookbehind makes a row of dots match only from its first dot (linear time).
    r"(?<![.!?])[.!?]+[\"'”’)\]]*\s+"
    r"|[。！？；…]+[”’」』）】]*\s*"  # Chinese: no space needs to follow.
    r"|\n(?=[^\S\n]*(?:[-*+•|]|\d+[.)])\s)"  # A line break before a list item or a table row.
)
_WORD_END = re.compile(rf"\s+|(?<=[{CJK_RANGES}])(?=\w)|(?<=\w)(?=[{CJK_RANGES}])")
_SEPARATORS = (_PARAGRAPH_END, _SENTENCE_END, _WORD_END)
_HEADING = re.compile(r"#{1,6}[ \t]")


def split_document(document: Document, max_words: int = MAX_PASSAGE_WORDS) -> list[Passage]:
    """Split a document into passages.

    Example: document 'a' becomes the passages 'a#0' and 'a#1'. A short document keeps its id.

    Args:
        document: The document.
        max_words: The maximum length of a passage in words.
    """
    texts = split_text(document.text, max_words)
    if len(texts) == 1:
        return [Passage(document.id, texts[0], document.title)]
    return [Passage(f"{document.id}#{number}", text, document.title) for number, text in enumerate(texts)]


def split_text(text: str, max_words: int = MAX_PASSAGE_WORDS) -> list[str]:
    """Split a text into non-empty pieces of at most `max_words` words.

    A very long word is not split.
    """
    pieces = [piece.strip() for piece in _pack(text, level=0, limit=max_words * _UNITS_PER_WORD)]
    return [piece for piece in pieces if piece]


def _count_units(text: str) -> int:
    """Return the length of a text in units of 1/25 word, which limit passages: a Chinese or Japanese character counts 12."""
    words = sum(1 for _ in _WORD.finditer(text))
    characters = sum(1 for _ in CJK_CHARACTER.finditer(text))
    return words * _UNITS_PER_WORD + characters * _UNITS_PER_CJK_CHARACTER


def _pack(text: str, level: int, limit: int) -> list[str]:
    """Split a text into passages of at most `limit` units, between paragraphs if possible.

    Long paragraphs are split recursively.

    Args:
        text: The text to split.
        level: Index into `_SEPARATORS`: 0 for paragraphs, 1 for sentences, 2 for words.
        limit: The maximum length of a passage in units, of which a word has 25 (see `_count_units`).
    """
    if level == len(_SEPARATORS) or _count_units(text) <= limit:
        return [text]
    passages: list[str] = []
    pieces: list[str] = []  # of the passage that is being filled
    size = 0  # of these pieces, in units
    for piece in _split_at(text, level):
        size += _count_units(piece)
        if size <= limit:
            pieces.append(piece)
            continue
        # The piece does not fit: finish the current passage and start the next one with the piece.
        finished = "".join(pieces)
        heading = ""
        if level < len(_SEPARATORS) - 1:  # at the last level, the pieces are words, which are no headings
            finished, heading = _split_trailing_heading(finished)
        # The piece itself may be longer than a passage.
        *complete, last = _pack(heading + piece, level + 1, limit)
        passages += [finished, *complete]
        pieces = [last]  # more pieces may still fit behind it
        size = _count_units(last)
    return [*passages, "".join(pieces)]


def _split_at(text: str, level: int) -> Iterator[str]:
    """Yield the pieces of a text between the separators of a level.

    Each piece keeps its final separator.
    """
    start = 0
    for separator in _SEPARATORS[level].finditer(text):
        yield text[start : separator.end()]
        start = separator.end()
    yield text[start:]


def _split_trailing_heading(text: str) -> tuple[str, str]:
    r"""Split a Markdown heading off the end of a text.

    The heading belongs to the following text.

    Returns:
        The text before the heading, and the heading ('' if there is none). "One.\n# Two\n" gives "One.\n", "# Two\n".
    """
    last_line_start = text.rfind("\n", 0, len(text.rstrip())) + 1
    if not _HEADING.match(text, last_line_start):
        return text, ""
    return text[:last_line_start], text[last_line_start:]
