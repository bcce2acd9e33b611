"""How the pipeline of an LLM in this process runs: simultaneous questions in one batch, and each stage with its limits.

Such a pipeline runs in the thread of the LLM. That thread waits while gates, searches and arbiters run in threads of the
gate service, as they do with an upstream. A stage that fails or takes too long is skipped, and named in the trace.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Hashable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate, zip_longest
from typing import TypeVar, cast

from knowgate.core.stop_flag import StopError, check_stop_flag
from knowgate.errors import ModelError
from knowgate.gates.arbiters.arbitration import choose_answers
from knowgate.gates.baselines import AlwaysGate, NeverGate
from knowgate.gates.rules.rule_set import RuleSet
from knowgate.gates.rules.topic_rule import RuleMatch
from knowgate.gates.scoring import count_own_calls
from knowgate.models.backend import allow_interruption
from knowgate.models.fair_executor import CLIENT
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.execution import run_in_model_thread
from knowgate.pipeline.question_state import QuestionState
from knowgate.pipeline.stages import RetrievalStage, SearchFunction, StageRunner, apply_gate, apply_match
from knowgate.server.chat.gate_service import REPEATED_FAILURES, GateService, make_fallback_decision
from knowgate.server.circuit_breaker import CircuitBreaker, record_search_error
from knowgate.server.json_api import ApiError
from knowgate.server.load_limits import get_reason
from knowgate.server.telemetry.trace import RequestTrace, TokenUsage, count_usage
from knowgate.types import Answer, AnswerPair, Arbiter, ArbiterChoice, Gate, Neighbor, Question, Retriever

Result = TypeVar("Result")
POLL_SECONDS = 0.1  # between two checks whether anybody still waits for the answer
BATCH_WAIT_SECONDS = 0.003
MAX_BATCH_SIZE = 16  # a larger batch would make a single question wait longer for the others
MAX_BATCH_CHARS = 20_000  # of several questions; those of a batch are in memory at the same time

# --- batches --------------------------------------------------------------------------------------


class BatchError(Exception):
    """A batch of questions failed. One bad question may be the cause, so each question must be answered on its own."""


@dataclass(eq=False)
class PendingQuestion:
    """Question that waits for the next batch. `owner` is the name of its API key, `answer` receives the result."""

    question: Question
    owner: str
    answer: asyncio.Future[tuple[Answer, TokenUsage]]


@dataclass
class QuestionBatcher:
    """Queue that answers simultaneous questions in one batch. API keys get equal shares of a batch.

    Attributes:
        max_batch_size: Maximum number of questions in a batch.
        wait_seconds: Time that the first question of a batch waits for further ones.
    """

    max_batch_size: int = MAX_BATCH_SIZE
    wait_seconds: float = BATCH_WAIT_SECONDS
    _queues: dict[Hashable, list[PendingQuestion]] = field(default_factory=dict)  # by batch key
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)  # asyncio keeps only weak references to tasks

    async def answer(self, batch_key: Hashable, rag: AdaptiveRAG, question: Question) -> tuple[Answer, TokenUsage]:
        """Answer a question in a batch with other questions.

        Args:
            batch_key: Only questions with an equal batch key can share a batch. Their pipelines must be the same.
            rag: The pipeline.
            question: The question.

        Returns:
            The answer, and the tokens of all calls to the LLM.

        Raises:
            BatchError: The batch failed.
        """
        pending = PendingQuestion(question, CLIENT.get(), asyncio.get_running_loop().create_future())
        if batch_key in self._queues:
            self._queues[batch_key].append(pending)
        else:
            self._queues[batch_key] = [pending]
            task = asyncio.ensure_future(self._run_batches(batch_key, rag))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return await pending.answer
        finally:  # if the client has disconnected, the memory of the question is freed before its turn
            with suppress(KeyError, ValueError):
                self._queues[batch_key].remove(pending)
            del pending  # its error refers to this frame, so the memory of the question could not be freed at once

    async def _run_batches(self, batch_key: Hashable, rag: AdaptiveRAG) -> None:
        """Answer the waiting questions with this batch key, batch by batch, until none is left."""
        try:
            await asyncio.sleep(self.wait_seconds)
            while queue := self._queues[batch_key]:
                waiting = _order_fairly(queue)
                size = self._count_next(waiting)
                batch, queue[:] = waiting[:size], waiting[size:]
                if batch:
                    CLIENT.set(batch[0].owner)  # the LLM lets API keys take turns, and counts the batch for this one
                    await self._run_batch(rag, batch)
        finally:
            del self._queues[batch_key]

    def _count_next(self, waiting: Sequence[PendingQuestion]) -> int:
        """Return the size of the next batch: one question, or several that are not too long together."""
        totals = accumulate(len(pending.question.text) for pending in waiting[: self.max_batch_size])
        return max(1, sum(total <= MAX_BATCH_CHARS for total in totals))

    async def _run_batch(self, rag: AdaptiveRAG, batch: list[PendingQuestion]) -> None:
        """Answer a batch of questions, and set the results or errors of their futures.

        The batch is stopped as soon as the clients of all its questions have disconnected.
        """
        work = asyncio.ensure_future(_answer_batch(rag, [pending.question for pending in batch]))

        def stop_if_unwanted(_: object) -> None:
            if all(pending.answer.done() for pending in batch):
                work.cancel()

        for pending in batch:
            pending.answer.add_done_callback(stop_if_unwanted)
        await asyncio.wait([work])
        if work.cancelled():
            return
        if (error := work.exception()) is not None:  # one bad question must not fail the others
            for pending in batch:
                if not pending.answer.done():
                    pending.answer.set_exception(BatchError(str(error)))
            return
        answers, usages = work.result()
        for pending, answer, usage in zip(batch, answers, usages, strict=True):
            if not pending.answer.done():
                pending.answer.set_result((answer, usage))


def _order_fairly(questions: list[PendingQuestion]) -> list[PendingQuestion]:
    """Order questions so that API keys take turns. Example: a1 a2 b1 becomes a1 b1 a2."""
    by_owner: defaultdict[str, list[PendingQuestion]] = defaultdict(list)
    for pending in questions:
        if not pending.answer.done():  # otherwise the client has disconnected
            by_owner[pending.owner].append(pending)
    return [pending for turn in zip_longest(*by_owner.values()) for pending in turn if pending is not None]


async def _answer_batch(rag: AdaptiveRAG, questions: list[Question]) -> tuple[list[Answer], list[TokenUsage]]:
    """Answer a batch of questions. Return the answers and their token counts."""

    def answer() -> tuple[list[Answer], list[TokenUsage]]:
        answers = rag.answer_many(questions)
        return answers, [count_usage(answer, rag) for answer in answers]

    return await run_in_model_thread(rag.model, answer)


# --- stages with limits ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TracedQuestion(Question):
    """Question with the trace of its request.

    Attributes:
        trace: Trace of the request. Failed stages are noted in it.
        errors: The error for the client, if the request must not be answered. Otherwise empty.
    """

    trace: RequestTrace = field(default_factory=RequestTrace)
    errors: list[ApiError] = field(default_factory=list)

    @classmethod
    def from_question(cls, question: Question, trace: RequestTrace) -> TracedQuestion:
        """Return a question with a trace."""
        return cls(**{item.name: getattr(question, item.name) for item in fields(question)}, trace=trace)

    def check(self) -> None:
        """Raise the error for the client, if there is one."""
        if self.errors:
            raise self.errors.pop()  # not kept, because the error refers to this frame


class GuardedStageRunner(StageRunner):
    """Runs the stages of a pipeline with the limits of the gate service. All questions are `TracedQuestion`.

    Args:
        gate_service: Has the threads, time limits and circuit breakers.
        loop: The event loop of the server.
    """

    def __init__(self, gate_service: GateService, loop: asyncio.AbstractEventLoop):
        self.gate_service = gate_service
        self.loop = loop

    def find_neighbors(self, gate: Gate, questions: Sequence[Question]) -> list[tuple[Neighbor, ...]]:
        """Return the logged questions that are similar to each question. Their embedding server may be slow.

        Raises:
            ModelError: The search failed repeatedly, or took too long, and is not tried for a while.
        """
        breaker = self.gate_service.history_breakers.get(CLIENT.get())
        if not breaker.try_acquire():
            raise ModelError(REPEATED_FAILURES)
        try:
            neighbors = self._wait(self.gate_service.run_in_gate_thread(partial(gate.find_neighbors, questions)))
        except StopError:
            breaker.record_cancellation()
            raise
        except TimeoutError:
            breaker.trip()
            raise
        except Exception as error:
            record_search_error(breaker, error)
            raise
        breaker.record_success()
        return neighbors

    def decide(self, gate: Gate, threshold: float, states: Sequence[QuestionState]) -> None:
        """Let the gate decide on each question. If it fails or its circuit breaker is open, the question retrieves."""
        if isinstance(gate, AlwaysGate | NeverGate):  # they cannot fail, so no breaker applies to them
            apply_gate(gate, threshold, states)
            return
        breakers = {owner: self.gate_service.gate_breakers.get(owner) for owner in map(_get_owner, states)}
        usable = {owner: breaker for owner, breaker in breakers.items() if breaker.try_acquire()}
        rejected_states = [state for state in states if _get_owner(state) not in usable]
        self._fall_back(gate, threshold, rejected_states, REPEATED_FAILURES)
        states = [state for state in states if _get_owner(state) in usable]
        if not states:
            return
        report_outcome = CircuitBreaker.record_cancellation  # if the gate is stopped, or if it decides again
        decides_again = False
        try:
            self._run_gate(gate, threshold, states)
            report_outcome = CircuitBreaker.record_success
        except StopError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the gate raises, the questions are answered
            decides_again = len(states) > 1 and not isinstance(error, TimeoutError)
            if not decides_again:
                report_outcome = CircuitBreaker.record_failure
                self._fall_back(gate, threshold, states, get_reason(error, self.gate_service.timeout))
        finally:
            for breaker in usable.values():
                report_outcome(breaker)
        if decides_again:  # on each question on its own, because one bad question must not fail the others
            for state in states:
                self.decide(gate, threshold, [state])

    def _run_gate(self, gate: Gate, threshold: float, states: Sequence[QuestionState]) -> None:
        """Let the gate decide: here if it only computes something, otherwise in its own thread, with the time limit."""
        copies = [replace(state, notes=[]) for state in states]  # a gate that is too slow may still change these later
        work = partial(apply_gate, gate, threshold, copies)
        if gate.is_pure:
            work()
        else:
            self._wait(self.gate_service.run_in_gate_thread(work))
        for state, copy in zip(states, copies, strict=True):
            state.decision, state.max_rounds = copy.decision, copy.max_rounds
            _get_question(state).trace.gate_calls = count_own_calls(gate)
            state.notes += copy.notes

    def _fall_back(self, gate: Gate, threshold: float, states: Sequence[QuestionState], reason: str) -> None:
        """Decide to retrieve, because the gate failed for this reason. Without a retriever, decide not to."""
        for state in states:
            self.gate_service.report_failed_gate(_get_question(state).trace, reason)
            decision = make_fallback_decision(gate, threshold, reason)
            state.decision = replace(decision, retrieve=self.gate_service.rag.retriever is not None)

    def apply_rules(self, rules: RuleSet, states: Sequence[QuestionState]) -> None:
        """Let rules override the gate. If a rule may be slow, such as a topic, the rules run outside the thread of the LLM."""
        if rules.is_fast:
            super().apply_rules(rules, states)
            return
        for state, match in zip(states, self._wait(self._find_matches(rules, states)), strict=True):
            apply_match(match, state)

    async def _find_matches(self, rules: RuleSet, states: Sequence[QuestionState]) -> list[RuleMatch | None]:
        """Return the first matching rule for each question."""
        return await asyncio.gather(*(self._find_match(rules, _get_question(state)) for state in states))

    async def _find_match(self, rules: RuleSet, question: TracedQuestion) -> RuleMatch | None:
        """Return the first matching rule for a question. None if no rule matches, or if the rules take too long."""
        CLIENT.set(question.trace.owner)  # API keys take turns; this task has a context of its own
        try:
            return await self.gate_service.run_in_text_thread(partial(rules.decide, question.text))
        except TimeoutError:
            self.gate_service.report_slow_rules()
            return None

    def search(self, stage: RetrievalStage, states: Sequence[QuestionState], search: SearchFunction) -> None:
        """Search for each question on its own, so that they fail on their own. A failed search finds nothing."""
        self._wait(self._search_all(stage, states, search))

    async def _search_all(self, stage: RetrievalStage, states: Sequence[QuestionState], search: SearchFunction) -> None:
        await asyncio.gather(*(self._search(stage, state, search) for state in states))

    async def _search(self, stage: RetrievalStage, state: QuestionState, search: SearchFunction) -> None:
        """Search for one question, and add the passages to its state. A failure is noted in the trace of the question."""

        def search_copy(retriever: Retriever) -> QuestionState:
            # A search that is too slow goes on in its thread, so it gets a state of its own.
            copy = replace(state, notes=[], seconds={})
            search(replace(stage, retriever=retriever), [copy])
            return copy

        question = _get_question(state)
        search_trace = RequestTrace()
        CLIENT.set(question.trace.owner)  # searches of API keys take turns; this task has a context of its own
        found = None
        try:
            found = await self.gate_service.run_search(search_copy, stage.retriever, search_trace)
        except ApiError as error:  # the server is strict
            question.errors.append(error.with_traceback(None))
            state.is_computed = True  # so that the LLM does not answer
        question.trace.degraded += search_trace.degraded
        if found is None:  # the search failed, but took time
            seconds = {name: milliseconds / 1000 for name, milliseconds in search_trace.milliseconds.items()}
        else:
            seconds = found.seconds
            state.passages = found.passages
            state.notes += found.notes
        for name, value in seconds.items():
            state.seconds[name] = state.seconds.get(name, 0.0) + value

    def arbitrate(
        self, arbiter: Arbiter, states: Sequence[QuestionState], pairs: Sequence[AnswerPair]
    ) -> Sequence[ArbiterChoice | None]:
        """Let the arbiter choose an answer to each question. If it fails, return None, which means those with passages."""
        try:
            return self._wait(self.gate_service.run_in_gate_thread(partial(choose_answers, arbiter, pairs)))
        except StopError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the arbiter raises, there is an answer
            for state in states:
                self.gate_service.bypass_arbiter(_get_question(state).trace, error)
            return [None for _ in states]

    def _wait(self, work: Coroutine[None, None, Result]) -> Result:
        """Wait for work in the event loop, from the thread of the LLM. Stop if nobody waits for the answer any more."""
        running = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            with allow_interruption(self.gate_service.rag.model):  # other API keys may use the LLM meanwhile
                while not wait([running], POLL_SECONDS).done:
                    check_stop_flag()
            return running.result()
        finally:
            running.cancel()
            del running  # its error refers to this frame, so the memory of the request could not be freed at once


def _get_question(state: QuestionState) -> TracedQuestion:
    """Return the question of a state. The server passes only questions with traces to its pipelines."""
    return cast(TracedQuestion, state.question)


def _get_owner(state: QuestionState) -> str:
    """Return the API key of a question."""
    return _get_question(state).trace.owner
