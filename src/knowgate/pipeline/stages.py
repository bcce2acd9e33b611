"""Stages of the pipeline: decide whether to retrieve, find passages, and choose between two answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from knowgate.data.signals.confidence import EMPTY_DRAFT_NEED, has_distinct_logits, is_empty_draft
from knowgate.errors import UnsupportedSignal
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.arbitration import accepts_beginning, choose_answers
from knowgate.gates.artifacts.drift import FAR_DISTANCE
from knowgate.gates.baselines import AlwaysGate, ConstantGate, NeverGate
from knowgate.gates.calibration.deployment import has_guarantee_without_arbiter
from knowgate.gates.rules.arithmetic import ARITHMETIC_RULE, compute_arithmetic
from knowgate.gates.rules.rule_set import RuleSet
from knowgate.gates.rules.topic_rule import RuleMatch
from knowgate.gates.scoring import check_count, measure_distances, score_with_raw, wrap_plugin_errors
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.pipeline.question_state import QuestionState, is_complete_draft, measure_time
from knowgate.retrieval.passages import (
    MAX_ROUNDS,
    build_follow_up_query,
    cut_passage,
    has_new_passages,
    merge_passages,
)
from knowgate.retrieval.rerankers import can_skip_reranking, rerank
from knowgate.types import ArbiterChoice, Decision, DecisionNote, Gate, Neighbor, Passage, Question, Reading, TextEvent
from knowgate.types.protocols import AnswerPair, Arbiter, Model, PassageFilter, Reranker, Retriever

MIN_DIGITS, MAX_DIGITS = 2, 9  # decimals of need and threshold in a reason
EMPTY_DRAFT_REASON = "its answer without passages is empty"


# --- before retrieval -----------------------------------------------------------------------------


def apply_gate(gate: Gate, threshold: float, states: Sequence[QuestionState]) -> None:
    """Let the gate decide on each question, and store the decisions.

    A need above the threshold means to retrieve. The gate `always` retrieves at every threshold, and so does a gate that
    reads a draft if the draft is empty.
    """
    questions = [state.question for state in states]
    readings = [state.reading for state in states]
    scores = score_with_raw(gate, questions, readings)
    explanations, rounds = _get_explanations_and_rounds(gate, questions, readings)
    distances = measure_distances(gate, questions, readings)
    for i, state in enumerate(states):
        need, explanation = scores.needs[i], explanations[i]
        retrieve = need > threshold or isinstance(gate, AlwaysGate)
        if _lacks_draft(gate, state.reading):
            retrieve, need, explanation = True, EMPTY_DRAFT_NEED, EMPTY_DRAFT_REASON
        state.max_rounds = min(rounds[i], MAX_ROUNDS)
        state.decision = Decision(
            retrieve=retrieve,
            need=need,
            threshold=threshold,
            gate=gate.name,
            reason=_explain_decision(gate, need, threshold, explanation, retrieve=retrieve),
            neighbors=state.reading.neighbors.get(gate.name, ()),
            raw=scores.raw[i] if scores.raw else None,
            distance=distances[i],
        )
        _note_doubts(state, state.decision)


def _lacks_draft(gate: Gate, reading: Reading) -> bool:
    """Return whether a gate that reads drafts got an empty one."""
    return gate.request.draft_tokens > 0 and reading.draft is not None and is_empty_draft(reading.draft)


def _get_explanations_and_rounds(
    gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]
) -> tuple[list[str], list[int]]:
    """Return the gate's explanation and its number of retrieval rounds for each question."""
    with wrap_plugin_errors(gate):
        explanations = gate.explain(questions, readings)
        rounds = gate.count_rounds(questions, readings)
    check_count(gate, "explanations", explanations, questions)
    check_count(gate, "numbers of rounds", rounds, questions)
    return explanations, rounds


def _note_doubts(state: QuestionState, decision: Decision) -> None:
    """Note on a question why the gate's decision is doubtful."""
    # A server that lists only its top tokens may list none of the label words (such as "yes" and "no"). All of them then get
    # the same logit, which says nothing.
    labels = state.reading.labels
    if decision.gate in labels and not has_distinct_logits(labels[decision.gate]):
        state.notes.append(DecisionNote.LABELS_UNLISTED)
    # The distance is that from the questions that the gate was fitted on; None if unknown.
    is_far = decision.distance is not None and decision.distance > FAR_DISTANCE
    if is_far and not decision.retrieve:
        state.notes.append(DecisionNote.FAR_QUESTION)


def _explain_decision(gate: Gate, need: float, threshold: float, explanation: str, *, retrieve: bool) -> str:
    """Explain a decision in words. Example: "the LLM may not know (need 61 %, threshold 50 %)"."""
    details = "; ".join(filter(None, [explanation, gate.note]))
    summary = describe_constant(gate, threshold)
    if not summary:  # the gate does not make the same decision for every question
        digits = _count_digits(need, threshold) - 2  # percentages have two decimals fewer than fractions
        verdict = "the LLM may not know" if retrieve else "the LLM probably knows"
        summary = f"{verdict} (need {100 * need:.{digits}f} %, threshold {100 * threshold:.{digits}f} %)"
    return f"{summary}: {details}" if details else summary


