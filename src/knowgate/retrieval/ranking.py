"""How many passages a search may be asked for, and which of very many scores are worth ranking."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from knowgate.core.text import find_anchor_words, fold_text, join_tokens
from knowgate.errors import BadSetting
from knowgate.types import Passage, Retriever

SEGMENT_ROWS = 1_000  # passages whose highest score is looked at first


def check_k(k: int) -> None:
    if k < 1:
        raise BadSetting(f"k is {k}; a search asks for at least 1 passage.")


def select_candidate_rows(scores: NDArray[Any], k: int) -> NDArray[np.intp]:
    """Rising rows with a score above 0, all of the k best and whatever equals them among them.

    Most passages share no word with a query, and of those that do few can be among the best: where k stretches of
    passages each have one that reaches some score, no lower one is. At a million passages that halves a search.
    """
    whole = len(scores) - len(scores) % SEGMENT_ROWS
    if k > whole // SEGMENT_ROWS:
        return np.flatnonzero(scores > 0)
    heights = scores[:whole].reshape(-1, SEGMENT_ROWS).max(axis=1)
    border = np.partition(heights, len(heights) - k)[len(heights) - k]
    return np.flatnonzero(scores >= border) if border > 0 else np.flatnonzero(scores > 0)


MAX_ROUNDS = 3  # of retrieval for one question, the first included


def build_follow_up_query(question: str, answer: str) -> str:
    """What is looked up after an answer: the question and the answer together."""
    return f"{question} {answer}".strip()


def merge_passages(kept: Sequence[Passage], found: Sequence[Passage]) -> list[Passage]:
    """All distinct passages, best score first; those without a score last, in the order they came."""
    best: dict[str, Passage] = {}
    for passage in (*kept, *found):
        if passage.id not in best or _score(passage) > _score(best[passage.id]):
            best[passage.id] = passage
    return sorted(best.values(), key=lambda passage: -_score(passage))


def has_new_passages(kept: Sequence[Passage], found: Sequence[Passage]) -> bool:
    """Whether there are passages among these that were not there before."""
    return bool({passage.id for passage in found} - {passage.id for passage in kept})


def _score(passage: Passage) -> float:
    return float("-inf") if passage.score is None else passage.score


@runtime_checkable
class WordFilterRetriever(Protocol):
    """A retriever that can leave out found passages for want of a word, without reading them."""

    def texts_with(self, query: str, k: int, words: Sequence[str]) -> list[str]:
        """Texts of the k best passages: all of those whose `skimmed` text holds the words, and perhaps others."""
        ...


def count_passages_containing(retriever: Retriever, phrases: Sequence[str], most: int) -> list[int]:
    """For each phrase: of the `most` best passages for it, how many hold it as a run of words."""
    return [_count(phrase, texts) for phrase, texts in zip(phrases, _texts(retriever, phrases, most), strict=True)]


def _texts(retriever: Retriever, phrases: Sequence[str], most: int) -> Iterator[list[str]]:
    """For each phrase the texts that may hold it."""
    if isinstance(retriever, WordFilterRetriever):
        yield from (retriever.texts_with(phrase, most, find_anchor_words(phrase)) for phrase in phrases)
        return
    for phrase, found in zip(phrases, retriever.search(phrases, most), strict=True):
        yield _holding(found, find_anchor_words(phrase))


def find_texts_containing(retriever: Retriever, query: str, k: int, words: Sequence[str]) -> list[str]:
    """What `texts_with` promises, of any retriever."""
    if isinstance(retriever, WordFilterRetriever):
        return retriever.texts_with(query, k, words)
    return _holding(retriever.search([query], k)[0], words)


def _holding(found: Sequence[Passage], words: Sequence[str]) -> list[str]:
    return [passage.text for passage in found if _has_all(fold_text(passage.text), words)]


def _has_all(text: str, words: Sequence[str]) -> bool:
    return all(word in text for word in words)


def _count(phrase: str, texts: Sequence[str]) -> int:
    run = join_tokens(phrase)
    return sum(run in _words_of(text) for text in texts) if run.strip() else 0


@functools.lru_cache(maxsize=16_384)
def _words_of(passage: str) -> str:
    """Kept: questions about one corpus find the same passages, and so do the next run's."""
    return join_tokens(passage)
