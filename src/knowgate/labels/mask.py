"""Replaces gold answers in passages by the word MASK, for the MASK study of KBM (section 3.1).

The study asks whether an LLM still answers correctly if the passages do not contain the answer. Every spelling that
the grader would accept is replaced: "Spider-Man" is masked if the gold answer is "spider man".
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
    """A word, line or other piece of a text, with its normalized tokens."""

    text_index: int  # index of the text that the piece belongs to
    start: int  # position of its first character
    end: int  # position after its last character
    tokens: tuple[str, ...]


class PieceSpan(NamedTuple):
    """Numbers of consecutive pieces, from `start` up to but not including `end`."""

    start: int
    end: int


def mask_passages(passages: Sequence[Passage], golds: Sequence[str]) -> list[Passage]:
    """Replace every gold answer in the titles and texts of passages by MASK.

    Each text is split into words first, then into larger and larger pieces, and each splitting is searched for answers.
    Small pieces come first, because only whole pieces are replaced.
    """
    tokenized = [tokenize(gold) for gold in golds]
    answers = [tokens for tokens in tokenized if tokens and tokens != [MASK.lower()]]
    texts = [text for passage in passages for text in (passage.title, passage.text)]  # title, text, title, text, ...
    for pattern in PIECE_PATTERNS:
        texts = mask_texts(texts, answers, pattern)
    triples = zip(passages, texts[::2], texts[1::2], strict=True)
    return [replace(passage, title=title, text=text) for passage, title, text in triples]


def mask_texts(texts: Sequence[str], answers: Sequence[list[str]], pattern: re.Pattern[str]) -> list[str]:
    """Replace gold answers by MASK. An answer may begin in one text and end in the next.

    Answers are first searched in titles and texts together, and then in the texts alone, because prompts may leave out
    titles.

    Args:
        texts: Titles and texts of passages, alternating: title, text, title, text.
        answers: Tokens of each gold answer.
        pattern: How texts are cut into pieces.
    """
    masked = list(texts)
    for indices in (range(len(texts)), range(1, len(texts), 2)):  # titles and texts; then only texts
        if contains_answer(" ".join(masked[index] for index in indices), answers):
            pieces = [piece for index in indices for piece in _cut_into_pieces(masked[index], index, pattern)]
            masked = _replace_spans(masked, pieces, _find_answer_spans(pieces, answers))
    return masked


def contains_answer(text: str, answers: Sequence[list[str]]) -> bool:
    """Return whether the grader would find an answer in a text."""
    tokens = tokenize(text)
    return any(contains_tokens(tokens, answer) for answer in answers)


def _cut_into_pieces(text: str, text_index: int, pattern: re.Pattern[str]) -> Iterator[TextPiece]:
    """Yield the pieces of a text, but not its articles ("a", "the"), which the grader ignores, too.

    Args:
        text: The text.
        text_index: Index of the text among all texts, which is stored in the pieces.
        pattern: Matches one piece, such as a word or a line.
    """
    for match in pattern.finditer(text):
        tokens = tuple(tokenize(match.group()))
        is_article = set(tokens) <= ARTICLES and _is_separate_word(text, match)
        if tokens and not is_article:
            yield TextPiece(text_index, match.start(), match.end(), tokens)


def _is_separate_word(text: str, match: re.Match[str]) -> bool:
    """Return whether a match has no Chinese character next to it: the 'a' of 维生素a is not an article."""
    return not (CJK.match(text[match.start() - 1 : match.start()]) or CJK.match(text[match.end() : match.end() + 1]))


def _find_answer_spans(pieces: Sequence[TextPiece], answers: Sequence[list[str]]) -> list[PieceSpan]:
    """Find the answers in a text, as spans of pieces. Overlapping spans are merged.

    Args:
        pieces: The pieces of the text, such as words, in order.
        answers: The tokens of each answer. A span covers all pieces that have a token of the answer.
    """
    tokens = [token for piece in pieces for token in piece.tokens]
    piece_numbers = [number for number, piece in enumerate(pieces) for _ in piece.tokens]  # of each token
    positions: dict[str, list[int]] = {}  # where each token occurs, for a fast search
    for position, token in enumerate(tokens):
        positions.setdefault(token, []).append(position)
    spans: list[PieceSpan] = []
    for answer in answers:
        for start in positions.get(answer[0], ()):
            end = start + len(answer)
            if tokens[start:end] == answer:
                spans.append(PieceSpan(piece_numbers[start], piece_numbers[end - 1] + 1))
    return _merge_overlapping(spans)


def _merge_overlapping(spans: Sequence[PieceSpan]) -> list[PieceSpan]:
    """Sort spans, and join overlapping ones."""
    merged: list[PieceSpan] = []
    for span in sorted(spans):
        if merged and span.start < merged[-1].end:
            merged[-1] = PieceSpan(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def _replace_spans(texts: Sequence[str], pieces: Sequence[TextPiece], spans: Sequence[PieceSpan]) -> list[str]:
    """Return the texts with each span of pieces replaced by MASK. A span over several texts gets a MASK in each."""
    masked = list(texts)
    for span in reversed(spans):  # from the end, so that the positions of earlier pieces stay valid
        span_pieces = pieces[span.start : span.end]
        for index in sorted({piece.text_index for piece in span_pieces}):
            pieces_of_text = [piece for piece in span_pieces if piece.text_index == index]
            start, end = pieces_of_text[0].start, pieces_of_text[-1].end
            masked[index] = masked[index][:start] + MASK + masked[index][end:]
    return masked


def is_mask(answer: str) -> bool:
    """Return whether an answer is nothing but the word MASK; case and punctuation do not matter."""
    return tokenize(answer) == [MASK.lower()]


def mentions_mask(answer: str) -> bool:
    """Return whether an answer contains the word MASK, which shows that it was copied from a masked passage."""
    return MASK.lower() in tokenize(answer)