def describe_constant(gate: Gate, threshold: float) -> str:
    """Describe the decision of a gate that decides the same for every question. Return '' for other gates."""
    if isinstance(gate, AlwaysGate | NeverGate):
        verb = "retrieves" if isinstance(gate, AlwaysGate) else "skips retrieval"
        return f"the gate '{gate.name}' {verb} for every question"
    if threshold < 0:  # every need is above it
        return "this gate is set to retrieve for every question"
    if isinstance(gate, ConstantGate):
        return "this policy skips retrieval for every question"
    return ""


def _count_digits(need: float, threshold: float) -> int:
    """Return enough decimals to show that need and threshold differ."""
    if need == threshold:
        return MIN_DIGITS
    for digits in range(MIN_DIGITS, MAX_DIGITS):
        if f"{need:.{digits}f}" != f"{threshold:.{digits}f}":
            return digits
    return MAX_DIGITS


def apply_rules(rules: RuleSet, states: Sequence[QuestionState]) -> None:
    """Let rules, such as the one for small talk, override the gate."""
    for state in states:
        apply_match(rules.decide(state.question.text), state)


def apply_match(match: RuleMatch | None, state: QuestionState) -> None:
    """Let a rule that matches a question override the gate. None stands for no such rule."""
    if match is not None and state.decision is not None:
        reason = f"{match.reason} (rule '{match.rule}')"
        state.notes.clear()  # they are about the gate's decision
        state.decision = replace(state.decision, retrieve=match.retrieve, reason=reason, rule=match.rule)


def compute_answers(states: Sequence[QuestionState]) -> Iterator[TextEvent]:
    """Answer questions that the rule `arithmetic` matched by computing them, and yield the answers."""
    for state in states:
        if state.decision is not None and state.decision.rule == ARITHMETIC_RULE:
            result = compute_arithmetic(state.question.text)
            if result is not None:
                state.text = result
                state.is_computed = True
                yield TextEvent(result)


def force_retrieval(reason: str, states: Sequence[QuestionState]) -> None:
    """Retrieve for every question (shadow mode). A question that the gate would skip gets a note.

    Args:
        reason: Why, as the start of the reason of each changed decision.
        states: The questions with their decisions.
    """
    for state in states:
        if state.decision is not None and not state.decision.retrieve:
            state.decision = replace(state.decision, retrieve=True, reason=f"{reason}: {state.decision.reason}")
            state.notes.append(DecisionNote.WOULD_SKIP)


# --- after retrieval ------------------------------------------------------------------------------


def bind_arbiter(arbiter: Arbiter | None, gate: Gate, model: Model, prompts: AnswerPrompts) -> Arbiter | None:
    """Return an arbiter ready for this model, or None. The arbiter picks the answer with or without passages.

    Returns:
        The arbiter; None if there is none. The default arbiter is also left out if the gate has a guarantee on accuracy
        that was proven without an arbiter, because the guarantee would not hold with it.

    Raises:
        UnsupportedSignal: The arbiter needs signals that the model does not provide.
    """
    if arbiter is None or (arbiter is RULES_ARBITER and has_guarantee_without_arbiter(gate)):
        return None
    missing = arbiter.needs - model.offers
    if missing:
        needed = ", ".join(sorted(missing))
        raise UnsupportedSignal(
            f"{model.name} does not return {needed}, which arbiter '{arbiter.name}' needs. Use arbiter='rules'."
        )
    return arbiter.bind(model, prompts.fingerprint)


def mark_replaceable_answers(arbiter: Arbiter | None, states: Sequence[QuestionState], max_tokens: int) -> None:
    """Set `may_show` of the answers that the arbiter may replace by the draft. An empty draft cannot replace an answer.

    `may_show` is called with the beginning of an answer, and says whether this beginning can already be streamed.
    """
    if arbiter is None:
        return
    for state in states:
        draft = state.reading.draft
        if draft is not None and not draft.is_empty and is_complete_draft(draft, max_tokens):
            state.may_show = partial(accepts_beginning, arbiter)


def arbitrate(arbiter: Arbiter | None, states: Sequence[QuestionState], runner: StageRunner) -> Iterator[TextEvent]:
    """Let the arbiter choose between the draft and the answer with passages. Yields chosen answers not streamed yet."""
    replaceable = [state for state in states if state.may_show is not None]  # set by `mark_replaceable_answers`
    if arbiter is None or not replaceable:
        return
    with measure_time(replaceable, "arbiter"):
        choices = runner.arbitrate(arbiter, replaceable, [_pair_answers(state) for state in replaceable])
    for state, choice in zip(replaceable, choices, strict=True):
        state.choice = choice
        if choice is not None and choice.is_closed_book:
            state.text = choice.closed
            state.notes.append(DecisionNote.DRAFT_GIVEN)
        if state.text and not state.is_shown:
            yield TextEvent(state.text)


