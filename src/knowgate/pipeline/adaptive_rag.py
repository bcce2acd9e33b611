"""The way of a question: read once, decide, then either go on generating or retrieve and answer open-book.

Knows the roles (model, gate, retriever, reranker) by their protocols; builds none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from knowgate.errors import BadInput, BadSetting
from knowgate.gates import bind, check_offers, read_questions
from knowgate.gates import score as score_questions
from knowgate.pipeline.case import Case, merged, timed, with_total
from knowgate.prompts import AnswerPrompts, fit_passages
from knowgate.rerank import SURE, is_sure, rerank
from knowgate.text import normalise
from knowgate.thresholds import Deployment, promise
from knowgate.types import (
    Answer,
    Decision,
    ExplainingGate,
    Gate,
    Model,
    Passage,
    Question,
    Reading,
    Reranker,
    Retriever,
    SecondLook,
    StepsGate,
)

BATCH = 64  # questions read together; bounds the memory of their caches
CANDIDATES = 20  # passages fetched for a reranker to choose from
ROUNDS = 3  # of retrieval at most, whatever a gate says


class DecidedQuestion(NamedTuple):
    """A question and what was decided on it."""

    question: Question
    decision: Decision


@dataclass(frozen=True, repr=False)
class AdaptiveRAG:
    """Answers questions, retrieving only where the gate says so.

    threshold: retrieve when need is above it; the gate's own by default.
    k: passages shown to the LLM. second_look: drops passages that turn out useless (None: keep all).
    rerank_margin: nothing is reranked where the retriever's best score leads by this share of it (None: always).

    Example:
        >>> rag = AdaptiveRAG(load_model("smollm"), load_gate("logprob"), load_retriever("my-index"))
        >>> rag.answer("What is the capital of France?").text  # doctest: +SKIP
    """

    model: Model
    gate: Gate
    retriever: Retriever | None = None
    reranker: Reranker | None = None
    threshold: float | None = None
    k: int = 3
    second_look: SecondLook | None = None
    rerank_margin: float | None = None
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    max_tokens: int = 32

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise BadSetting(f"the threshold is {self.threshold}; it must be between 0 and 1.")
        if self.k < 1 or self.max_tokens < 1:
            raise BadSetting(f"k is {self.k} and max_tokens {self.max_tokens}; both must be at least 1.")
        if self.rerank_margin is not None and not 0 <= self.rerank_margin <= 1:
            raise BadSetting(f"the rerank margin is {self.rerank_margin}; it must be between 0 and 1.")

    def __repr__(self) -> str:
        threshold = self.gate.threshold if self.threshold is None else self.threshold
        parts = [self.model.name, f"gate {self.gate.name} with threshold {threshold:.3g}"]
        parts += [f"{self.k} passages from {self.retriever.name}"] if self.retriever else ["no documents"]
        parts += [f"reranked by {self.reranker.name}"] if self.reranker else []
        return f"<AdaptiveRAG: {', '.join(parts)}>"

    def answer(self, question: str | Question) -> Answer:
        return self.answer_many([question])[0]

    def answer_many(self, questions: Sequence[str | Question]) -> list[Answer]:
        return list(self.stream(questions))

    def decide(self, question: str | Question) -> Decision:
        return self.decide_many([question])[0]

    def decide_many(self, questions: Sequence[str | Question]) -> list[Decision]:
        """Decisions alone: nothing is retrieved, nothing generated beyond what the gate reads."""
        checked = [as_question(question) for question in questions]
        return [decided.decision for decided in self.decide_stream(checked)]

    def decide_stream(self, questions: Iterable[str | Question], batch: int = BATCH) -> Iterator[DecidedQuestion]:
        """Decisions in order, a batch at a time, each with its question."""
        for taken in _batches(questions, batch):
            yield from (DecidedQuestion(case.question, case.decided) for case in self._decide(taken))

    def stream(self, questions: Iterable[str | Question], batch: int = BATCH) -> Iterator[Answer]:
        """Answers in order, a batch at a time, so that long inputs give early output and flat memory."""
        for taken in _batches(questions, batch):
            yield from self._answer(taken)

    @functools.cached_property
    def bound(self) -> Gate:
        """The gate, found to work with this model."""
        check_offers(self.gate, self.model)
        return bind(self.gate, self.model, self.prompts)

    @property
    def promise(self) -> str:
        """What is proven about the gate's threshold and whether it holds here; '' where nothing is."""
        reorders = self.reranker is not None or self.second_look is not None
        found = self.retriever.fingerprint if self.retriever else None
        return promise(self.bound, Deployment(self.threshold, found, self.k, reorders))

    # --- stages -----------------------------------------------------------------------------------

    def _answer(self, questions: Sequence[Question]) -> list[Answer]:
        cases = self._decide(questions)
        retrieving = [case for case in cases if case.decided.retrieve]
        if retrieving:
            self._retrieve(retrieving)
            self._fit([case for case in retrieving if case.passages])
        self._answer_open([case for case in cases if case.passages])
        self._go_deeper([case for case in cases if case.passages and case.steps > 1])
        self._answer_closed([case for case in cases if not case.passages])
        return [
            Answer(
                case.question,
                case.text,
                case.decided,
                case.passages,
                with_total(case.seconds),
                case.reading.draft,
                case.n_tokens,
            )
            for case in cases
        ]

    def _decide(self, questions: Sequence[Question]) -> list[Case]:
        gate = self.bound
        cases = [Case(question) for question in questions]
        with timed(cases, "read"):
            readings = read_questions(self.model, [gate], questions, self.prompts)
        with timed(cases, "gate"):
            needs = score_questions(gate, questions, readings)
            reasons = self._reasons(questions, readings)
            steps = gate.steps(questions, readings) if isinstance(gate, StepsGate) else [1] * len(cases)
        threshold = self.gate.threshold if self.threshold is None else self.threshold
        for case, reading, need, why, rounds in zip(cases, readings, needs, reasons, steps, strict=True):
            case.reading, case.steps = reading, min(rounds, ROUNDS)
            case.decision = Decision(
                need > threshold,
                need,
                threshold,
                gate.name,
                _reason(need, threshold, why),
                reading.neighbours.get(gate.name, ()),
            )
        return cases

    def _reasons(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        gate = self.bound
        if isinstance(gate, ExplainingGate):
            return gate.explain(questions, readings)
        return [""] * len(questions)

    def _retrieve(self, cases: list[Case]) -> None:
        if self.retriever is None:
            raise BadSetting(
                f"gate '{self.gate.name}' decided to retrieve, but there is nothing to retrieve from: "
                "give documents or an index, or use the gate 'never'."
            )
        found = self._search(self.retriever, cases, [case.question.text for case in cases])
        with timed(cases, "second look"):
            useful = self._useful([case.question for case in cases], found)
        for case, passages, keep in zip(cases, found, useful, strict=True):
            case.passages = tuple(passages) if keep else ()
            if not passages or not keep:
                case.note("the passages were judged useless" if passages else "nothing was found")

    def _search(self, retriever: Retriever, cases: list[Case], queries: list[str]) -> list[list[Passage]]:
        """For each case its k best passages: those found now and those it has."""
        with timed(cases, "retrieve"):
            fresh = retriever.search(queries, self.k if self.reranker is None else CANDIDATES)
        found = [merged(case.passages, new) if case.passages else new for case, new in zip(cases, fresh, strict=True)]
        if self.reranker is not None:
            found = self._rerank(self.reranker, cases, queries, found)
        return [passages[: self.k] for passages in found]

    def _rerank(
        self, reranker: Reranker, cases: list[Case], queries: list[str], found: list[list[Passage]]
    ) -> list[list[Passage]]:
        """Reorder what the retriever is not sure of; later rounds mix its scores with others, so they are reordered."""
        unsure = []
        for place, case in enumerate(cases):
            if not case.passages and found[place] and is_sure(found[place], self.rerank_margin):
                case.note(SURE)
            else:
                unsure.append(place)
        with timed([cases[place] for place in unsure], "rerank"):
            best = rerank(reranker, [queries[place] for place in unsure], [found[place] for place in unsure], self.k)
        reordered = dict(zip(unsure, best, strict=True))
        return [reordered.get(place, passages) for place, passages in enumerate(found)]

    def _go_deeper(self, cases: list[Case]) -> None:
        """Look up question and last answer together, answer again; until nothing new comes or the answer repeats."""
        taken = 1
        while self.retriever is not None and (going := [case for case in cases if case.steps > taken]):
            taken += 1
            queries = [f"{case.question.text} {case.text}".strip() for case in going]
            found = self._search(self.retriever, going, queries)
            fresh = [self._has_new(case, passages) for case, passages in zip(going, found, strict=True)]
            before = [normalise(case.text) for case in going]
            self._answer_open([case for case, new in zip(going, fresh, strict=True) if new])
            for case, new, text in zip(going, fresh, before, strict=True):
                if not new or normalise(case.text) == text or taken == case.steps:
                    case.steps = 1
                    case.note(f"{taken} rounds of retrieval")

    def _has_new(self, case: Case, found: list[Passage]) -> bool:
        """Whether these are other passages than the case has; if so it takes them, as far as they fit the window."""
        fitting = fit_passages(self.model, self.prompts, case.question, found, self.max_tokens)
        is_new = bool({passage.id for passage in fitting} - {passage.id for passage in case.passages})
        case.passages = fitting if is_new else case.passages
        return is_new

    def _fit(self, cases: list[Case]) -> None:
        with timed(cases, "fit"):
            for case in cases:
                case.passages = fit_passages(self.model, self.prompts, case.question, case.passages, self.max_tokens)
                if not case.passages:
                    case.note("no passage fits the context window")

    def _useful(self, questions: list[Question], found: list[list[Passage]]) -> list[bool]:
        if self.second_look is None:
            return [True] * len(questions)
        return self.second_look.useful(questions, found)

    def _answer_closed(self, cases: list[Case]) -> None:
        """Go on from the gate's own pass where there was one."""
        for group in (
            [case for case in cases if case.reading.resume is not None],
            [case for case in cases if case.reading.resume is None],
        ):
            if not group:
                continue
            handles = [case.reading.resume for case in group]
            with timed(group, "answer"):
                done = self.model.generate(
                    [self.prompts.closed(case.question) for case in group],
                    max_tokens=self.max_tokens,
                    resume=handles if handles[0] is not None else None,
                )
            for case, completions in zip(group, done, strict=True):
                case.take(completions[0])

    def _answer_open(self, cases: list[Case]) -> None:
        if not cases:
            return
        with timed(cases, "answer"):
            prompts = [self.prompts.open(case.question, case.passages) for case in cases]
            done = self.model.generate(prompts, max_tokens=self.max_tokens)
        for case, completions in zip(cases, done, strict=True):
            case.take(completions[0])


def _batches(questions: Iterable[str | Question], size: int) -> Iterator[list[Question]]:
    waiting = iter(questions)
    while taken := [as_question(question) for question in islice(waiting, size)]:
        yield taken


def as_question(question: str | Question) -> Question:
    """A question record; text is checked, not changed."""
    record = Question(question) if isinstance(question, str) else question
    if not record.text.strip():
        raise BadInput("the question is empty: ask something.")
    return record


def _reason(need: float, threshold: float, why: str) -> str:
    relation = "above" if need > threshold else "not above"
    said = (
        f"is {relation} {threshold:.2f}"
        if threshold >= 0
        else "counts for nothing: the gate was set to always retrieve"
    )
    return f"need {need:.2f} {said}" + (f": {why}" if why else "")
