"""Decides and looks up for requests, and never stands in their way: what fails falls open and is marked.

| what fails | what happens |
|---|---|
| gate: error, NaN, too slow, breaker open, log locked | retrieve, `degraded` |
| calibration of another LLM, wording or index | always retrieve, `degraded` |
| retriever: error, too slow, breaker open | answer from memory, `degraded`; 503 where `strict` |

Knows pipelines; nothing of where answers come from.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from knowgate.errors import KnowgateError
from knowgate.gates import load_gate
from knowgate.pipeline import AdaptiveRAG
from knowgate.server.breaker import Breaker
from knowgate.server.drafts import reading_draft
from knowgate.server.filtering import FilteredRetriever
from knowgate.server.learning.arms import Arms
from knowgate.server.policy import Policy
from knowgate.server.problems import Problem
from knowgate.server.promising import held_to
from knowgate.server.staleness import stale_because
from knowgate.server.trace import Trace
from knowgate.types import Completion, Decision, Note, Passage, Question, Want

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Gatekeeper:
    """Of one pipeline. Gates that are not quick, and retrievers, run in threads, one decision and search at a time."""

    def __init__(self, rag: AdaptiveRAG, *, seconds: float, strict: bool):
        self.rag = rag
        self.seconds = seconds
        self.strict = strict
        self.stale = stale_because(rag)
        self.gate_breaker = Breaker("gate")
        self.retriever_breaker = Breaker("retriever")
        self._deciding = ThreadPoolExecutor(1, "knowgate-gate")
        self._searching = ThreadPoolExecutor(1, "knowgate-search")
        self._apart = replace(rag)  # searches without waiting for a gate's turn, which may hang
        self._named: dict[str, AdaptiveRAG] = {}
        self.always, self.never = load_gate("always"), load_gate("never")
        self.arms: Arms | None = None  # two gates, shadow mode, an alarm: where those are switched on

    def close(self) -> None:
        """Until what was learnt is written; gates and retrievers that hang are not waited for."""
        for workers in (self._deciding, self._searching):
            workers.shutdown(wait=False, cancel_futures=True)
        if self.rag.log is not None:
            self.rag.log.close()

    def assign(self, policy: Policy, body: Mapping[str, Any], trace: Trace) -> Policy:
        """The policy with what the server decides for itself: which gate, and whether it is obeyed."""
        return policy if self.arms is None else self.arms.assign(policy, body, trace)

    def choose(self, policy: Policy) -> AdaptiveRAG:
        """The pipeline a request wants."""
        rag = self._by_name(policy.chosen) if policy.chosen else self.rag
        if self.arms is not None and policy.arm:
            rag = self.arms.pipeline(policy.arm, policy.shadow)
        if policy.threshold is not None:
            rag = rag.altered(threshold=policy.threshold)
        if policy.filter is not None and rag.retriever is not None:
            rag = rag.altered(retriever=FilteredRetriever(rag.retriever, policy.filter))
        return rag if policy.max_loss is None or policy.retrieve == "always" else held_to(rag, policy.max_loss)

    def _by_name(self, name: str) -> AdaptiveRAG:
        if name not in self._named:
            made = self.rag.altered(gate=load_gate(name), threshold=None)
            try:
                _ = made.bound
            except KnowgateError as error:
                raise Problem(404, f"the gate '{name}' does not work here: {error}", "model_not_found") from None
            self._named[name] = made
        return self._named[name]

    def foresee(self, rag: AdaptiveRAG, question: Question) -> Decision | None:
        """The decision where a rule makes it, so that nothing need be read; None where the gate is asked."""
        if rag.rules is not None and not self.is_stale(rag) and rag.bound.may_be_overruled:
            ruling = rag.rules.judge(question.text)
            if ruling is not None:
                reason = f"{ruling.reason} (rule '{ruling.rule}')"
                need, threshold = float(ruling.retrieve), _threshold(rag)
                return in_shadow(
                    Decision(ruling.retrieve, need, threshold, rag.gate.name, reason, rule=ruling.rule), rag
                )
        return None

    def want_of(self, rag: AdaptiveRAG) -> Want:
        """What is read of the LLM before it can be decided."""
        unusable = self.is_stale(rag) or self.gate_breaker.state == "open"
        return Want() if unusable else rag.bound.want

    def is_stale(self, rag: AdaptiveRAG) -> bool:
        return bool(self.stale) and rag.gate is self.rag.gate

    async def decide(self, rag: AdaptiveRAG, question: Question, draft: Completion | None, trace: Trace) -> Decision:
        """Never fails: what goes wrong is a retrieval that says so."""
        trace.draft = draft
        if self.is_stale(rag):
            return self.give_up_calibration(rag, trace)
        if not self.gate_breaker.allows():
            return self.give_up_gate(rag, trace, "the gate failed too often and is left alone for a while")
        try:
            with reading_draft(draft), trace.timed("gate"):
                decision = await self._decided(rag, question, draft)
        except asyncio.CancelledError:
            self.gate_breaker.forget()
            raise
        except Exception as error:  # noqa: BLE001 - whatever a gate does, the question is answered
            self.gate_breaker.fail()
            return self.give_up_gate(rag, trace, cause_of(error, self.seconds))
        self.gate_breaker.succeed()
        trace.decision = decision
        return decision

    async def _decided(self, rag: AdaptiveRAG, question: Question, draft: Completion | None) -> Decision:
        """Sums over a draft that is there, or over nothing, are done here; going to a thread would cost more."""
        if rag.bound.is_quick and (draft is not None or rag.bound.want.is_nothing):
            return rag.decide(question)
        return await self._run(self._deciding, lambda: rag.decide(question))

    def give_up_calibration(self, rag: AdaptiveRAG, trace: Trace) -> Decision:
        trace.degraded.append("stale calibration")
        trace.decision = self._open(rag, self.stale)
        return trace.decision

    def give_up_gate(self, rag: AdaptiveRAG, trace: Trace, why: str) -> Decision:
        log.warning("A decision failed, so it is retrieved: %s", why)
        trace.degraded.append("gate")
        trace.decision = self._open(rag, why)
        return trace.decision

    def _open(self, rag: AdaptiveRAG, why: str) -> Decision:
        reason = f"retrieved to be safe: {why}"
        return Decision(True, 1.0, _threshold(rag), rag.gate.name, reason)

    async def search(self, rag: AdaptiveRAG, question: Question, trace: Trace) -> tuple[Passage, ...]:
        """The passages for a question; none where the retriever fails, unless that is to be an error."""
        apart = self._apart if rag.retriever is self.rag.retriever else replace(self._apart, retriever=rag.retriever)
        if not self.retriever_breaker.allows():
            return self.give_up_retriever(trace, "the retriever failed too often and is left alone for a while")
        try:
            with trace.timed("retrieve"):
                found = await self._run(self._searching, lambda: apart.find(question))
        except asyncio.CancelledError:
            self.retriever_breaker.forget()
            raise
        except Exception as error:  # noqa: BLE001 - whatever a retriever does, the question is answered
            self.retriever_breaker.fail()
            return self.give_up_retriever(trace, cause_of(error, self.seconds))
        self.retriever_breaker.succeed()
        return found

    def give_up_retriever(self, trace: Trace, why: str) -> tuple[Passage, ...]:
        log.warning("A retrieval failed: %s", why)
        trace.degraded.append("retriever")
        if self.strict:
            raise Problem(503, "the documents cannot be searched at the moment.", "retriever_down", trace.headers)
        return ()

    def give_up(self, part: str, trace: Trace, error: Exception) -> None:
        """It goes on without this part."""
        log.warning("The %s failed and was left out: %s", part, cause_of(error, self.seconds))
        trace.degraded.append(part)

    async def apart(self, work: Callable[[], Result]) -> Result:
        """Work with what deciding uses, in its thread."""
        return await self._run(self._deciding, work)

    async def beside(self, work: Callable[[], Result]) -> Result:
        """Work with what searching uses, in its thread."""
        return await self._run(self._searching, work)

    async def _run(self, workers: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        context = contextvars.copy_context()
        running = asyncio.get_running_loop().run_in_executor(workers, lambda: context.run(work))
        async with asyncio.timeout(self.seconds):
            return await running


def in_shadow(decision: Decision, rag: AdaptiveRAG) -> Decision:
    """What becomes of a rule's decision where everything is looked up."""
    if not rag.shadow or decision.retrieve:
        return decision
    reason = f"{rag.shadow}: {decision.reason}"
    return replace(decision, retrieve=True, reason=reason, notes=(*decision.notes, Note.WOULD_SKIP))


def _threshold(rag: AdaptiveRAG) -> float:
    return rag.gate.threshold if rag.threshold is None else rag.threshold


def cause_of(error: BaseException, seconds: float) -> str:
    """What may be said of an error: our own sentences; of others only the kind, for they may hold anything."""
    if isinstance(error, TimeoutError):
        return f"it took longer than {seconds:g} seconds"
    foreign = error.__cause__ or error
    return str(error) if isinstance(foreign, KnowgateError) else f"it broke with {type(foreign).__name__}"
