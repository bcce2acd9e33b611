"""Lists of retrieved passages: format, merge over several rounds, count those that contain a phrase."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from knowgate.core.text import find_anchor_words, fold_text, join_tokens
from knowgate.errors import BadSetting
from knowgate.types import Passage, Retriever

MAX_ROUNDS = 3  # of retrieval for one question, including the first


def check_k(k: int) -> None:
    """Raise BadSetting unless at least one passage is requested."""
    if k < 1:
        raise BadSetting(f"k={k} is not allowed: it must be at least 1.")


def format_passage(passage: Passage) -> str:
    """Return title and text as one string: what is indexed, embedded and reranked."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


# --- several rounds of retrieval ------------------------------------------------------------------


def build_follow_up_query(question: str, answer: str) -> str:
    """Return the query of the next retrieval round: the question followed by the latest answer."""
    return f"{question} {answer}".strip()


def merge_passages(earlier: Sequence[Passage], new: Sequence[Passage]) -> list[Passage]:
    """Return all distinct passages, best score first; those without a score come last, in their given order."""
    best: dict[str, Passage] = {}
    for passage in (*earlier, *new):
        if passage.id not in best or _score(passage) > _score(best[passage.id]):
            best[passage.id] = passage
    return sorted(best.values(), key=lambda passage: -_score(passage))


def has_new_passages(earlier: Sequence[Passage], new: Sequence[Passage]) -> bool:
    """Return whether `new` contains a passage that is not in `earlier`."""
    return bool({passage.id for passage in new} - {passage.id for passage in earlier})


def _score(passage: Passage) -> float:
    return float("-inf") if passage.score is None else passage.score


# --- passages that contain a phrase ---------------------------------------------------------------


@runtime_checkable
class WordFilterRetriever(Protocol):
    """A retriever that can skip passages without certain words before it parses them."""

    def find_texts(self, query: str, k: int, words: Sequence[str]) -> list[str]:
        """Return texts among the k best passages: all that contain every word, and possibly others."""
        ...


def count_passages_containing(retriever: Retriever, phrases: Sequence[str], k: int) -> list[int]:
    """Count, for each phrase, how many of its k best passages contain it as consecutive words.

    Most passages lack one word of the phrase. They are ruled out by that word, before their text is tokenized.
    """
    if isinstance(retriever, WordFilterRetriever):
        candidates = [retriever.find_texts(phrase, k, find_anchor_words(phrase)) for phrase in phrases]
    else:
        results = retriever.search(phrases, k)
        candidates = [
            _filter_texts(passages, find_anchor_words(phrase))
            for phrase, passages in zip(phrases, results, strict=True)
        ]
    return [_count_texts(phrase, texts) for phrase, texts in zip(phrases, candidates, strict=True)]


def find_texts_containing(retriever: Retriever, query: str, k: int, words: Sequence[str]) -> list[str]:
    """Return texts among the k best passages: all that contain every word, and possibly others."""
    if isinstance(retriever, WordFilterRetriever):
        return retriever.find_texts(query, k, words)
    return _filter_texts(retriever.search([query], k)[0], words)


def _filter_texts(passages: Sequence[Passage], words: Sequence[str]) -> list[str]:
    folded = [(passage.text, fold_text(passage.text)) for passage in passages]
    return [text for text, folded_text in folded if all(word in folded_text for word in words)]


def _count_texts(phrase: str, texts: Sequence[str]) -> int:
    tokens = join_tokens(phrase)
    return sum(tokens in _join_tokens_cached(text) for text in texts) if tokens.strip() else 0


# Cached because questions about one corpus often find the same passages.
_join_tokens_cached = functools.lru_cache(maxsize=16_384)(join_tokens)
