"""Where the passages of a label run come from: an index, or the questions' own contexts; reranked where that is wished.

Knows retrievers and rerankers by their protocols; not the LLM that reads what is found, nor how much it can see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from knowgate.core.text import normalize
from knowgate.labels.grading import list_gold_answers
from knowgate.labels.options import DEFAULT_PASSAGES, LabelPlan
from knowgate.models.prompts.answers import AnswerPrompts, fit_passages
from knowgate.retrieval.passages import (
    MAX_ROUNDS,
    build_follow_up_query,
    count_passages_containing,
    has_new_passages,
    merge_passages,
)
from knowgate.retrieval.rerankers import rerank
from knowgate.types import Completion, Model, Passage, Question, Reranker, Retriever

FREQUENCY_CAP = 100  # passages looked at when counting how often an answer occurs in the corpus


class PassageSearchResults(NamedTuple):
    """What was found for each question, and in how many passages of the corpus its answer is."""

    passages: list[list[Passage]]
    frequencies: list[int | None]


class Evidence(NamedTuple):
    """What an LLM is shown: passages that fit its window, and how many were cut to make them."""

    passages: tuple[Passage, ...]
    cut: int
    frequency: int | None


@dataclass(frozen=True)
class PassageFinder:
    """Looks up what the plan asks for. `look_up` may run beside the LLM; `rank` may not: a reranker may be that LLM."""

    plan: LabelPlan
    retriever: Retriever | None = None
    reranker: Reranker | None = None

    def look_up(self, questions: Sequence[Question]) -> PassageSearchResults:
        return PassageSearchResults(self._find(questions), self._frequencies(questions))

    def _find(self, questions: Sequence[Question]) -> list[list[Passage]]:
        """As they are found: not reranked."""
        if not self.plan.open_book:
            return [[] for _ in questions]
        if self.retriever is not None:
            k = self.plan.k or DEFAULT_PASSAGES
            return self.retriever.search([q.text for q in questions], self.plan.candidates if self.reranker else k)
        most = self.plan.k if self.reranker is None else self.plan.candidates
        return [list(question.contexts[:most]) for question in questions]

    def rank(self, questions: Sequence[Question], found: list[list[Passage]]) -> list[list[Passage]]:
        """The passages to show, of those that were found."""
        if self.reranker is None or not self.plan.open_book:
            return found
        return rerank(self.reranker, [question.text for question in questions], found, self.plan.k or DEFAULT_PASSAGES)

    def search(self, queries: Sequence[str]) -> list[list[Passage]]:
        """What the index has for any words, in the order the reranker wants where there is one."""
        k = self.plan.k or DEFAULT_PASSAGES
        if self.retriever is None or self.reranker is None:
            return self.retriever.search(list(queries), k) if self.retriever else []
        found = self.retriever.search(list(queries), self.plan.candidates)
        return rerank(self.reranker, list(queries), found, k)

    def _frequencies(self, questions: Sequence[Question]) -> list[int | None]:
        """Passages that hold a gold answer, up to a cap: what is rare in the corpus is long-tail knowledge."""
        if self.retriever is None or self.retriever.name == "http" or not self.plan.open_book:
            return [None for _ in questions]
        first = [next(iter(list_gold_answers(question)), "") for question in questions]
        counts = iter(count_passages_containing(self.retriever, [gold for gold in first if gold], FREQUENCY_CAP))
        return [next(counts) if gold else None for gold in first]


def count_truncated(passages: Sequence[Passage], kept: Sequence[Passage]) -> int:
    """Passages left out or shortened."""
    shortened = sum(a.text != b.text for a, b in zip(kept, passages, strict=False))
    return len(passages) - len(kept) + shortened


SearchFunction = Callable[[Sequence[str]], list[list[Passage]]]


@dataclass
class IterativeAnswer:
    """A question on its way: what it was shown last, what was answered, how many rounds that took."""

    question: Question
    passages: Sequence[Passage]
    answer: Completion
    taken: int = 1
    tokens: int = 0  # generated after the first round
    is_done: bool = False


@dataclass(frozen=True)
class IterativeAnswerer:
    """Goes on from answers of a first round. k: passages shown at a time."""

    model: Model
    prompts: AnswerPrompts
    search: SearchFunction
    k: int
    max_tokens: int

    def go_on(self, rounds: Sequence[IterativeAnswer]) -> None:
        """Take each as far as it goes, all of them side by side."""
        for taken in range(2, MAX_ROUNDS + 1):
            going = [one for one in rounds if not one.is_done]
            if not going:
                return
            self._look_further(going, taken)
            self._answer([one for one in going if not one.is_done])

    def _look_further(self, going: Sequence[IterativeAnswer], taken: int) -> None:
        found = self.search([build_follow_up_query(one.question.text, one.answer.text) for one in going])
        for one, passages in zip(going, found, strict=True):
            one.taken = taken
            best = merge_passages(one.passages, passages)[: self.k]
            fitting = fit_passages(self.model, self.prompts, one.question, best, self.max_tokens)
            one.is_done = not has_new_passages(one.passages, fitting)
            one.passages = one.passages if one.is_done else fitting

    def _answer(self, going: Sequence[IterativeAnswer]) -> None:
        asked = [self.prompts.open(one.question, one.passages) for one in going]
        for one, (answer,) in zip(going, self.model.generate(asked, max_tokens=self.max_tokens), strict=True):
            one.is_done = normalize(answer.text) == normalize(one.answer.text)
            one.answer, one.tokens = answer, one.tokens + answer.n_tokens
