"""Relevance without an LLM: which passages hold a gold answer. What a plain reranker learns before it is aligned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from knowgate.fitting.reranker.training import Group
from knowgate.labels import golds
from knowgate.preferences import Preference, distinct
from knowgate.rerank import shown
from knowgate.text import contains_tokens, tokens
from knowgate.types import Passage, Question, Retriever

NEGATIVES = 7
POSITIVES = 2  # of each question; more of them say the same


def relevance_groups(
    questions: Sequence[Question], retriever: Retriever | None = None, *, candidates: int = 20, seed: int = 0
) -> list[Group]:
    """Passages of a question that hold a gold answer against others of the same question that hold none.

    Passages are the question's own contexts and what the retriever finds. Where a question has fewer than seven that
    hold no answer, other questions' passages fill up.
    """
    found = retriever.search([q.text for q in questions], candidates) if retriever else [[] for _ in questions]
    pools = [distinct([*q.contexts, *more]) for q, more in zip(questions, found, strict=True)]
    others = [passage for pool in pools for passage in pool]
    rng = np.random.default_rng(seed)
    groups: list[Group] = []
    for question, pool in zip(questions, pools, strict=True):
        holding = [passage for passage in pool if holds_answer(passage, question)]
        lacking = [passage for passage in pool if not holds_answer(passage, question)][:NEGATIVES]
        if holding and golds(question):
            lacking += _strangers(question, others, NEGATIVES - len(lacking), rng)
            groups += [_group(question, holding[:POSITIVES], lacking)] if lacking else []
    return groups


def holds_answer(passage: Passage, question: Question) -> bool:
    words = tokens(shown(passage))
    return any(contains_tokens(words, tokens(gold)) for gold in golds(question))


def _strangers(question: Question, others: Sequence[Passage], n: int, rng: np.random.Generator) -> list[Passage]:
    if n <= 0:
        return []
    drawn = [others[int(place)] for place in rng.integers(0, len(others), 3 * n)]
    return [passage for passage in distinct(drawn) if not holds_answer(passage, question)][:n]


def _group(question: Question, positives: Sequence[Passage], negatives: Sequence[Passage]) -> Group:
    passages = tuple(shown(passage) for passage in (*positives, *negatives))
    return Group(question.text, passages, (*([1.0] * len(positives)), *([0.0] * len(negatives))))


def questions_of(rows: Iterable[Preference]) -> list[Question]:
    """The questions of preference rows with their candidates as contexts."""
    return [
        Question(row.question, row.id, row.answers, contexts=tuple(found.passage for found in row.candidates))
        for row in rows
        if row.error is None
    ]
