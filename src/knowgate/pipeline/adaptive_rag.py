"""AdaptiveRAG: read a question once, decide, then answer from memory or retrieve and answer with passages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from knowgate.core.text import normalize
from knowgate.core.validation import check_integer, check_number
from knowgate.data.history.entries import HistoryScope
from knowgate.errors import BadSetting
from knowgate.gates.arbiters import load_policy_arbiter
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.calibration import deployment
from knowgate.gates.rules.rule_set import RuleSet, load_rules
from knowgate.gates.scoring import bind_gate, read_questions
from knowgate.models.prompts.answers import AnswerPrompts, fit_passages, load_answer_prompts
from knowgate.pipeline import execution, stages
from knowgate.pipeline.execution import GenerateFunction, GenerationTask, as_question, batch_questions
from knowgate.pipeline.question_state import DecidedQuestion, QuestionState, measure_time
from knowgate.pipeline.stages import RERANK_CANDIDATES, RetrievalStage, StageRunner
from knowgate.pipeline.traffic_log import CompleteDraftGate, TrafficLog
from knowgate.types import Decision, DecisionNote, Gate, Passage, Question, TokenizingModel
from knowgate.types.protocols import Arbiter, Model, PassageFilter, Reranker, Retriever
from knowgate.types.records import Answer, AnswerEvent, DecisionEvent, PassagesEvent, StreamEvent, TextEvent

# Quotations must fit smaller token limits. With larger ones, a long sentence may exceed the limit, but is never cut.
MIN_QUOTATION_LIMIT = 32
BATCH_SIZE = 64  # questions that the model reads together; limits the memory of their caches


@dataclass(frozen=True, repr=False)
class AdaptiveRAG:
    """Answers questions, and retrieves passages only where the gate asks for them.

    Asynchronous methods, such as `aanswer`, queue for the model. Up to `model.concurrency` threads may call the other
    methods at once.

    Args:
        model: The LLM.
        gate: Scores how much a question needs retrieval.
        retriever: Searches for passages. Not needed if the gate never retrieves.
        reranker: Orders 20 candidate passages, of which the best `k` are shown to the LLM.
        threshold: Retrieve if the gate's score is above it. Default: the gate's own threshold.
        k: Maximum number of passages shown to the LLM.
        second_look: Drops passages that it judges useless. Default: keep all.
        rerank_margin: Skip reranking if the best score leads the second by this share. Default: always rerank.
        prompts: Wording of the answer prompts. Default: `load_answer_prompts(model=model)`.
        max_tokens: Maximum length of an answer in tokens.
        log: Stores retrieved questions with a label: known if the answers with and without passages agree.
        arbiter: Chooses, after retrieval, between the draft (the answer without passages) and the open-book answer.
            Default: rules that give the draft if the open-book answer abstains. They apply if the gate reads a
            complete draft and has no guarantee that was proven without them. None: always give the open-book answer.
        rules: Decide before the gate for small talk, arithmetic, recent events and the like (`load_rules`). Default:
            the packaged rules. None: the gate alone decides.
        shadow: Shadow mode: if not empty, retrieve for every question and give this text as the reason; what the
            gate would have done is noted on the decision.
        runner: Runs gate, searches and arbiter. Default: one at a time, because they may not be thread-safe.

    Example:
        >>> from knowgate import AdaptiveRAG, load_gate, load_model
        >>> rag = AdaptiveRAG(load_model("fake"), load_gate("never"))
        >>> rag.decide("Who wrote Faust?").retrieve
        False
    """

    model: Model
    gate: Gate
    retriever: Retriever | None = None
    _: KW_ONLY
    reranker: Reranker | None = None
    threshold: float | None = None
    k: int = 3
    second_look: PassageFilter | None = None
    rerank_margin: float | None = None
    prompts: AnswerPrompts = None  # type: ignore[assignment]  # replaced by the default prompts of the model
    max_tokens: int = 32
    log: TrafficLog | None = None
    arbiter: Arbiter | None = RULES_ARBITER
    rules: RuleSet | None = field(default_factory=load_rules)
    shadow: str = ""
    runner: StageRunner = field(default_factory=StageRunner, compare=False)

    def __post_init__(self) -> None:
        for name, loader in (("model", "load_model"), ("retriever", "load_retriever"), ("arbiter", "load_arbiter")):
            value = getattr(self, name)
            if isinstance(value, str):
                raise BadSetting(f"{name}='{value}' is a text, not an object. Load it first: {loader}('{value}').")
        if not isinstance(self.gate, Gate):
            raise BadSetting(f"gate={self.gate!r} is not a gate. Load one first, such as load_gate('logprob:mean').")
        if self.prompts is None:
            object.__setattr__(self, "prompts", load_answer_prompts(model=self.model))
        if self.threshold is not None:
            check_number(self.threshold, "the threshold")
        if self.rerank_margin is not None:
            check_number(self.rerank_margin, "the rerank margin")
        check_integer(self.k, "k")
        check_integer(self.max_tokens, "max_tokens")

    def __repr__(self) -> str:
        parts = [self.model.name, f"gate {self.gate.name} with threshold {self.used_threshold:.3g}"]
        parts.append(f"{self.k} passages from {self.retriever.name}" if self.retriever else "no documents")
        if self.reranker:
            parts.append(f"reranked by {self.reranker.name}")
        return f"<AdaptiveRAG: {', '.join(parts)}>"

    def answer(self, question: str | Question) -> Answer:
        """Answer one question.

        Returns:
            The answer with its decision, the passages shown to the LLM, and the seconds of each stage.

        Raises:
            BadInput: The question is empty.
            BadSetting: The gate decided to retrieve, but there is no retriever.

        Example:
            >>> from knowgate import AdaptiveRAG, load_gate, load_model
            >>> rag = AdaptiveRAG(load_model("fake"), load_gate("never"))
            >>> answer = rag.answer("Who wrote Faust?")
            >>> (answer.decision.retrieve, answer.passages)
            (False, ())
        """
        return self.answer_many([question])[0]

    def answer_many(self, questions: Sequence[str | Question]) -> list[Answer]:
        """Answer several questions in batches, which is faster than one by one.

        Example:
            >>> from knowgate import AdaptiveRAG, load_gate, load_model
            >>> rag = AdaptiveRAG(load_model("fake"), load_gate("never"))
            >>> len(rag.answer_many(["Who wrote Faust?", "When was it written?"]))
            2
        """
        return list(self.stream(questions))

    def decide(self, question: str | Question) -> Decision:
        """Decide whether one question needs retrieval, without retrieving or answering."""
        (state,) = self._decide([as_question(question)], [self.bound_gate])
        return state.final_decision

    def decide_many(self, questions: Sequence[str | Question]) -> list[Decision]:
        """Decide for several questions whether they need retrieval, without retrieving or answering."""
        execution.check_not_text(questions)
        checked = [as_question(question) for question in questions]  # all of them, before the first is decided
        return [decided.decision for decided in self.decide_stream(checked)]

    def decide_stream(
        self, questions: Iterable[str | Question], batch: int = BATCH_SIZE, *, first: int | None = None
    ) -> Iterator[DecidedQuestion]:
        """Yield each question with its decision, in order. Nothing is retrieved or answered.

        Args:
            questions: Any iterable; it is read on demand.
            batch: Number of questions that are decided together.
            first: Size of the first batch; the following ones double up to `batch`. Default: `batch`.
        """
        for question_batch in batch_questions(questions, batch, first):
            for state in self._decide(question_batch, [self.bound_gate]):
                yield DecidedQuestion(state.question, state.final_decision)

    def stream(
        self, questions: Iterable[str | Question], batch: int = BATCH_SIZE, *, first: int | None = None
    ) -> Iterator[Answer]:
        """Yield answers in order, one batch at a time.

        Args:
            questions: Any iterable; it is read on demand.
            batch: Questions per batch.
            first: Size of the first batch; the following ones double up to `batch`. Use 1 for interactive output.

        Example:
            >>> from knowgate import AdaptiveRAG, load_gate, load_model
            >>> rag = AdaptiveRAG(load_model("fake"), load_gate("never"))
            >>> for answer in rag.stream(f"What is item {i}?" for i in range(2)):
            ...     print(answer.question.text)
            What is item 0?
            What is item 1?
        """
        for question_batch in batch_questions(questions, batch, first):
            yield from self._answer(question_batch)

    def answer_stream(self, question: str | Question) -> Generator[StreamEvent, None, None]:
        """Answer one question and yield events meanwhile.

        The last event is an `AnswerEvent`. Closing the iterator stops the LLM.
        """
        (answer,) = yield from self._process([as_question(question)], execution.generate_stream)
        yield AnswerEvent(answer)

    def retrieve(self, question: str | Question) -> tuple[Passage, ...]:
        """Return the best `k` passages for a question, without asking the gate."""
        state = QuestionState(as_question(question))
        self._retrieval.retrieve([state])
        return state.passages

    def replace(self, **changes: Any) -> AdaptiveRAG:
        """Return a copy with other arguments, such as gate or threshold.

        Both pipelines share a runner, so their gates and searches do not run at the same time.
        """
        other = dataclasses.replace(self, **changes)
        # Binding a gate to a model is slow, so the copy takes over the cached `bound_gate` if it stays valid.
        is_same_gate = changes.keys().isdisjoint({"gate", "model", "prompts"})
        if is_same_gate and "bound_gate" in vars(self):
            vars(other)["bound_gate"] = self.bound_gate
        return other

    @functools.cached_property
    def without_rules(self) -> AdaptiveRAG:
        """This pipeline without rules, for callers that have already applied them."""
        return self.replace(rules=None)

    @functools.cached_property
    def constant_decision(self) -> Decision:
        """The decision of a gate that decides the same for every question, such as `always`. Rules are not applied."""
        return self.without_rules.decide("?")

    # --- asyncio ----------------------------------------------------------------------------------

    async def aanswer(self, question: str | Question) -> Answer:
        """Answer one question from an event loop."""
        return await execution.run_in_model_thread(self.model, lambda: self.answer(question))

    async def aanswer_many(self, questions: Sequence[str | Question]) -> list[Answer]:
        """Answer several questions from an event loop."""
        return [answer async for answer in self.astream(questions)]

    async def adecide(self, question: str | Question) -> Decision:
        """Decide on one question from an event loop."""
        return await execution.run_in_model_thread(self.model, lambda: self.decide(question))

    async def astream(
        self, questions: Iterable[str | Question] | AsyncIterable[str | Question], batch: int = BATCH_SIZE
    ) -> AsyncGenerator[Answer, None]:
        """Yield answers like `stream`, from an event loop. If cancelled, it stops before the next token."""
        execution.check_not_text(questions)
        async with aclosing(execution.batch_async(questions, batch)) as batches:
            async for taken in batches:
                work = functools.partial(self._answer, [as_question(question) for question in taken])
                for answer in await execution.run_in_model_thread(self.model, work):
                    yield answer

    def aanswer_stream(self, question: str | Question) -> AsyncGenerator[StreamEvent, None]:
        """Yield events like `answer_stream`, from an event loop. If cancelled, it stops before the next token."""
        return execution.iterate_in_model_thread(self.model, self.answer_stream(question))

    # --- gate, arbiter and guarantee --------------------------------------------------------------

    @functools.cached_property
    def bound_gate(self) -> Gate:
        """The gate, checked against this model and ready to score."""
        return bind_gate(self.gate, self.model, self.prompts)

    @functools.cached_property
    def bound_arbiter(self) -> Arbiter | None:
        """The arbiter, which chooses between draft and answer with passages. None: always the answer with passages."""
        arbiter = self.arbiter  # the default gives way to the one that was fitted together with the gate, if any
        if arbiter is RULES_ARBITER:
            arbiter = load_policy_arbiter(self.gate, RULES_ARBITER)
        return stages.bind_arbiter(arbiter, self.bound_gate, self.model, self.prompts)

    @property
    def guarantee(self) -> str:
        """Text on the gate's proven maximum loss, and whether the proof holds here. '' if nothing is proven."""
        return deployment.describe_guarantee(self.bound_gate, self._deployment)

    @property
    def guarantee_violations(self) -> list[str]:
        """Reasons why the gate's guarantee does not hold here, such as another `k`."""
        return deployment.find_violated_conditions(self.bound_gate, self._deployment)

    @property
    def proven_loss(self) -> float | None:
        """Proven maximum loss of accuracy (0 to 1) against always retrieving. None without a valid guarantee."""
        return deployment.get_proven_loss(self.bound_gate, self._deployment)

    @property
    def _deployment(self) -> deployment.Deployment:
        """The settings of this pipeline that the guarantee of a gate depends on."""
        return deployment.Deployment(
            threshold=self.threshold,
            retriever=self.retriever.fingerprint if self.retriever else None,
            k=self.k,
            max_tokens=self.max_tokens,
            open_prompts=self.prompts.open_book_fingerprint,
            reranker=self.reranker.fingerprint if self.reranker else None,
            candidates=RERANK_CANDIDATES,
            reranks_sometimes=self.rerank_margin is not None,
            filters_passages=self.second_look is not None,
            arbiter=self.bound_arbiter.fingerprint if self.bound_arbiter else None,
        )

    # --- stages -----------------------------------------------------------------------------------

    @property
    def used_threshold(self) -> float:
        """The need above which the pipeline retrieves: its own threshold, or that of the gate."""
        return self.gate.threshold if self.threshold is None else self.threshold

    @property
    def _retrieval(self) -> RetrievalStage:
        """The part of the pipeline that searches, reranks and filters passages; raises BadSetting without documents."""
        if self.retriever is None:
            raise BadSetting("there are no documents to retrieve from. Give `retriever`, or use the gate 'never'.")
        return RetrievalStage(
            retriever=self.retriever,
            reranker=self.reranker,
            second_look=self.second_look,
            k=self.k,
            rerank_margin=self.rerank_margin,
            fit_passages=functools.partial(fit_passages, self.model, self.prompts, max_tokens=self.max_tokens),
            runner=self.runner,
        )

    def _answer(self, questions: Sequence[Question]) -> list[Answer]:
        return execution.exhaust_generator(self._process(questions, execution.generate_batch))

    def _process(
        self, questions: Sequence[Question], generate: GenerateFunction
    ) -> Generator[StreamEvent, None, list[Answer]]:
        """Answer questions: decide, retrieve, answer, and let the arbiter choose.

        `generate` lets the LLM write all answers at once, or streams them one by one.
        """
        states = self._decide(questions, [self.bound_gate, *self._draft_readers])
        yield from (DecisionEvent(state.final_decision) for state in states)
        yield from self._retrieve([state for state in states if state.final_decision.retrieve])
        yield from self._process_open_book([state for state in states if state.passages], generate)
        closed_book = [state for state in states if not state.passages]
        yield from stages.compute_answers(closed_book)  # arithmetic, without the LLM
        yield from self._answer_closed_book([state for state in closed_book if not state.is_computed], generate)
        answers = [state.build_answer(len(states)) for state in states]
        self._log_answers(answers)
        return answers

    def _log_answers(self, answers: Sequence[Answer]) -> None:
        """Log answered questions, if the pipeline has a log."""
        if self.log is not None:
            scope = HistoryScope(self.model.fingerprint, self.prompts.fingerprint, self.log.tenant)
            self.log.log_answers(answers, scope, self.max_tokens)

    def _retrieve(self, states: list[QuestionState]) -> Iterator[StreamEvent]:
        """Retrieve passages for questions, and fit them into the prompt."""
        if states:
            self._retrieval.retrieve(states)
            self._retrieval.fit([state for state in states if state.passages])
            yield from (PassagesEvent(state.passages) for state in states)

    def _process_open_book(self, states: list[QuestionState], generate: GenerateFunction) -> Iterator[StreamEvent]:
        """Answer questions with passages, in rounds, and let the arbiter choose."""
        # Answers that the arbiter may still replace by the draft are held back until it has chosen.
        stages.mark_replaceable_answers(self.bound_arbiter, states, self.max_tokens)
        yield from self._answer_open_book(states, generate)
        while remaining := [state for state in states if state.round < state.max_rounds]:
            yield from self._retrieve_again(remaining, generate)
        yield from stages.arbitrate(self.bound_arbiter, states, self.runner)

    def _decide(self, questions: Sequence[Question], readers: Sequence[Gate]) -> list[QuestionState]:
        """Decide for each question whether to retrieve. `readers` request signals of the LLM, such as a draft."""
        states = self._read(questions, readers)
        gate = self.bound_gate
        with measure_time(states, "gate"):
            self.runner.decide(gate, self.used_threshold, states)
        if self.rules is not None and gate.obeys_rules:
            self.runner.apply_rules(self.rules, states)
        if self.shadow and self.retriever:
            stages.force_retrieval(self.shadow, states)
        return states

    def _read(self, questions: Sequence[Question], readers: Sequence[Gate]) -> list[QuestionState]:
        """Read the signals of the LLM, such as a draft, that the gates in `readers` request."""
        states = [QuestionState(question) for question in questions]
        with measure_time(states, "read"):
            readings = read_questions(self.model, readers, questions, self.prompts, self.runner.find_neighbors)
        for state, reading in zip(states, readings, strict=True):
            state.reading = reading
        return states

    @property
    def _draft_readers(self) -> list[Gate]:
        """Gates that decide nothing, but make the LLM finish its drafts, if the log or the arbiter needs complete drafts."""
        arbiter = self.bound_arbiter
        log_needs_drafts = self.log is not None and self.log.drafts
        arbiter_needs_drafts = arbiter is not None and arbiter.makes_drafts and self.retriever is not None
        if log_needs_drafts or arbiter_needs_drafts:
            return [CompleteDraftGate(self.max_tokens)]
        return []

    def _retrieve_again(self, states: list[QuestionState], generate: GenerateFunction) -> Iterator[StreamEvent]:
        """Search with each question and its last answer, then answer again.

        A question whose answer stays the same gets no further round.
        """
        previous_answers = [normalize(state.text) for state in states]
        has_new_passages = self._retrieval.retrieve_again(states)
        for state in states:
            state.round += 1
        renewed = [state for state, has_new in zip(states, has_new_passages, strict=True) if has_new]
        yield from (PassagesEvent(state.passages) for state in renewed)
        yield from self._answer_open_book(renewed, generate)
        for state, has_new, previous_answer in zip(states, has_new_passages, previous_answers, strict=True):
            state.notes.append(DecisionNote.RETRIEVED_AGAIN)
            was_streamed = has_new and state.round == state.max_rounds  # earlier answers, which may change, are not
            if not has_new or normalize(state.text) == previous_answer:
                state.max_rounds = state.round  # no further rounds
                # `may_show` is set if the arbiter may still replace the answer. The choice is then yielded later.
                if state.text and not was_streamed and not state.may_show:
                    yield TextEvent(state.text)

    def _answer_closed_book(self, states: list[QuestionState], generate: GenerateFunction) -> Iterator[StreamEvent]:
        """Answer questions without passages. Drafts are continued, in a batch of their own."""
        tasks = [GenerationTask(state, self.prompts.closed(state.question), state.reading.resume) for state in states]
        resumed = [task for task in tasks if task.resume is not None]
        new = [task for task in tasks if task.resume is None]
        for batch in (resumed, new):
            if batch:
                yield from generate(self.model, batch, self.max_tokens)

    def _answer_open_book(self, states: list[QuestionState], generate: GenerateFunction) -> Iterator[StreamEvent]:
        """Answer questions with their passages.

        With `prompts.max_sentences`, an answer that is not in the passages is replaced by the best sentence of the passages.
        """
        tasks = [GenerationTask(state, self.prompts.open(state.question, state.passages)) for state in states]
        if not tasks:
            return
        if self.prompts.max_sentences is None:
            yield from generate(self.model, tasks, self.max_tokens)
            return
        execution.generate_batch(self.model, tasks, self.max_tokens)
        for state in states:
            quotation = self.prompts.check_open_answer(state.question, state.passages, state.text)
            if self._allows_quotation(quotation):
                state.quote(quotation)
            if not (state.may_retrieve_again or state.may_show):  # otherwise, the text may still be replaced
                yield TextEvent(state.text)

    def _allows_quotation(self, text: str) -> bool:
        """Return whether a quotation fits within the token limit of answers. High limits fit every quotation."""
        if self.max_tokens >= MIN_QUOTATION_LIMIT or not isinstance(self.model, TokenizingModel):
            return True
        return len(self.model.tokenize(text)) <= self.max_tokens