def _pair_answers(state: QuestionState) -> AnswerPair:
    """Return the closed-book and the open-book answer of a question, with its passages."""
    draft = state.reading.draft
    completion = state.completion
    if draft is None or completion is None:
        raise RuntimeError("the question does not have two answers yet")
    return AnswerPair(state.question, draft, completion, state.passages)


class StageRunner:
    """Runs gates, searches and arbiters one at a time, because their stemmers, tokenizers and networks are not thread-safe.

    A server has a runner of its own, with time limits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def find_neighbors(self, gate: Gate, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
        """Return the logged questions that are similar to each question."""
        return gate.find_neighbors(questions)

    def decide(self, gate: Gate, threshold: float, states: Sequence[QuestionState]) -> None:
        """Let the gate decide on each question."""
        with nullcontext() if gate.is_pure else self._lock:  # a pure gate changes no state, so threads can share it
            apply_gate(gate, threshold, states)

    def apply_rules(self, rules: RuleSet, states: Sequence[QuestionState]) -> None:
        """Let rules override the gate."""
        apply_rules(rules, states)

    def search(self, stage: RetrievalStage, states: Sequence[QuestionState], search: SearchFunction) -> None:
        """Search for the passages of each question."""
        with self._lock:
            search(stage, states)

    def arbitrate(
        self, arbiter: Arbiter, states: Sequence[QuestionState], pairs: Sequence[AnswerPair]
    ) -> Sequence[ArbiterChoice | None]:
        """Let the arbiter choose an answer to each question. None stands for the answer with passages."""
        with self._lock:
            return choose_answers(arbiter, pairs)


RERANK_CANDIDATES = 20  # passages fetched for a reranker to choose from
FitFunction = Callable[[Question, Sequence[Passage]], tuple[Passage, ...]]
SearchFunction = Callable[["RetrievalStage", Sequence[QuestionState]], None]


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
        runner: Runs the searches.
    """

    retriever: Retriever
    reranker: Reranker | None
    second_look: PassageFilter | None
    k: int
    rerank_margin: float | None
    fit_passages: FitFunction
    runner: StageRunner

    def retrieve(self, states: Sequence[QuestionState]) -> None:
        """Search and store the passages of each question."""
        self.runner.search(self, states, RetrievalStage.search)

    def search(self, states: Sequence[QuestionState]) -> None:
        """Search and store the passages of each question.

        If the second look, a judge, finds the passages of a question useless, all of them are dropped. A note says why a
        question has no passages.
        """
        results = self._search(states, [state.question.text for state in states])
        with measure_time(states, "second look"):
            is_useful = [True] * len(states)
            if self.second_look is not None:
                is_useful = self.second_look.are_useful([state.question for state in states], results)
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
        """Run a further round of retrieval: search with the question and its last answer.

        Returns:
            For each question, whether it got new passages.
        """
        earlier = [state.passages for state in states]
        self.runner.search(self, states, RetrievalStage.search_again)
        return [self._keep_new_passages(state, passages) for state, passages in zip(states, earlier, strict=True)]

    def search_again(self, states: Sequence[QuestionState]) -> None:
        """Search with each question and its last answer, and store the best of the new and the earlier passages."""
        queries = [build_follow_up_query(state.question.text, state.text) for state in states]
        for state, passages in zip(states, self._search(states, queries), strict=True):
            state.passages = tuple(passages)

    def _keep_new_passages(self, state: QuestionState, earlier: tuple[Passage, ...]) -> bool:
        """Restore the earlier passages of a question unless a search found others. Returns whether it found some."""
        fitting = self.fit_passages(state.question, state.passages)
        has_new = has_new_passages(earlier, fitting)
        state.passages = fitting if has_new else earlier
        return has_new

    def _search(self, states: Sequence[QuestionState], queries: Sequence[str]) -> list[list[Passage]]:
        """Search with one query per question, and return the best k of its new and earlier passages."""
        count = self.k if self.reranker is None else RERANK_CANDIDATES
        with measure_time(states, "retrieve"):
            hits = self.retriever.search(queries, count)
        results = [[cut_passage(passage) for passage in passages] for passages in hits]
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
        """Rerank the passages of each question, unless the first passage is far ahead of the others."""
        indices = []  # of the questions to rerank
        for i, state in enumerate(states):
            if self._skips_reranking(state, results[i]):
                state.notes.append(DecisionNote.NOT_RERANKED)
            else:
                indices.append(i)
        with measure_time([states[i] for i in indices], "rerank"):
            reranked = rerank(reranker, [queries[i] for i in indices], [results[i] for i in indices], self.k)
        reordered = list(results)
        for i, passages in zip(indices, reranked, strict=True):
            reordered[i] = passages
        return reordered

    def _skips_reranking(self, state: QuestionState, passages: Sequence[Passage]) -> bool:
        """Return whether the first passage is so far ahead of the others that reranking can be skipped."""
        is_first_round = not state.passages
        return is_first_round and bool(passages) and can_skip_reranking(passages, self.rerank_margin)
