"""How many passages hold a phrase, among those that are found for it.

Nearly all of a hundred passages are ruled out by one word of the phrase that they lack, before their words are taken
apart; what an index of ours finds is not even read then. Knows retrievers; not what the phrases are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from knowgate.text import landmarks, skimmed, spaced
from knowgate.types import Passage, Retriever


@runtime_checkable
class SkimmingRetriever(Protocol):
    """A retriever that can leave out found passages for want of a word, without reading them."""

    def texts_with(self, query: str, k: int, words: Sequence[str]) -> list[str]:
        """Texts of the k best passages: all of those whose `skimmed` text holds the words, and perhaps others."""
        ...


def count_holding(retriever: Retriever, phrases: Sequence[str], most: int) -> list[int]:
    """For each phrase: of the `most` best passages for it, how many hold it as a run of words."""
    return [_count(phrase, texts) for phrase, texts in zip(phrases, _texts(retriever, phrases, most), strict=True)]


def _texts(retriever: Retriever, phrases: Sequence[str], most: int) -> Iterator[list[str]]:
    """For each phrase the texts that may hold it."""
    if isinstance(retriever, SkimmingRetriever):
        yield from (retriever.texts_with(phrase, most, landmarks(phrase)) for phrase in phrases)
        return
    for phrase, found in zip(phrases, retriever.search(phrases, most), strict=True):
        yield _holding(found, landmarks(phrase))


def texts_holding(retriever: Retriever, query: str, k: int, words: Sequence[str]) -> list[str]:
    """What `texts_with` promises, of any retriever."""
    if isinstance(retriever, SkimmingRetriever):
        return retriever.texts_with(query, k, words)
    return _holding(retriever.search([query], k)[0], words)


def _holding(found: Sequence[Passage], words: Sequence[str]) -> list[str]:
    return [passage.text for passage in found if _has_all(skimmed(passage.text), words)]


def _has_all(text: str, words: Sequence[str]) -> bool:
    return all(word in text for word in words)


def _count(phrase: str, texts: Sequence[str]) -> int:
    run = spaced(phrase)
    return sum(run in _words_of(text) for text in texts) if run.strip() else 0


@functools.lru_cache(maxsize=16_384)
def _words_of(passage: str) -> str:
    """Kept: questions about one corpus find the same passages, and so do the next run's."""
    return spaced(passage)
