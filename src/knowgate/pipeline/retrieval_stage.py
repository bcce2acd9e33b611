"""Find passages for questions: search, rerank, drop useless ones, and search again with the answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from knowgate.pipeline.question_state import QuestionState, measure_time
from knowgate.retrieval.passages import build_follow_up_query, has_new_passages, merge_passages
from knowgate.retrieval.rerankers import can_skip_reranking, rerank
from knowgate.types import DecisionNote, Passage, PassageFilter, Question, Reranker, Retriever

RERANK_CANDIDATES = 20  # passages fetched for a reranker to choose from
FitFunction = Callable[[Question, Sequence[Passage]], tuple[Passage, ...]]


@dataclass(frozen=True)
class RetrievalStage:
    """The retrieval part of a pipeline: search, rerank, and drop useless passages.

    Attributes:
        retriever: Searches for passages.
        reranker: Reorders candidates, or None.
        second_look: Drops passages that turn out useless, or None to keep all.
        k: Maximum number of passages shown to the LLM.
        rerank_margin: Skip reranking if the best score leads the second by this share; None to always rerank.
        fit_passages: Returns as many of the passages as fit the context window.
        lock: Held during calls, because retrievers and rerankers may not be thread-safe.
    """

    retriever: Retriever
    reranker: Reranker | None
    second_look: PassageFilter | None
    k: int
    rerank_margin: float | None
    fit_passages: FitFunction
    lock: threading.Lock

    def retrieve(self, states: Sequence[QuestionState]) -> None:
        """Run the first round of retrieval: set the passages of each question, or note why it has none."""
        results = self._search(states, [state.question.text for state in states])
        with self.lock, measure_time(states, "second look"):
            is_useful = self._judge_usefulness([state.question for state in states], results)
        for state, passages, useful in zip(states, results, is_useful, strict=True):
            state.passages = tuple(passages) if useful else ()
            if not state.passages:
                state.notes.append(DecisionNote.PASSAGES_USELESS if passages else DecisionNote.NOTHING_FOUND)

    def fit(self, states: Sequence[QuestionState]) -> None:
        """Drop passages that do not fit the context window."""
        with measure_time(states, "fit"):
            for state in states:
                state.passages = self.fit_passages(state.question, state.passages)
                if not state.passages:
                    state.notes.append(DecisionNote.NO_PASSAGE_FITS)

    def retrieve_again(self, states: Sequence[QuestionState]) -> list[bool]:
        """Run a further round of retrieval, with question and last answer as the query.

        Returns for each question whether it got new passages.
        """
        queries = [build_follow_up_query(state.question.text, state.text) for state in states]
        results = self._search(states, queries)
        return [self._add_new_passages(state, passages) for state, passages in zip(states, results, strict=True)]

    def _add_new_passages(self, state: QuestionState, passages: Sequence[Passage]) -> bool:
        """Replace the passages of a question if there are new ones among those that fit; return whether there are."""
        fitting = self.fit_passages(state.question, passages)
        is_new = has_new_passages(state.passages, fitting)
        state.passages = fitting if is_new else state.passages
        return is_new

    def _search(self, states: Sequence[QuestionState], queries: Sequence[str]) -> list[list[Passage]]:
        """Return the k best passages of each question, out of new results and the passages it already has."""
        with self.lock, measure_time(states, "retrieve"):
            results = self.retriever.search(queries, self.k if self.reranker is None else RERANK_CANDIDATES)
        merged = [
            merge_passages(state.passages, passages) if state.passages else passages
            for state, passages in zip(states, results, strict=True)
        ]
        if self.reranker is not None:
            merged = self._rerank(self.reranker, states, queries, merged)
        return [passages[: self.k] for passages in merged]

    def _rerank(
        self, reranker: Reranker, states: Sequence[QuestionState], queries: Sequence[str], results: list[list[Passage]]
    ) -> list[list[Passage]]:
        """Rerank the passages of each question, except where the best passage is far ahead (`rerank_margin`).

        Later rounds are always reranked, because their scores come from several searches and cannot be compared.
        """
        unsure = []
        for i, state in enumerate(states):
            if not state.passages and results[i] and can_skip_reranking(results[i], self.rerank_margin):
                state.notes.append(DecisionNote.NOT_RERANKED)
            else:
                unsure.append(i)
        with self.lock, measure_time([states[i] for i in unsure], "rerank"):
            best = rerank(reranker, [queries[i] for i in unsure], [results[i] for i in unsure], self.k)
        reordered = dict(zip(unsure, best, strict=True))
        return [reordered.get(i, passages) for i, passages in enumerate(results)]

    def _judge_usefulness(self, questions: list[Question], results: list[list[Passage]]) -> list[bool]:
        """Return for each question whether its passages are useful; always True without a second look."""
        if self.second_look is None:
            return [True] * len(questions)
        return self.second_look.are_useful(questions, results)
