"""Finds the passages for open-book answers in an index or in the data, reranks them, and answers in several rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from knowgate.core.text import normalize
from knowgate.labels.grading import list_gold_answers
from knowgate.labels.options import DEFAULT_PASSAGES, LabelOptions
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

FREQUENCY_CAP = 100  # passages searched when counting how often an answer occurs in the corpus


class SearchResult(NamedTuple):
    """The passages of one question.

    Attributes:
        passages: The found passages, or those of them that are shown to the LLM, in the order of the prompt.
        frequency: Number of passages in the corpus that contain the gold answer; None if not counted.
        n_truncated: Number of found passages that were dropped or shortened to fit the context window.
    """

    passages: list[Passage]
    frequency: int | None
    n_truncated: int = 0


@dataclass(frozen=True)
class PassageFinder:
    """Finds the passages of questions, as the options say.

    `find` may run in a thread while the LLM generates. `rank` must not, because the reranker may use the same LLM.

    Attributes:
        options: Numbers of passages and candidates.
        retriever: Index to search; None to use the contexts of the questions.
        reranker: Sorts found passages; None to keep their order.
    """

    options: LabelOptions
    retriever: Retriever | None = None
    reranker: Reranker | None = None

    @property
    def can_prefetch(self) -> bool:
        """Whether passages can be searched in advance: there is an index, and no later round of retrieval uses it."""
        return self.retriever is not None and not self.options.closed_book and not self.options.iterative

    def find(self, questions: Sequence[Question]) -> list[SearchResult]:
        """Find the passages of each question, and count how often its answer occurs in the corpus."""
        passages = self._find_passages(questions)
        frequencies = self._count_frequencies(questions)
        return [SearchResult(found, count) for found, count in zip(passages, frequencies, strict=True)]

    def _find_passages(self, questions: Sequence[Question]) -> list[list[Passage]]:
        """Return passages for each question, from the index or the question's contexts. They are not reranked yet."""
        if self.options.closed_book:
            return [[] for _ in questions]
        if self.retriever is not None:
            return self.search([question.text for question in questions])
        return [list(question.contexts[: self._count]) for question in questions]

    def search(self, queries: Sequence[str]) -> list[list[Passage]]:
        """Search the index for each query. The passages are not reranked yet."""
        assert self.retriever is not None
        return self.retriever.search(queries, self._count or DEFAULT_PASSAGES)

    @property
    def _count(self) -> int | None:
        """Number of passages to search per question. A reranker selects the best `k` of more `candidates`."""
        return self.options.k if self.reranker is None else self.options.candidates

    def rank(self, queries: Sequence[str], passages: list[list[Passage]]) -> list[list[Passage]]:
        """Rerank the passages of each query and keep the best `k`. Without a reranker, nothing changes."""
        if self.reranker is None or self.options.closed_book:
            return passages
        return rerank(self.reranker, queries, passages, self.options.k or DEFAULT_PASSAGES)

    def _count_frequencies(self, questions: Sequence[Question]) -> list[int | None]:
        """Count the passages of the corpus with the first gold answer, up to `FREQUENCY_CAP`.

        None means not counted.
        """
        # A search over HTTP gives no access to the corpus.
        if self.retriever is None or self.retriever.name == "http" or self.options.closed_book:
            return [None for _ in questions]
        golds = [list_gold_answers(question) for question in questions]
        first = [answers[0] for answers in golds if answers]
        counts = dict(zip(first, count_passages_containing(self.retriever, first, FREQUENCY_CAP), strict=True))
        return [counts[answers[0]] if answers else None for answers in golds]


def count_truncated(passages: Sequence[Passage], shown: Sequence[Passage]) -> int:
    """Count the passages dropped or shortened to fit the context window.

    Args:
        passages: All passages of a question.
        shown: Those that fit, in the same order; the last ones may be missing or shortened.
    """
    shortened = sum(after.text != before.text for after, before in zip(shown, passages, strict=False))
    return len(passages) - len(shown) + shortened


# --- several rounds of retrieval ------------------------------------------------------------------


@dataclass
class IterativeAnswer:
    """The current answer and passages of a question, over several rounds of retrieval.

    Attributes:
        question: The question.
        passages: Passages that the current answer was given with.
        answer: The current answer.
        rounds: Number of rounds so far.
        is_done: Whether further rounds are useless.
    """

    question: Question
    passages: Sequence[Passage]
    answer: Completion
    rounds: int = 1
    is_done: bool = False


@dataclass(frozen=True)
class IterativeAnswerer:
    """Improves answers over several rounds.

    Each round searches with the question and its last answer, and answers again. A question is done when nothing new
    comes up.

    Attributes:
        model: The LLM.
        prompts: Wording of the prompts.
        finder: Searches passages. Its options say how many are shown, and how long an answer may be.
    """

    model: Model
    prompts: AnswerPrompts
    finder: PassageFinder

    def refine(self, answers: Sequence[IterativeAnswer]) -> None:
        """Improve the answers of the first round in further rounds, in place."""
        for round_number in range(2, MAX_ROUNDS + 1):
            active = [state for state in answers if not state.is_done]
            if not active:
                return
            self._search_again(active, round_number)
            self._answer_again([state for state in active if not state.is_done])

    def _search_again(self, active: Sequence[IterativeAnswer], round_number: int) -> None:
        """Search again with each question and its current answer. A question without new passages is done."""
        options = self.finder.options
        queries = [build_follow_up_query(state.question.text, state.answer.text) for state in active]
        results = self.finder.rank(queries, self.finder.search(queries))
        for state, passages in zip(active, results, strict=True):
            state.rounds = round_number
            best = merge_passages(state.passages, passages)[: options.k or DEFAULT_PASSAGES]
            fitting = fit_passages(self.model, self.prompts, state.question, best, options.max_tokens)
            if has_new_passages(state.passages, fitting):
                state.passages = fitting
            else:
                state.is_done = True

    def _answer_again(self, active: Sequence[IterativeAnswer]) -> None:
        """Answer each question again with its current passages. A question with an unchanged answer is done."""
        prompts = [self.prompts.open(state.question, state.passages) for state in active]
        completions = self.model.generate(prompts, max_tokens=self.finder.options.max_tokens)
        for state, (answer,) in zip(active, completions, strict=True):
            state.is_done = normalize(answer.text) == normalize(state.answer.text)
            state.answer = answer
