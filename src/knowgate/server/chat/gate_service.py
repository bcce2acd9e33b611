"""Decide on chats with the gate, and search: in the background while the upstream generates a draft, or afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from knowgate.core.limited_log import LimitedLog
from knowgate.data.history.entries import get_max_normalized_length
from knowgate.data.signals.confidence import EMPTY_DRAFT_NEED, is_empty_draft
from knowgate.errors import KnowgateError
from knowgate.gates import load_gate
from knowgate.gates.baselines import AlwaysGate, NeverGate
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.rules.rule_set import PatternTimeBudget
from knowgate.models.fair_executor import CLIENT, FairExecutor
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.stages import EMPTY_DRAFT_REASON, StageRunner
from knowgate.pipeline.traffic_log import CLOSE_SECONDS
from knowgate.retrieval.engines.http import HttpRetriever
from knowgate.retrieval.engines.web import WebRetriever
from knowgate.retrieval.rerankers.remote import RemoteReranker
from knowgate.server.chat import request_options
from knowgate.server.circuit_breaker import BreakersByKey, RetrieverBreakers, SearchQueueTimeout
from knowgate.server.json_api import ApiError
from knowgate.server.learning.arms import Experiment
from knowgate.server.load_limits import (
    FairLock,
    RerankQueue,
    get_reason,
    limit_time,
    run_in_place,
    run_in_thread,
)
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.server.upstream.draft import UpstreamDraftModel, use_draft
from knowgate.types import (
    Completion,
    Decision,
    DecisionNote,
    Gate,
    Passage,
    Question,
    Reranker,
    Retriever,
    SignalRequest,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")
MAX_INLINE_TOKENS = 4_096  # with a longer draft, every gate runs in a thread
MAX_INLINE_CHARS = 2_000  # with a question that is longer after Unicode normalization, too
MAX_MODEL_CHARS = 200  # of a model name in the log
PARALLEL_SEARCHES = 8  # on a search server
REPEATED_FAILURES = "the gate failed repeatedly and is not used for a while"
MAX_ABANDONED_SEARCHES = 4  # searches that may still run after their timeout, before further searches have to wait


class GateService:
    """Service that decides whether questions need retrieval, and searches for passages.

    One slow decision and one search run at a time; on a search server, several searches. API keys take turns.

    Args:
        rag: The pipeline, with its LLM, gate, rules and retriever.
        timeout: Maximum seconds for one decision or search.
        strict: Whether a failed search leads to an error response. Otherwise the request is answered without passages.
        gate_spec: The gate as the user names it, such as 'logprob:first'. Default: the name of its kind.
    """

    def __init__(self, rag: AdaptiveRAG, *, timeout: float, strict: bool, gate_spec: str = ""):
        self.rag = rag
        self.gate_spec = gate_spec or rag.gate.name
        self.timeout, self.strict = timeout, strict
        self.staleness = request_options.describe_staleness(rag)
        self.limited_log = LimitedLog(log)
        self.gate_breakers, self.history_breakers = BreakersByKey("gate"), BreakersByKey("history")
        self.retriever_breakers = RetrieverBreakers()
        self.experiment: Experiment | None = None  # the A/B test, if the server learns from its requests
        self.always_gate, self.never_gate = load_gate("always"), load_gate("never")
        self._gate_thread = FairExecutor(1)
        self._text_thread = FairExecutor(1)  # for rules and long questions, which do not wait for a slow gate
        places = PARALLEL_SEARCHES if _can_search_in_parallel(rag) else 1
        self._search_threads = ThreadPoolExecutor(MAX_ABANDONED_SEARCHES + 3 * places, "knowgate-search")
        self._search_lock, self._filter_lock = FairLock(places), FairLock(places)
        # Searches of the cache do not wait for those of a search engine, unless a component in this process takes part.
        self._cache_lock = FairLock(places) if places > 1 else self._search_lock
        self.rerank_queue = RerankQueue()
        self._web_cache: WebRetriever | None = None  # searches only the cache of a web search
        web = getattr(rag.retriever, "retriever", None)
        if isinstance(web, WebRetriever):
            web.budget_seconds = 0.0  # a search that waits would delay those of other keys
            self._web_cache = web.only_cached()
        self._pipelines_by_gate: dict[str, AdaptiveRAG] = {}

    def make_closer(self) -> Callable[[], None]:
        """Return a function that ends the threads and closes the traffic log. It keeps no reference to this object."""
        pools = (self._gate_thread, self._text_thread, self._search_threads, self.rerank_queue.threads)
        traffic_log = self.rag.log

        def close() -> None:
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)
            if traffic_log is not None:
                traffic_log.close(CLOSE_SECONDS)

        return close

    # --- the pipeline of a request ----------------------------------------------------------------

    async def prepare(self, body: Mapping[str, Any], trace: RequestTrace) -> AdaptiveRAG:
        """Return the pipeline for a request. The options of the request or the A/B test select it."""
        return self.select_pipeline(await self.read_options(body, trace))

    async def read_options(self, body: Mapping[str, Any], trace: RequestTrace) -> request_options.RequestOptions:
        """Return the options of a request, with its arm of the A/B test. If they limit the loss, check for a new index."""
        options = self.assign_arm(request_options.read_request_options(body), body, trace)
        if options.max_loss is not None and options.retrieve == "auto":
            trace.max_loss = options.max_loss
            await request_options.update_fingerprint(self.rag)
        return options

    def assign_arm(
        self, options: request_options.RequestOptions, body: Mapping[str, Any], trace: RequestTrace
    ) -> request_options.RequestOptions:
        """Choose the arm (one of the gates) of the A/B test. Return the options with this arm."""
        # A request that names the server's own gate is treated as if it named none, so that alarm and shadow mode apply.
        # Gates are compared, not names, because `logprob` and the default gate of many LLMs are `logprob:first`.
        is_named = options.retrieve == "auto" and bool(options.gate)
        if is_named and self._get_named_pipeline(options.gate).gate == self.rag.gate:
            options = replace(options, gate="", arm="a")
        trace.has_own_options, trace.gate_spec = not options.is_default, self.gate_spec
        if options.filter is not None:  # without it, the LLM may know more
            trace.shares_labels = False
        return options if self.experiment is None else self.experiment.assign(options, body, trace)

    def select_pipeline(self, options: request_options.RequestOptions) -> AdaptiveRAG:
        """Return the pipeline with the gate, threshold and filter of a request.

        If the request limits the loss and the gate does not guarantee this limit, the pipeline always retrieves.
        """
        rag = self._get_named_pipeline(options.gate_name) if options.gate_name else self.rag
        if self.experiment is not None and options.arm:  # the A/B test has chosen a gate
            rag = self.experiment.arms[options.arm].get_pipeline(options.shadow)
        elif options.shadow:
            rag = rag.replace(shadow=options.shadow)  # rules cannot skip retrieval
        if rag.log is not None and not options.shares_labels:
            rag = rag.replace(log=None)  # the question must not be added to the history
        if options.threshold is not None:
            rag = rag.replace(threshold=options.threshold)
        if options.filter is not None and rag.retriever is not None:
            rag = rag.replace(retriever=request_options.FilteredRetriever(rag.retriever, options.filter))
        return request_options.require_guarantee(rag, options)

    def _get_named_pipeline(self, gate_name: str) -> AdaptiveRAG:
        """Return the pipeline with a gate that a request selects by name. Pipelines are cached.

        Raises:
            ApiError: 404 if the gate does not work with the LLM of this server.
        """
        if gate_name not in self._pipelines_by_gate:
            rag = self.rag.replace(gate=load_gate(gate_name), threshold=None)
            try:
                _ = rag.bound_gate  # checks that the gate works with the LLM
            except KnowgateError as error:
                message = f"gate '{gate_name}' does not work with this LLM. `GET /v1/models` lists the gates that do."
                raise ApiError(404, message, "model_not_found") from error
            self._pipelines_by_gate[gate_name] = rag
        return self._pipelines_by_gate[gate_name]

    def set_model(self, trace: RequestTrace, name: str, default_model: str | None) -> None:
        """Note which LLM answers a request. A request to another LLM does not count for labels and the A/B test."""
        trace.model_name = name[:MAX_MODEL_CHARS]
        model = self.rag.model
        if isinstance(model, UpstreamDraftModel) and model.differs_from(trace.model_name, default_model):
            trace.other_model = trace.model_name
            # The answers of another LLM say nothing about the gate of this server.
            trace.has_own_options, trace.shares_labels, trace.arm = True, False, ""

    def get_staleness(self, rag: AdaptiveRAG, other_model: str) -> str:
        """Return why the calibration of the gate does not apply to this LLM, prompt or index. "" means that it does.

        Args:
            rag: The pipeline.
            other_model: Name of the LLM that the request asks for, or "" if it is the LLM of this server.
        """
        # A gate loaded with `plug_in` may be used with any LLM.
        needs_own_model = isinstance(rag.gate, FittedGate) and not rag.gate.plug_in
        if needs_own_model and other_model:
            return f"the gate was fitted on {rag.model.name}, not on the LLM '{other_model}'"
        # Another gate, which the request or an A/B test selected, was checked when it was loaded.
        return self.staleness if rag.gate is self.rag.gate else ""

    def get_signal_request(self, rag: AdaptiveRAG, trace: RequestTrace) -> SignalRequest:
        """Return the LLM signals needed by the gate, such as a draft. Empty for an unusable gate.

        Args:
            rag: The pipeline with the gate.
            trace: Trace of the request.
        """
        is_stale = bool(self.get_staleness(rag, trace.other_model))
        is_unusable = is_stale or self.gate_breakers.get(trace.owner).state == "open"
        return SignalRequest() if is_unusable else rag.bound_gate.request

    # --- decisions --------------------------------------------------------------------------------

    async def apply_rules(
        self, rag: AdaptiveRAG, question: Question, shared_budget: PatternTimeBudget | None = None
    ) -> Decision | None:
        """Return the decision of the first matching rule, or None. Slow rules run in a thread.

        In shadow mode (always retrieve), rules cannot skip retrieval.

        Args:
            rag: The pipeline with the rules.
            question: The question.
            shared_budget: Time budget for the operator's regular expressions, if several questions share one. The time
                that this question takes is subtracted.
        """
        rules = rag.rules
        if rules is None:
            return None
        work = partial(rules.make_decision, question.text, rag.gate, rag.used_threshold, shared_budget)
        if rules.is_fast and _is_short(question):
            decision = work()
        else:
            try:
                decision = await self.run_in_text_thread(work)
            except TimeoutError:
                self.report_slow_rules()
                return None
        if decision is None or decision.retrieve or not rag.shadow:
            return decision
        reason = f"{rag.shadow}: {decision.reason}"
        return replace(decision, retrieve=True, reason=reason, notes=(*decision.notes, DecisionNote.WOULD_SKIP))

    async def decide(
        self, rag: AdaptiveRAG, question: Question, draft: Completion | None, trace: RequestTrace
    ) -> Decision:
        """Decide with the gate whether to retrieve. A stale, failing or slow gate means yes.

        Args:
            rag: The pipeline with the gate.
            question: The question.
            draft: The upstream's answer without passages, for a gate that reads it. Otherwise None.
            trace: Trace of the request.
        """
        trace.draft = draft
        rag = rag.without_rules  # the caller has already applied them
        if reason := self.get_staleness(rag, trace.other_model):
            return self.bypass_stale_gate(rag, trace, reason)
        if draft is not None and is_empty_draft(draft):  # such as a refusal; it may lack what the gate reads
            reason = f"the LLM may not know: {EMPTY_DRAFT_REASON}"
            trace.decision = Decision(True, EMPTY_DRAFT_NEED, rag.used_threshold, rag.gate.name, reason)
            return trace.decision
        if isinstance(rag.gate, AlwaysGate | NeverGate):  # they cannot fail, so no breaker applies to them
            trace.decision = rag.constant_decision
            return trace.decision
        return await self._decide_with_breaker(rag, question, draft, trace)

    async def _decide_with_breaker(
        self, rag: AdaptiveRAG, question: Question, draft: Completion | None, trace: RequestTrace
    ) -> Decision:
        """Run the gate, unless its circuit breaker is open. After a failure, decide to retrieve."""
        breaker = self.gate_breakers.get(trace.owner)
        if not breaker.try_acquire():
            return self.bypass_failed_gate(rag, trace, REPEATED_FAILURES)
        try:
            with use_draft(draft), trace.measure("gate"):
                trace.decision = await self._run_gate(rag, question, draft)
        except asyncio.CancelledError:
            breaker.record_cancellation()
            raise
        except Exception as error:  # noqa: BLE001 - whatever the gate raises, the question is answered
            breaker.record_failure()
            return self.bypass_failed_gate(rag, trace, get_reason(error, self.timeout))
        breaker.record_success()
        return trace.decision

    async def _run_gate(self, rag: AdaptiveRAG, question: Question, draft: Completion | None) -> Decision:
        """Let the gate decide. Slow decisions run in a separate thread."""
        calls_llm = draft is None and not rag.bound_gate.request.is_empty
        has_long_draft = draft is not None and draft.n_tokens > MAX_INLINE_TOKENS
        if rag.bound_gate.is_pure and not calls_llm and not has_long_draft and _is_short(question):
            return rag.decide(question)
        return await self.run_in_gate_thread(partial(rag.decide, question))

    def bypass_stale_gate(self, rag: AdaptiveRAG, trace: RequestTrace, reason: str) -> Decision:
        """Decide to retrieve, because the gate was calibrated for another LLM, prompt or index, as the reason says."""
        trace.degraded.append("stale calibration")
        return _fall_back(rag, trace, reason)

    def bypass_failed_gate(self, rag: AdaptiveRAG, trace: RequestTrace, reason: str) -> Decision:
        """Log that the gate failed for this reason, and decide to retrieve."""
        self.report_failed_gate(trace, reason)
        return _fall_back(rag, trace, reason)

    def report_slow_rules(self) -> None:
        """Log that the rules took too long."""
        self.limited_log.write("No rule was applied: the rules took longer than %g seconds.", self.timeout)

    def report_failed_gate(self, trace: RequestTrace, reason: str) -> None:
        """Log that the gate failed for this reason, and note it in the trace."""
        self.limited_log.write("The gate failed, so the request retrieves: %s", reason)
        trace.degraded.append("gate")

    # --- searches ---------------------------------------------------------------------------------

    async def search(self, rag: AdaptiveRAG, question: Question, trace: RequestTrace) -> tuple[Passage, ...]:
        """Return the passages for a question, or none after a failure.

        Raises:
            ApiError: 503 if the search fails and the server is strict.
        """

        def search(retriever: Retriever) -> tuple[Passage, ...]:
            # With a stage runner of its own, this search waits neither for a gate that hangs nor for an abandoned search.
            return self.rag.replace(retriever=retriever, runner=StageRunner()).retrieve(question)

        assert rag.retriever is not None  # which the caller has checked
        return await self.run_search(search, rag.retriever, trace) or ()  # the request may have its own, with a filter

    async def run_search(
        self, search: Callable[[Retriever], Result], retriever: Retriever, trace: RequestTrace
    ) -> Result | None:
        """Run a function that searches, with a time limit and a circuit breaker. A web search first reads its cache.

        Returns:
            The result of the function, or None after a failure.

        Raises:
            ApiError: 503 if the search fails and the server is strict.
        """
        is_filtered = isinstance(retriever, request_options.FilteredRetriever)
        if self._web_cache is not None and not is_filtered:
            search_cache = partial(search, self._web_cache)
            with suppress(Exception), trace.measure("retrieve"):  # also if a reranker failed: then search again
                return await self.run_in_search_thread(search_cache, self._cache_lock)
        lock = self._filter_lock if is_filtered else self._search_lock  # filtered searches wait only for each other
        owner, breakers = CLIENT.get(), self.retriever_breakers
        breaker = breakers.choose(owner, is_filtered=is_filtered)
        if not breaker.try_acquire():
            self.bypass_retriever(trace, "the retriever failed repeatedly and is not used for a while")
            return None
        try:
            with trace.measure("retrieve"):
                result = await self.run_in_search_thread(partial(search, retriever), lock)
        except (asyncio.CancelledError, ApiError):
            breaker.record_cancellation()
            raise
        except Exception as error:  # noqa: BLE001 - whatever the retriever raises, the question is answered
            breakers.record_error(owner, error, is_filtered=is_filtered)
            self.bypass_retriever(trace, get_reason(error, self.timeout))
            return None
        breakers.record_success(owner, is_filtered=is_filtered)
        return result

    def bypass_retriever(self, trace: RequestTrace, reason: str) -> None:
        """Log that a search failed for this reason.

        Raises:
            ApiError: 503 if the server is strict.
        """
        self.limited_log.write("A search failed: %s", reason)
        trace.degraded.append("retriever")
        if self.strict:
            message = "the search failed, so this request is not answered (strict mode). Try again later."
            raise ApiError(503, message, "retriever_down")

    def bypass_arbiter(self, trace: RequestTrace, error: Exception) -> None:
        """Log a failure of the arbiter, and note it in the trace. The caller continues without arbiter."""
        self.limited_log.write("The arbiter failed and is skipped: %s", get_reason(error, self.timeout))
        trace.degraded.append("arbiter")

    # --- threads ----------------------------------------------------------------------------------

    async def run_in_gate_thread(self, work: Callable[[], Result]) -> Result:
        """Run a function in the thread of the gate. Raises TimeoutError for a slow function."""
        return await run_in_thread(self._gate_thread, work, self.timeout)

    async def run_in_text_thread(self, work: Callable[[], Result]) -> Result:
        """Run a function in the thread for texts. It should handle one question only, so that API keys can take turns.

        Raises:
            TimeoutError: The function took longer than the timeout.
        """
        return await run_in_thread(self._text_thread, work, self.timeout)

    async def run_in_search_thread(self, work: Callable[[], Result], lock: FairLock | None = None) -> Result:
        """Run a search function in a thread, and return its result. A slow function cannot be stopped, only abandoned.

        Args:
            work: The function.
            lock: Functions with the same lock run one after the other, and API keys take turns. Default: the lock of searches.

        Raises:
            TimeoutError: The function took longer than the timeout, including the time that it waited for the lock.
            SearchQueueTimeout: The same, and it waited for the lock for more than half of the timeout.
        """
        lock = lock or self._search_lock
        clock = asyncio.get_running_loop().time
        latest_start = clock() + self.timeout / 2
        has_started_early = False
        try:
            async with limit_time(self.timeout) as time_limit:
                await lock.acquire()
                has_started_early = clock() <= latest_start
                return await run_in_place(lock, self._search_threads, work, time_limit)
        except TimeoutError:
            if has_started_early:
                raise
            raise SearchQueueTimeout from None

    async def run_reranker(self, reranker: Reranker, work: Callable[[], Result], time_limit: asyncio.Timeout) -> Result:
        """Rerank one batch of documents. A reranker in this process takes turns with searches."""
        if isinstance(reranker, RemoteReranker):
            return await self.rerank_queue.run_remote(work, time_limit)
        async with self.rerank_queue.local_turn:  # so that a search waits for one batch at most
            return await self.run_in_search_thread(work)


def _can_search_in_parallel(rag: AdaptiveRAG) -> bool:
    """Return whether all parts of a search run on other servers. Those in this process take one search at a time."""
    reranks_here = rag.reranker is not None and not isinstance(rag.reranker, RemoteReranker)
    retriever = getattr(rag.retriever, "retriever", rag.retriever)  # without the wrapper that caches its fingerprint
    return isinstance(retriever, HttpRetriever | WebRetriever) and not reranks_here and rag.second_look is None


def _is_short(question: Question) -> bool:
    """Return whether a question is so short that reading it does not delay other requests."""
    return get_max_normalized_length(question.text) <= MAX_INLINE_CHARS


def _fall_back(rag: AdaptiveRAG, trace: RequestTrace, reason: str) -> Decision:
    """Decide to retrieve without the gate."""
    trace.decision = make_fallback_decision(rag.gate, rag.used_threshold, reason)
    return trace.decision


def make_fallback_decision(gate: Gate, threshold: float, reason: str) -> Decision:
    """Return the decision to retrieve without the gate, for this reason."""
    return Decision(True, 1.0, threshold, gate.name, f"retrieved as a fallback: {reason}")
