"""The MASK study (KBM, section 3.1): gold answers in passages are replaced by the word MASK.

Everything that the grader would accept is replaced, so "Spider-Man" is masked if the gold answer is "spider man".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from knowgate.core.text import ARTICLES, CJK, contains_tokens, tokenize
from knowgate.types import Passage

MASK = "MASK"
# How texts are cut into pieces, finest first: words and numbers, then words with punctuation, lines, the whole text.
PIECE_PATTERNS = (
    re.compile(rf"(?:(?!{CJK.pattern})\w|(?<=\d)[.,](?=\d))+|{CJK.pattern}"),
    re.compile(r"\S+"),
    re.compile(r"[^\n]+"),
    re.compile(r".+", re.DOTALL),
)


class TextPiece(NamedTuple):
    """A piece of one of several texts: the number of the text, its span, and its tokens for the grader."""

    text: int
    start: int
    end: int
    tokens: tuple[str, ...]


class PieceSpan(NamedTuple):
    """A run of consecutive pieces, end excluded."""

    start: int
    end: int


def mask_passages(passages: Sequence[Passage], golds: Sequence[str]) -> list[Passage]:
    """Replace every gold answer in titles and texts by MASK, until the grader finds none.

    A gold answer that is the word MASK itself stays.
    """
    answers = [tokens for gold in golds if (tokens := tokenize(gold)) and tokens != [MASK.lower()]]
    texts = [part for passage in passages for part in (passage.title, passage.text)]
    for pattern in PIECE_PATTERNS:
        texts = mask_texts(texts, answers, pattern)
    triples = zip(passages, texts[::2], texts[1::2], strict=True)
    return [replace(passage, title=title, text=text) for passage, title, text in triples]


def mask_texts(texts: Sequence[str], answers: Sequence[list[str]], pattern: re.Pattern[str]) -> list[str]:
    """Replace the pieces that form an answer by MASK, also where an answer spans two texts.

    Args:
        texts: Titles and texts of passages, in turn.
        answers: Tokens of each gold answer.
        pattern: How texts are cut into pieces.
    """
    masked = list(texts)
    for numbers in (range(len(texts)), range(1, len(texts), 2)):  # prompts may leave titles out
        if contains_answer(" ".join(masked[number] for number in numbers), answers):
            pieces = [piece for number in numbers for piece in _cut_into_pieces(masked[number], number, pattern)]
            masked = _replace_spans(masked, pieces, _find_answer_spans(pieces, answers))
    return masked


def contains_answer(text: str, answers: Sequence[list[str]]) -> bool:
    """Return whether the grader would find one of the tokenized answers in a text."""
    tokens = tokenize(text)
    return any(contains_tokens(tokens, answer) for answer in answers)


def _cut_into_pieces(text: str, number: int, pattern: re.Pattern[str]) -> Iterator[TextPiece]:
    for match in pattern.finditer(text):
        tokens = tuple(tokenize(match.group()))
        if tokens and not (set(tokens) <= ARTICLES and _is_separate_word(text, match)):
            yield TextPiece(number, match.start(), match.end(), tokens)


def _is_separate_word(text: str, match: re.Match[str]) -> bool:
    """Return False between Chinese characters: the 'a' of 维生素a is not an article."""
    return not (CJK.match(text[match.start() - 1 : match.start()]) or CJK.match(text[match.end() : match.end() + 1]))


def _find_answer_spans(pieces: Sequence[TextPiece], answers: Sequence[list[str]]) -> list[PieceSpan]:
    """Find the runs of pieces that form an answer; overlapping runs are merged."""
    numbered = [(token, number) for number, piece in enumerate(pieces) for token in piece.tokens]
    tokens = [token for token, _ in numbered]
    positions: dict[str, list[int]] = {}
    for position, token in enumerate(tokens):
        positions.setdefault(token, []).append(position)
    spans = sorted(
        PieceSpan(numbered[start][1], numbered[start + len(answer) - 1][1] + 1)
        for answer in answers
        for start in positions.get(answer[0], ())
        if tokens[start : start + len(answer)] == answer
    )
    merged: list[PieceSpan] = []
    for span in spans:
        if merged and span.start < merged[-1].end:
            merged[-1] = PieceSpan(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def _replace_spans(texts: Sequence[str], pieces: Sequence[TextPiece], spans: Sequence[PieceSpan]) -> list[str]:
    """Replace spans by MASK, from last to first, so that earlier positions stay valid."""
    masked = list(texts)
    for span in reversed(spans):
        span_pieces = pieces[span.start : span.end]
        for number in sorted({piece.text for piece in span_pieces}):
            part = [piece for piece in span_pieces if piece.text == number]
            masked[number] = masked[number][: part[0].start] + MASK + masked[number][part[-1].end :]
    return masked


def is_mask(answer: str) -> bool:
    """Return whether an answer is the word MASK, apart from punctuation."""
    return tokenize(answer) == [MASK.lower()]


def mentions_mask(answer: str) -> bool:
    """Return whether an answer contains the word MASK, so that it was copied from a passage."""
    return MASK.lower() in tokenize(answer)
