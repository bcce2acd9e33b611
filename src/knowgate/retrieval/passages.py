"""Functions for retrieved passages: format them, merge several search results, and find phrases in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from knowgate.core.nearest_neighbors import NearestHits
from knowgate.core.text import find_anchor_words, fold_text, join_tokens
from knowgate.errors import BadInput, BadSetting
from knowgate.types import Passage, Retriever

MAX_ROUNDS = 3  # searches for one question, including the first
MAX_QUERY_CHARS = 2_000  # search and rerank servers reject queries that are too long
MAX_QUERY_WORDS = 256  # OpenSearch allows 1,024 clauses by default, one for each word and field
MAX_PASSAGE_CHARS = 50_000  # about 30 pages; megabytes would hold up all requests of a server
MAX_LABEL_CHARS = 500  # of the id and the title of a passage
CACHED_TEXTS = 16_384  # passage texts whose normalized form is kept in memory


def check_k(k: int) -> None:
    """Raise BadSetting unless `k`, the number of passages to return, is at least 1."""
    if k < 1:
        raise BadSetting(f"k={k} is not allowed: it must be at least 1.")


def cut_query(query: str, max_chars: int = MAX_QUERY_CHARS, max_words: int = MAX_QUERY_WORDS) -> str:
    """Cut a query to the length that search and rerank servers accept. A short query stays as it is."""
    words = query[:max_chars].split()
    return " ".join(words[:max_words]) if len(words) > max_words else query[:max_chars]


def check_passage_lists(questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> None:
    """Raise BadInput unless there is one list of passages for each question."""
    if len(questions) != len(passages):
        raise BadInput(
            f"got {len(questions)} questions but {len(passages)} lists of passages. Pass one list per question."
        )


def cut_passage(passage: Passage) -> Passage:
    """Return a passage with only the beginning of a very long text, title or id."""
    if max(len(passage.id), len(passage.title)) <= MAX_LABEL_CHARS and len(passage.text) <= MAX_PASSAGE_CHARS:
        return passage
    id, title = passage.id[:MAX_LABEL_CHARS], passage.title[:MAX_LABEL_CHARS]
    return replace(passage, id=id, title=title, text=passage.text[:MAX_PASSAGE_CHARS])


def format_passage(passage: Passage) -> str:
    """Return the title and the text of a passage as one string, as it is indexed, embedded and reranked."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def read_hits(passages: Sequence[Passage], hits: NearestHits) -> list[Passage]:
    """Return the passages that a search has found, with their scores."""
    pairs = zip(hits.rows.tolist(), hits.scores.tolist(), strict=True)
    return [replace(passages[row], score=score) for row, score in pairs]


# --- several rounds of retrieval ------------------------------------------------------------------


def build_follow_up_query(question: str, answer: str) -> str:
    """Return the query for the next search: the question followed by the answer found so far."""
    return f"{question} {answer}".strip()


def merge_passages(earlier: Sequence[Passage], new: Sequence[Passage]) -> list[Passage]:
    """Merge the passages of two searches without duplicates, best score first.

    The higher score of a duplicate counts.

    Args:
        earlier: The passages found before.
        new: The passages of the latest search.
    """
    best: dict[str, Passage] = {}
    for passage in (*earlier, *new):
        if passage.id not in best or _score(passage) > _score(best[passage.id]):
            best[passage.id] = passage
    return sorted(best.values(), key=lambda passage: -_score(passage))


def has_new_passages(earlier: Sequence[Passage], new: Sequence[Passage]) -> bool:
    """Return whether `new` contains a passage whose id is not in `earlier`."""
    return bool({passage.id for passage in new} - {passage.id for passage in earlier})


def _score(passage: Passage) -> float:
    """Return the score of a passage; a missing score is lower than any other."""
    return float("-inf") if passage.score is None else passage.score


# --- passages that contain a phrase ---------------------------------------------------------------


def count_passages_containing(retriever: Retriever, phrases: Sequence[str], k: int) -> list[int]:
    """Search for each phrase and count the passages containing the exact phrase.

    Args:
        retriever: Where to search.
        phrases: The phrases.
        k: How many passages to search for each phrase.

    Returns:
        One count per phrase, between 0 and k.
    """
    results = retriever.search(phrases, k)
    return [_count_containing(phrase, passages) for phrase, passages in zip(phrases, results, strict=True)]


def _count_containing(phrase: str, passages: Sequence[Passage]) -> int:
    """Count the passages containing a phrase word for word.

    A quick check comes first, because tokenizing is slow.
    """
    phrase_tokens = join_tokens(phrase)
    if not phrase_tokens.strip():
        return 0
    texts = [passage.text for passage in passages]
    for word in find_anchor_words(phrase):
        texts = [text for text in texts if word in _fold_cached(text)]
    return sum(phrase_tokens in _join_tokens_cached(text) for text in texts)


# Cached because questions about one corpus often find the same passages.
_fold_cached = functools.lru_cache(maxsize=CACHED_TEXTS)(fold_text)
_join_tokens_cached = functools.lru_cache(maxsize=CACHED_TEXTS)(join_tokens)
