"""The MASK study (KBM section 3.1): gold answers inside passages are replaced by the word MASK.

Replaced is what the grader would accept: token runs, so that "Spider-Man" goes where the gold answer is "spider man".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from knowgate.core.text import ARTICLES, CJK, contains_tokens, tokenize
from knowgate.types import Passage

MASK = "MASK"
# Pieces that a text is cut into, fine ones first: numbers and words, then what stands between spaces, lines, all of it.
PIECE_PATTERNS = (
    re.compile(rf"(?:(?!{CJK.pattern})\w|(?<=\d)[.,](?=\d))+|{CJK.pattern}"),
    re.compile(r"\S+"),
    re.compile(r"[^\n]+"),
    re.compile(r".+", re.DOTALL),
)


class TextPiece(NamedTuple):
    """Where it stands: in which of several texts, from where to where; and what the grader reads there."""

    text: int
    start: int
    end: int
    tokens: tuple[str, ...]


class PieceSpan(NamedTuple):
    """A run of pieces, end excluded."""

    start: int
    end: int


def mask_passages(passages: Sequence[Passage], golds: Sequence[str]) -> list[Passage]:
    """Every gold answer and alias replaced in titles and texts, until the grader finds none in what the LLM is shown.

    An answer that is the word MASK itself stays.
    """
    answers = [found for gold in golds if (found := tokenize(gold)) and found != [MASK.lower()]]
    texts = [part for passage in passages for part in (passage.title, passage.text)]
    for pattern in PIECE_PATTERNS:
        texts = mask_texts(texts, answers, pattern)
    pairs = zip(passages, texts[::2], texts[1::2], strict=True)
    return [replace(passage, title=title, text=text) for passage, title, text in pairs]


def mask_texts(texts: Sequence[str], answers: Sequence[list[str]], pattern: re.Pattern[str]) -> list[str]:
    """The texts with MASK for the pieces that make up an answer, in one of them or where two are read as one."""
    masked = list(texts)
    for shown in (range(len(texts)), range(1, len(texts), 2)):  # with titles, and texts alone: a title may be left out
        if contains_answer(" ".join(masked[number] for number in shown), answers):
            pieces = [piece for number in shown for piece in _pieces(masked[number], number, pattern)]
            masked = _replaced(masked, pieces, _covers(pieces, answers))
    return masked


def contains_answer(text: str, answers: Sequence[list[str]]) -> bool:
    """Whether the grader would find one of these answers, given as tokens."""
    said = tokenize(text)
    return any(contains_tokens(said, answer) for answer in answers)


def _pieces(text: str, number: int, pattern: re.Pattern[str]) -> Iterator[TextPiece]:
    for match in pattern.finditer(text):
        read = tuple(tokenize(match.group()))
        if read and not (set(read) <= ARTICLES and _stands_alone(text, match)):
            yield TextPiece(number, match.start(), match.end(), read)


def _stands_alone(text: str, match: re.Match[str]) -> bool:
    """A word, and not the letter of 维生素a: between Chinese characters 'a' is no article."""
    return not (CJK.match(text[match.start() - 1 : match.start()]) or CJK.match(text[match.end() : match.end() + 1]))


def _covers(pieces: Sequence[TextPiece], answers: Sequence[list[str]]) -> list[PieceSpan]:
    """Runs of pieces that make up an answer; those that overlap are one."""
    flat = [(token, place) for place, piece in enumerate(pieces) for token in piece.tokens]
    said = [token for token, _ in flat]
    found = sorted(
        PieceSpan(flat[start][1], flat[start + len(answer) - 1][1] + 1)
        for answer in answers
        for start in range(len(said) - len(answer) + 1)
        if said[start] == answer[0] and said[start : start + len(answer)] == answer
    )
    joined: list[PieceSpan] = []
    for cover in found:
        if joined and cover.start < joined[-1].end:
            joined[-1] = PieceSpan(joined[-1].start, max(joined[-1].end, cover.end))
        else:
            joined.append(cover)
    return joined


def _replaced(texts: Sequence[str], pieces: Sequence[TextPiece], covers: Sequence[PieceSpan]) -> list[str]:
    """From the last to the first, so that places stay what they are."""
    masked = list(texts)
    for cover in reversed(covers):
        inside = pieces[cover.start : cover.end]
        for number in sorted({piece.text for piece in inside}):
            part = [piece for piece in inside if piece.text == number]
            masked[number] = masked[number][: part[0].start] + MASK + masked[number][part[-1].end :]
    return masked


def is_mask(answer: str) -> bool:
    """The answer is the word MASK, whatever stands around it in punctuation."""
    return tokenize(answer) == [MASK.lower()]


def mentions_mask(answer: str) -> bool:
    """The answer holds the word MASK: it was copied."""
    return MASK.lower() in tokenize(answer)
