"""Where the passages of a label run come from: an index, or the questions' own contexts; reranked where that is wished.

Knows retrievers and rerankers by their protocols; not the LLM that reads what is found, nor how much it can see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from knowgate.labels.grading import golds
from knowgate.labels.plan import FOUND, Plan
from knowgate.rerank import rerank
from knowgate.retrieval import count_holding
from knowgate.types import Passage, Question, Reranker, Retriever

FREQUENCY_CAP = 100  # passages looked at when counting how often an answer occurs in the corpus


class LookedUp(NamedTuple):
    """What was found for each question, and in how many passages of the corpus its answer is."""

    passages: list[list[Passage]]
    frequencies: list[int | None]


class Evidence(NamedTuple):
    """What an LLM is shown: passages that fit its window, and how many were cut to make them."""

    passages: tuple[Passage, ...]
    cut: int
    frequency: int | None


@dataclass(frozen=True)
class Library:
    """Looks up what the plan asks for. `look_up` may run beside the LLM; `rank` may not: a reranker may be that LLM."""

    plan: Plan
    retriever: Retriever | None = None
    reranker: Reranker | None = None

    def look_up(self, questions: Sequence[Question]) -> LookedUp:
        return LookedUp(self._find(questions), self._frequencies(questions))

    def _find(self, questions: Sequence[Question]) -> list[list[Passage]]:
        """As they are found: not reranked."""
        if not self.plan.open_book:
            return [[] for _ in questions]
        if self.retriever is not None:
            k = self.plan.k or FOUND
            return self.retriever.search([q.text for q in questions], self.plan.candidates if self.reranker else k)
        most = self.plan.k if self.reranker is None else self.plan.candidates
        return [list(question.contexts[:most]) for question in questions]

    def rank(self, questions: Sequence[Question], found: list[list[Passage]]) -> list[list[Passage]]:
        """The passages to show, of those that were found."""
        if self.reranker is None or not self.plan.open_book:
            return found
        return rerank(self.reranker, [question.text for question in questions], found, self.plan.k or FOUND)

    def search(self, queries: Sequence[str]) -> list[list[Passage]]:
        """What the index has for any words, in the order the reranker wants where there is one."""
        k = self.plan.k or FOUND
        if self.retriever is None or self.reranker is None:
            return self.retriever.search(list(queries), k) if self.retriever else []
        found = self.retriever.search(list(queries), self.plan.candidates)
        return rerank(self.reranker, list(queries), found, k)

    def _frequencies(self, questions: Sequence[Question]) -> list[int | None]:
        """Passages that hold a gold answer, up to a cap: what is rare in the corpus is long-tail knowledge."""
        if self.retriever is None or self.retriever.name == "http" or not self.plan.open_book:
            return [None for _ in questions]
        first = [next(iter(golds(question)), "") for question in questions]
        counts = iter(count_holding(self.retriever, [gold for gold in first if gold], FREQUENCY_CAP))
        return [next(counts) if gold else None for gold in first]


def count_cut(passages: Sequence[Passage], kept: Sequence[Passage]) -> int:
    """Passages left out or shortened."""
    shortened = sum(a.text != b.text for a, b in zip(kept, passages, strict=False))
    return len(passages) - len(kept) + shortened
