"""The way of a question: read once, decide, then either go on generating or retrieve and answer open-book.

Knows the roles (model, gate, retriever, reranker) by their protocols; builds none of them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from knowgate.core.text import normalize
from knowgate.core.validation import check_integer, check_number
from knowgate.data.history.entries import HistoryScope
from knowgate.errors import BadSetting
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.calibration.deployment import (
    Deployment,
    describe_guarantee,
    find_violated_conditions,
    get_proven_loss,
)
from knowgate.gates.rules.rule_set import RuleSet
from knowgate.gates.scoring import bind_gate, read_questions
from knowgate.models.prompts.answers import AnswerPrompts, fit_passages
from knowgate.pipeline.decisions import apply_gate, apply_overrides, arbitrate, bind_arbiter, mark_replaceable_answers
from knowgate.pipeline.execution import (
    GenerateFunction,
    GenerationTask,
    as_question,
    batch_async,
    batch_questions,
    check_not_text,
    exhaust_generator,
    generate_batch,
    generate_stream,
    iterate_in_model_thread,
    run_in_model_thread,
)
from knowgate.pipeline.question_state import QuestionState, measure_time
from knowgate.pipeline.traffic_log import CompleteDraftGate, TrafficLog
from knowgate.retrieval.passages import build_follow_up_query, has_new_passages, merge_passages
from knowgate.retrieval.rerankers import can_skip_reranking, rerank
from knowgate.types import (
    Answer,
    AnswerEvent,
    Arbiter,
    Decision,
    DecisionEvent,
    DecisionNote,
    Gate,
    Model,
    Passage,
    PassageFilter,
    PassagesEvent,
    Question,
    Reranker,
    Retriever,
    StreamEvent,
    TextEvent,
)

BATCH_SIZE = 64  # questions read together; bounds the memory of their caches
RERANK_CANDIDATES = 20  # passages fetched for a reranker to choose from


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
    log: keeps what was retrieved for, labelled by whether the answers with and without passages agree.
    arbiter: chooses, after retrieval, between that answer and the draft (None: nobody). By default the rules do, where
    the gate reads a whole draft anyhow and nothing is proven without them: it takes the place of one that abstains.
    rules: what is retrieved for, or never, whatever the gate says (`load_rules`); None: the gate alone decides.
    shadow: why everything is looked up whatever was decided, so that a gate can be watched; '' where it is obeyed.

    Threads: the methods that begin with `a` take turns by themselves. All others may be called from as many threads at
    once as the model's `concurrency` says; gate, retriever, reranker and second look are then used by one at a time.

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
    second_look: PassageFilter | None = None
    rerank_margin: float | None = None
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    max_tokens: int = 32
    log: TrafficLog | None = None
    arbiter: Arbiter | None = RULES_ARBITER
    rules: RuleSet | None = None
    shadow: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            raise BadSetting(f"the model is the text '{self.model}': give a model, load_model('{self.model}').")
        if not isinstance(self.gate, Gate):
            raise BadSetting(f"the gate is {self.gate!r}: give a gate, as load_gate('logprob:mean') does.")
        if isinstance(self.retriever, str):
            raise BadSetting(f"the retriever is the text '{self.retriever}': give one, as load_retriever does.")
        if isinstance(self.arbiter, str):
            raise BadSetting(f"the arbiter is the text '{self.arbiter}': give one, load_arbiter('{self.arbiter}').")
        if self.threshold is not None:
            check_number(self.threshold, "the threshold")
        if self.rerank_margin is not None:
            check_number(self.rerank_margin, "the rerank margin")
        check_integer(self.k, "k")
        check_integer(self.max_tokens, "max_tokens")

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
        checked = [question for batch in batch_questions(questions, BATCH_SIZE) for question in batch]
        return [decided.decision for decided in self.decide_stream(checked)]

    def decide_stream(
        self, questions: Iterable[str | Question], batch: int = BATCH_SIZE, *, first: int | None = None
    ) -> Iterator[DecidedQuestion]:
        """Decisions in order, a batch at a time, each with its question. first: size of the first batch."""
        for taken in batch_questions(questions, batch, first):
            yield from (DecidedQuestion(case.question, case.decided) for case in self._decide(taken, [self.bound]))

    def stream(
        self, questions: Iterable[str | Question], batch: int = BATCH_SIZE, *, first: int | None = None
    ) -> Iterator[Answer]:
        """Answers in order, a batch at a time, so that long inputs give early output and flat memory.

        first: size of the first batch; they double from there. 1 for people who wait.
        """
        for taken in batch_questions(questions, batch, first):
            yield from self._answer(taken)

    def answer_stream(self, question: str | Question) -> Generator[StreamEvent, None, None]:
        """One answer while it is made: decision, passages of each round, pieces of text, and what `answer` gives.

        Whoever stops listening (closes the iterator) stops the LLM.
        """
        (answer,) = yield from self._way([as_question(question)], generate_stream)
        yield AnswerEvent(answer)

    def find(self, question: str | Question) -> tuple[Passage, ...]:
        """The passages a question is answered with if it is looked up; whether it should be is not asked."""
        case = QuestionState(as_question(question))
        self._retrieve([case])
        return case.passages

    def altered(self, **changes: Any) -> AdaptiveRAG:
        """The same with other settings, such as gate or threshold. Both take turns with the parts they share."""
        other = replace(self, **changes)
        other.__dict__["_lock"] = self._alone
        return other

    # --- beside an event loop: the same, in the model's own threads -------------------------------

    async def aanswer(self, question: str | Question) -> Answer:
        return await run_in_model_thread(self.model, lambda: self.answer(question))

    async def aanswer_many(self, questions: Sequence[str | Question]) -> list[Answer]:
        return [answer async for answer in self.astream(questions)]

    async def adecide(self, question: str | Question) -> Decision:
        return await run_in_model_thread(self.model, lambda: self.decide(question))

    async def astream(
        self, questions: Iterable[str | Question] | AsyncIterable[str | Question], batch: int = BATCH_SIZE
    ) -> AsyncGenerator[Answer, None]:
        """Like `stream`. Cancelled, it stops after the batch that is being answered."""
        check_not_text(questions)
        async with aclosing(batch_async(questions, batch)) as waiting:
            async for taken in waiting:
                answers = functools.partial(self._answer, [as_question(question) for question in taken])
                for answer in await run_in_model_thread(self.model, answers):
                    yield answer

    def aanswer_stream(self, question: str | Question) -> AsyncGenerator[StreamEvent, None]:
        """Like `answer_stream`. Cancelled or closed, it stops the LLM after the piece that is being made."""
        return iterate_in_model_thread(self.model, self.answer_stream(question))

    @functools.cached_property
    def bound(self) -> Gate:
        """The gate, found to work with this model."""
        return bind_gate(self.gate, self.model, self.prompts)

    @functools.cached_property
    def weighing(self) -> Arbiter | None:
        """The arbiter, found to work with this model; None where the answer with passages is always given."""
        return bind_arbiter(self.arbiter, self.bound, self.model, self.prompts)

    @property
    def promise(self) -> str:
        """What is proven about the gate's threshold and whether it holds here; '' where nothing is."""
        return describe_guarantee(self.bound, self._deployment)

    @property
    def objections(self) -> list[str]:
        """What keeps that from holding here: another k, longer answers, other words; nothing where it holds."""
        return find_violated_conditions(self.bound, self._deployment)

    @property
    def proven_loss(self) -> float | None:
        """The share of the answers that skipping loses at most, as far as that is proven and holds here."""
        return get_proven_loss(self.bound, self._deployment)

    @property
    def _deployment(self) -> Deployment:
        return Deployment(
            self.threshold,
            self.retriever.fingerprint if self.retriever else None,
            self.k,
            self.max_tokens,
            self.prompts.open_fingerprint,
            self.reranker.fingerprint if self.reranker else None,
            RERANK_CANDIDATES,
            at_times=self.rerank_margin is not None,
            looks_twice=self.second_look is not None,
            arbiter=self.weighing.fingerprint if self.weighing else None,
        )

    @property
    def _alone(self) -> threading.Lock:
        """Held by who uses what may be no good for two threads at once: stemmers, tokenizers and networks are not."""
        lock: threading.Lock = self.__dict__.setdefault("_lock", threading.Lock())
        return lock

    # --- stages -----------------------------------------------------------------------------------

    def _answer(self, questions: Sequence[Question]) -> list[Answer]:
        return exhaust_generator(self._way(questions, generate_batch))

    def _way(
        self, questions: Sequence[Question], speak: GenerateFunction
    ) -> Generator[StreamEvent, None, list[Answer]]:
        """The way of these questions, with what happens on it. Everything goes it; only how it speaks differs."""
        cases = self._decide(questions, [self.bound, *self._drafting])
        yield from (DecisionEvent(case.decided) for case in cases)
        retrieving = [case for case in cases if case.decided.retrieve]
        if retrieving:
            self._retrieve(retrieving)
            self._fit([case for case in retrieving if case.passages])
            yield from (PassagesEvent(case.passages) for case in retrieving)
        opened = [case for case in cases if case.passages]
        mark_replaceable_answers(self.weighing, opened, self.max_tokens)
        yield from self._answer_open(opened, speak)
        yield from self._go_deeper([case for case in opened if case.steps > 1], speak)
        yield from self._weigh(opened)
        yield from self._answer_closed([case for case in cases if not case.passages], speak)
        answers = [case.answer(len(cases)) for case in cases]
        if self.log is not None:
            scope = HistoryScope(self.model.fingerprint, self.prompts.fingerprint, self.log.tenant)
            self.log.take(answers, scope, self.max_tokens)
        return answers

    def _decide(self, questions: Sequence[Question], readers: Sequence[Gate]) -> list[QuestionState]:
        """readers: the gate, and whoever else reads the one pass."""
        gate, cases = self.bound, [QuestionState(question) for question in questions]
        with measure_time(cases, "read"):
            readings = read_questions(self.model, readers, questions, self.prompts)
        for case, reading in zip(cases, readings, strict=True):
            case.reading = reading
        with nullcontext() if gate.is_pure else self._alone, measure_time(cases, "gate"):
            apply_gate(gate, self.gate.threshold if self.threshold is None else self.threshold, cases)
        apply_overrides(cases, self.rules if gate.obeys_rules else None, self.shadow if self.retriever else "")
        return cases

    @property
    def _drafting(self) -> list[Gate]:
        logging = self.log is not None and self.log.drafts
        weighing = self.weighing is not None and self.weighing.makes_drafts and self.retriever is not None
        return [CompleteDraftGate(self.max_tokens)] if logging or weighing else []

    def _weigh(self, cases: list[QuestionState]) -> list[TextEvent]:
        with self._alone:
            return list(arbitrate(self.weighing, cases))

    def _retrieve(self, cases: list[QuestionState]) -> None:
        if self.retriever is None:
            raise BadSetting(
                f"gate '{self.gate.name}' decided to retrieve, but there is nothing to retrieve from: "
                "give documents or an index, or use the gate 'never'."
            )
        found = self._search(self.retriever, cases, [case.question.text for case in cases])
        with self._alone, measure_time(cases, "second look"):
            useful = self._useful([case.question for case in cases], found)
        for case, passages, keep in zip(cases, found, useful, strict=True):
            case.passages = tuple(passages) if keep else ()
            if not passages or not keep:
                case.notes.append(DecisionNote.PASSAGES_USELESS if passages else DecisionNote.NOTHING_FOUND)

    def _search(self, retriever: Retriever, cases: list[QuestionState], queries: list[str]) -> list[list[Passage]]:
        """For each case its k best passages: those found now and those it has."""
        with self._alone, measure_time(cases, "retrieve"):
            fresh = retriever.search(queries, self.k if self.reranker is None else RERANK_CANDIDATES)
        found = [
            merge_passages(case.passages, new) if case.passages else new for case, new in zip(cases, fresh, strict=True)
        ]
        if self.reranker is not None:
            found = self._rerank(self.reranker, cases, queries, found)
        return [passages[: self.k] for passages in found]

    def _rerank(
        self, reranker: Reranker, cases: list[QuestionState], queries: list[str], found: list[list[Passage]]
    ) -> list[list[Passage]]:
        """Reorder what the retriever is not sure of; later rounds mix its scores with others, so they are reordered."""
        unsure = []
        for number, case in enumerate(cases):
            if not case.passages and found[number] and can_skip_reranking(found[number], self.rerank_margin):
                case.notes.append(DecisionNote.NOT_RERANKED)
            else:
                unsure.append(number)
        with self._alone, measure_time([cases[number] for number in unsure], "rerank"):
            best = rerank(
                reranker, [queries[number] for number in unsure], [found[number] for number in unsure], self.k
            )
        reordered = dict(zip(unsure, best, strict=True))
        return [reordered.get(number, passages) for number, passages in enumerate(found)]

    def _go_deeper(self, cases: list[QuestionState], speak: GenerateFunction) -> Iterator[StreamEvent]:
        """Look up question and last answer together, answer again; until nothing new comes or the answer repeats."""
        taken = 1
        while self.retriever is not None and (going := [case for case in cases if case.steps > taken]):
            taken += 1
            queries = [build_follow_up_query(case.question.text, case.text) for case in going]
            found = self._search(self.retriever, going, queries)
            fresh = [self._has_new(case, passages) for case, passages in zip(going, found, strict=True)]
            before = [normalize(case.text) for case in going]
            for case in going:
                case.rounds = taken
            renewed = [case for case, new in zip(going, fresh, strict=True) if new]
            yield from (PassagesEvent(case.passages) for case in renewed)
            yield from self._answer_open(renewed, speak)
            for case, new, text in zip(going, fresh, before, strict=True):
                case.notes.append(DecisionNote.RETRIEVED_AGAIN)
                was_spoken = new and taken == case.steps  # the last round there could be is answered as it comes
                if not new or normalize(case.text) == text:
                    case.steps = taken
                if case.steps == taken and case.text and not (was_spoken or case.lets_out):
                    yield TextEvent(case.text)  # it was not known before that this answer is the last one

    def _has_new(self, case: QuestionState, found: list[Passage]) -> bool:
        """Whether these are other passages than the case has; if so it takes them, as far as they fit the window."""
        fitting = fit_passages(self.model, self.prompts, case.question, found, self.max_tokens)
        is_new = has_new_passages(case.passages, fitting)
        case.passages = fitting if is_new else case.passages
        return is_new

    def _fit(self, cases: list[QuestionState]) -> None:
        with measure_time(cases, "fit"):
            for case in cases:
                case.passages = fit_passages(self.model, self.prompts, case.question, case.passages, self.max_tokens)
                if not case.passages:
                    case.notes.append(DecisionNote.NO_PASSAGE_FITS)

    def _useful(self, questions: list[Question], found: list[list[Passage]]) -> list[bool]:
        if self.second_look is None:
            return [True] * len(questions)
        return self.second_look.useful(questions, found)

    def _answer_closed(self, cases: list[QuestionState], speak: GenerateFunction) -> Iterator[StreamEvent]:
        """Go on from the gate's own pass where there was one."""
        for group in (
            [case for case in cases if case.reading.resume is not None],
            [case for case in cases if case.reading.resume is None],
        ):
            tasks = [GenerationTask(case, self.prompts.closed(case.question), case.reading.resume) for case in group]
            if tasks:
                yield from speak(self.model, tasks, self.max_tokens)

    def _answer_open(self, cases: list[QuestionState], speak: GenerateFunction) -> Iterator[StreamEvent]:
        tasks = [GenerationTask(case, self.prompts.open(case.question, case.passages)) for case in cases]
        if tasks:
            yield from speak(self.model, tasks, self.max_tokens)
