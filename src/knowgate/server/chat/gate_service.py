"""What a request demands of the threshold: at most so much may be lost. Where that is not proven, it is looked up."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from knowgate.errors import ArtifactError, KnowgateError
from knowgate.gates import PACKAGED_GATES, load_gate
from knowgate.gates.fitted_gate import FittedGate
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.server.chat.request_options import FilteredRetriever, RequestOptions
from knowgate.server.circuit_breaker import CircuitBreaker
from knowgate.server.json_api import ApiError
from knowgate.server.learning.arms import Experiment
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.server.upstream.draft import use_draft
from knowgate.types import (
    Completion,
    Decision,
    DecisionNote,
    Gate,
    Passage,
    Question,
    Reading,
    Retriever,
    SignalRequest,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnprovenGate(Gate):
    """Stands in for a gate of which nothing good enough is proven: need = 1."""

    name: str = ""
    max_loss: float = 0.0
    obeys_rules = False
    is_pure = True

    def score(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[float]:
        return [1.0 for _ in questions]

    def explain(self, questions: Sequence[Question], readings: Sequence[Reading]) -> list[str]:
        said = f"it is not proven here that skipping loses at most {self.max_loss:.2%} of the answers"
        return [said for _ in questions]


def require_guarantee(rag: AdaptiveRAG, max_loss: float) -> AdaptiveRAG:
    """The pipeline, if its threshold is proven to lose no more; else one that always retrieves and says why."""
    try:
        proven = rag.proven_loss
    except KnowgateError as error:  # whose documents cannot be told, of that nothing is proven
        log.warning("what is proven of the gate '%s' cannot be told: %s", rag.gate.name, error)
        proven = None
    if proven is not None and proven <= max_loss:
        return rag
    return rag.replace(gate=UnprovenGate(rag.gate.name, max_loss), threshold=None)


def describe_staleness(rag: AdaptiveRAG) -> str:
    """Why the gate's calibration does not hold here; '' where it does, or where there is none.

    A gate that cannot work here at all is an error: nobody should find that out from its decisions.
    """
    try:
        gate = rag.bound_gate
    except ArtifactError as error:
        return f"the gate's calibration does not hold here. {error}"
    if not isinstance(gate, FittedGate) or gate.artifact.path.is_relative_to(PACKAGED_GATES):
        return ""  # a gate that comes with knowgate never promised anything about anybody's documents
    proven = gate.artifact.manifest.get("guarantee")
    if not proven or rag.retriever is None:
        return ""
    made, here = proven["retriever"]["fingerprint"], rag.retriever.fingerprint
    return "" if made == here else f"the gate was calibrated on another index ({made}, not {here})"


FINGERPRINT_TTL = 60.0


class FingerprintCachingRetriever:
    """The retriever itself, but for its fingerprint."""

    def __init__(
        self, retriever: Retriever, seconds: float = FINGERPRINT_TTL, clock: Callable[[], float] = time.monotonic
    ):
        self.retriever = retriever
        self._seconds = seconds
        self._clock = clock
        self._known: tuple[str, float] | None = None  # and until when

    @property
    def name(self) -> str:
        return self.retriever.name

    @property
    def fingerprint(self) -> str:
        known, now = self._known, self._clock()
        if known is None or now >= known[1]:
            self._known = None  # one that cannot be had is asked for again
            self._known = known = (self.retriever.fingerprint, now + self._seconds)
        return known[0]

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        try:
            return self.retriever.search(queries, k)
        except Exception:
            self._known = None
            raise


Result = TypeVar("Result")


class GateService:
    """Of one pipeline. Gates that are not quick, and retrievers, run in threads, one decision and search at a time."""

    def __init__(self, rag: AdaptiveRAG, *, seconds: float, strict: bool):
        self.rag = rag
        self.seconds = seconds
        self.strict = strict
        self.stale = describe_staleness(rag)
        self.gate_breaker = CircuitBreaker("gate")
        self.retriever_breaker = CircuitBreaker("retriever")
        self._deciding = ThreadPoolExecutor(1, "knowgate-gate")
        self._searching = ThreadPoolExecutor(1, "knowgate-search")
        self._apart = replace(rag)  # searches without waiting for a gate's turn, which may hang
        self._named: dict[str, AdaptiveRAG] = {}
        self.always, self.never = load_gate("always"), load_gate("never")
        self.arms: Experiment | None = None  # two gates, shadow mode, an alarm: where those are switched on

    def close(self) -> None:
        """Until what was learnt is written; gates and retrievers that hang are not waited for."""
        for workers in (self._deciding, self._searching):
            workers.shutdown(wait=False, cancel_futures=True)
        if self.rag.log is not None:
            self.rag.log.close()

    def assign(self, policy: RequestOptions, body: Mapping[str, Any], trace: RequestTrace) -> RequestOptions:
        """The policy with what the server decides for itself: which gate, and whether it is obeyed."""
        return policy if self.arms is None else self.arms.assign(policy, body, trace)

    def choose(self, policy: RequestOptions) -> AdaptiveRAG:
        """The pipeline a request wants."""
        rag = self._by_name(policy.chosen) if policy.chosen else self.rag
        if self.arms is not None and policy.arm:
            rag = self.arms.pipeline(policy.arm, policy.shadow)
        if policy.threshold is not None:
            rag = rag.replace(threshold=policy.threshold)
        if policy.filter is not None and rag.retriever is not None:
            rag = rag.replace(retriever=FilteredRetriever(rag.retriever, policy.filter))
        return (
            rag if policy.max_loss is None or policy.retrieve == "always" else require_guarantee(rag, policy.max_loss)
        )

    def _by_name(self, name: str) -> AdaptiveRAG:
        if name not in self._named:
            made = self.rag.replace(gate=load_gate(name), threshold=None)
            try:
                _ = made.bound_gate
            except KnowgateError as error:
                raise ApiError(404, f"the gate '{name}' does not work here: {error}", "model_not_found") from None
            self._named[name] = made
        return self._named[name]

    def foresee(self, rag: AdaptiveRAG, question: Question) -> Decision | None:
        """The decision where a rule makes it, so that nothing need be read; None where the gate is asked."""
        if rag.rules is not None and not self.is_stale(rag) and rag.bound_gate.obeys_rules:
            ruling = rag.rules.judge(question.text)
            if ruling is not None:
                reason = f"{ruling.reason} (rule '{ruling.rule}')"
                need, threshold = float(ruling.retrieve), _threshold(rag)
                return apply_shadow_mode(
                    Decision(ruling.retrieve, need, threshold, rag.gate.name, reason, rule=ruling.rule), rag
                )
        return None

    def want_of(self, rag: AdaptiveRAG) -> SignalRequest:
        """What is read of the LLM before it can be decided."""
        unusable = self.is_stale(rag) or self.gate_breaker.state == "open"
        return SignalRequest() if unusable else rag.bound_gate.request

    def is_stale(self, rag: AdaptiveRAG) -> bool:
        return bool(self.stale) and rag.gate is self.rag.gate

    async def decide(
        self, rag: AdaptiveRAG, question: Question, draft: Completion | None, trace: RequestTrace
    ) -> Decision:
        """Never fails: what goes wrong is a retrieval that says so."""
        trace.draft = draft
        if self.is_stale(rag):
            return self.give_up_calibration(rag, trace)
        if not self.gate_breaker.allows():
            return self.give_up_gate(rag, trace, "the gate failed too often and is left alone for a while")
        try:
            with use_draft(draft), trace.timed("gate"):
                decision = await self._decided(rag, question, draft)
        except asyncio.CancelledError:
            self.gate_breaker.forget()
            raise
        except Exception as error:  # noqa: BLE001 - whatever a gate does, the question is answered
            self.gate_breaker.fail()
            return self.give_up_gate(rag, trace, describe_error(error, self.seconds))
        self.gate_breaker.succeed()
        trace.decision = decision
        return decision

    async def _decided(self, rag: AdaptiveRAG, question: Question, draft: Completion | None) -> Decision:
        """Sums over a draft that is there, or over nothing, are done here; going to a thread would cost more."""
        if rag.bound_gate.is_pure and (draft is not None or rag.bound_gate.request.is_empty):
            return rag.decide(question)
        return await self._run(self._deciding, lambda: rag.decide(question))

    def give_up_calibration(self, rag: AdaptiveRAG, trace: RequestTrace) -> Decision:
        trace.degraded.append("stale calibration")
        trace.decision = self._open(rag, self.stale)
        return trace.decision

    def give_up_gate(self, rag: AdaptiveRAG, trace: RequestTrace, why: str) -> Decision:
        log.warning("A decision failed, so it is retrieved: %s", why)
        trace.degraded.append("gate")
        trace.decision = self._open(rag, why)
        return trace.decision

    def _open(self, rag: AdaptiveRAG, why: str) -> Decision:
        reason = f"retrieved to be safe: {why}"
        return Decision(True, 1.0, _threshold(rag), rag.gate.name, reason)

    async def search(self, rag: AdaptiveRAG, question: Question, trace: RequestTrace) -> tuple[Passage, ...]:
        """The passages for a question; none where the retriever fails, unless that is to be an error."""
        apart = self._apart if rag.retriever is self.rag.retriever else replace(self._apart, retriever=rag.retriever)
        if not self.retriever_breaker.allows():
            return self.give_up_retriever(trace, "the retriever failed too often and is left alone for a while")
        try:
            with trace.timed("retrieve"):
                found = await self._run(self._searching, lambda: apart.retrieve(question))
        except asyncio.CancelledError:
            self.retriever_breaker.forget()
            raise
        except Exception as error:  # noqa: BLE001 - whatever a retriever does, the question is answered
            self.retriever_breaker.fail()
            return self.give_up_retriever(trace, describe_error(error, self.seconds))
        self.retriever_breaker.succeed()
        return found

    def give_up_retriever(self, trace: RequestTrace, why: str) -> tuple[Passage, ...]:
        log.warning("A retrieval failed: %s", why)
        trace.degraded.append("retriever")
        if self.strict:
            raise ApiError(503, "the documents cannot be searched at the moment.", "retriever_down", trace.headers)
        return ()

    def give_up(self, part: str, trace: RequestTrace, error: Exception) -> None:
        """It goes on without this part."""
        log.warning("The %s failed and was left out: %s", part, describe_error(error, self.seconds))
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


def apply_shadow_mode(decision: Decision, rag: AdaptiveRAG) -> Decision:
    """What becomes of a rule's decision where everything is looked up."""
    if not rag.shadow or decision.retrieve:
        return decision
    reason = f"{rag.shadow}: {decision.reason}"
    return replace(decision, retrieve=True, reason=reason, notes=(*decision.notes, DecisionNote.WOULD_SKIP))


def _threshold(rag: AdaptiveRAG) -> float:
    return rag.gate.threshold if rag.threshold is None else rag.threshold


def describe_error(error: BaseException, seconds: float) -> str:
    """What may be said of an error: our own sentences; of others only the kind, for they may hold anything."""
    if isinstance(error, TimeoutError):
        return f"it took longer than {seconds:g} seconds"
    foreign = error.__cause__ or error
    return str(error) if isinstance(foreign, KnowgateError) else f"it broke with {type(foreign).__name__}"
