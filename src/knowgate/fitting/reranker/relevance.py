"""Relevance without an LLM: which passages hold a gold answer. What a plain reranker learns before it is aligned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from knowgate.fitting.reranker.training import Group
from knowgate.labels import golds
from knowgate.preferences import Preference, distinct
from knowgate.rerank import shown
from knowgate.text import spaced
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
    texts, rng = PassageWords(), np.random.default_rng(seed)
    groups: list[Group] = []
    for question, pool in zip(questions, pools, strict=True):
        answers = [words for gold in golds(question) if (words := spaced(gold)).strip()]
        holds = [texts.hold(passage, answers) for passage in pool]
        holding = [passage for passage, does in zip(pool, holds, strict=True) if does]
        lacking = [passage for passage, does in zip(pool, holds, strict=True) if not does][:NEGATIVES]
        if holding:
            lacking += _strangers(answers, others, NEGATIVES - len(lacking), rng, texts)
            groups += [_group(question, holding[:POSITIVES], lacking)] if lacking else []
    return groups


@dataclass
class PassageWords:
    """Passages as words between spaces, each taken apart once: thousands of questions share a corpus."""

    known: dict[str, str] = field(default_factory=dict)

    def hold(self, passage: Passage, answers: Sequence[str]) -> bool:
        text = shown(passage)
        if text not in self.known:
            self.known[text] = spaced(text)
        return any(answer in self.known[text] for answer in answers)


def _strangers(
    answers: Sequence[str], others: Sequence[Passage], n: int, rng: np.random.Generator, texts: PassageWords
) -> list[Passage]:
    if n <= 0:
        return []
    drawn = [others[int(place)] for place in rng.integers(0, len(others), 3 * n)]
    return [passage for passage in distinct(drawn) if not texts.hold(passage, answers)][:n]


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
