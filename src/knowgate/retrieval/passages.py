"""Lists of retrieved passages: format, merge over several rounds, count those that contain a phrase."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from knowgate.core.text import find_anchor_words, fold_text, join_tokens
from knowgate.errors import BadSetting
from knowgate.types import Passage, Retriever

MAX_ROUNDS = 3  # of retrieval for one question, including the first
CACHED_TEXTS = 16_384


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


def count_passages_containing(retriever: Retriever, phrases: Sequence[str], k: int) -> list[int]:
    """Count, for each phrase, how many of its k best passages contain it as consecutive words."""
    results = retriever.search(phrases, k)
    return [_count_containing(phrase, passages) for phrase, passages in zip(phrases, results, strict=True)]


def _count_containing(phrase: str, passages: Sequence[Passage]) -> int:
    """Count passages with a phrase; most lack one of its words, which rules them out before they are tokenized."""
    tokens, words = join_tokens(phrase), find_anchor_words(phrase)
    if not tokens.strip():
        return 0
    candidates = [passage.text for passage in passages if _contains_all(_fold_cached(passage.text), words)]
    return sum(tokens in _join_tokens_cached(text) for text in candidates)


def _contains_all(text: str, words: Sequence[str]) -> bool:
    return all(word in text for word in words)


# Cached because questions about one corpus often find the same passages.
_fold_cached = functools.lru_cache(maxsize=CACHED_TEXTS)(fold_text)
_join_tokens_cached = functools.lru_cache(maxsize=CACHED_TEXTS)(join_tokens)
