"""Several rounds of retrieval for one question: what is looked up next, and what is kept of all that was found.

Knows texts and passages; not who answers, nor who decides that one round is not enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.types import Passage

MOST_ROUNDS = 3  # of retrieval for one question, the first included


def follow_up(question: str, answer: str) -> str:
    """What is looked up after an answer: the question and the answer together."""
    return f"{question} {answer}".strip()


def merged(kept: Sequence[Passage], found: Sequence[Passage]) -> list[Passage]:
    """All distinct passages, best score first; those without a score last, in the order they came."""
    best: dict[str, Passage] = {}
    for passage in (*kept, *found):
        if passage.id not in best or _score(passage) > _score(best[passage.id]):
            best[passage.id] = passage
    return sorted(best.values(), key=lambda passage: -_score(passage))


def has_new(kept: Sequence[Passage], found: Sequence[Passage]) -> bool:
    """Whether there are passages among these that were not there before."""
    return bool({passage.id for passage in found} - {passage.id for passage in kept})


def _score(passage: Passage) -> float:
    return float("-inf") if passage.score is None else passage.score
