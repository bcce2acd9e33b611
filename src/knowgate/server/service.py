"""The components of a running server, and the request handlers of its endpoints."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from knowgate.models.fair_executor import FairExecutor
from knowgate.pipeline.settings import PipelineOptions
from knowgate.server import json_api, load_limits, schemas
from knowgate.server.auth.access_control import AccessPolicy, RateLimiter, check_question_rate
from knowgate.server.auth.api_keys import ApiKey
from knowgate.server.chat.decisions import answer_prompt, decide_questions, rerank_documents, write_model_list
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.local_chat import LocalChat
from knowgate.server.chat.request_formats import REQUEST_FORMATS
from knowgate.server.circuit_breaker import BreakersByKey, CircuitBreaker
from knowgate.server.client_connection import EventStreamResponse, reject_unstored, run_while_connected
from knowgate.server.database import is_locked
from knowgate.server.learning.answers import delete_from_history
from knowgate.server.learning.learner import TrafficLearner, build_learner, record_feedback
from knowgate.server.load_limits import UPLOAD_FACTOR, BodyBudget, RequestSlots
from knowgate.server.options import ServeOptions
from knowgate.server.telemetry.decision_log import DecisionLog
from knowgate.server.telemetry.metrics import ServerMetrics, SharedCall
from knowgate.server.telemetry.snapshot import MetricsSnapshot, RecentDecisions, read_worker_problem
from knowgate.server.telemetry.snapshot_exchange import SnapshotExchange
from knowgate.server.telemetry.spans import RequestSpans, create_tracer_provider
from knowgate.server.telemetry.trace import ClientRequest, RequestTrace
from knowgate.server.upstream.client import MAX_ACCOUNTS
from knowgate.server.upstream.forwarded_request import ForwardedRequest
from knowgate.server.upstream.forwarding import UpstreamForwarder

PROMETHEUS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BODY_TIMEOUT_SECONDS = 30.0
# Endpoints whose requests the dashboard counts, except those without a valid API key.
ANSWER_ROUTES = tuple(f"/v1{path}" for path in REQUEST_FORMATS)
UNFINDABLE_NOTE = (
    "The decision log has comments, corrections or answers of decisions whose question was not stored, or follow-ups that "
    "an earlier version stored. They may be about this question. Delete such decisions by their id (DELETE "
    "/v1/decisions/ID); retain_days deletes them by their age."
)


@dataclass
class Service:
    """Components of a running server, and the handlers of its endpoints.

    None means a disabled component. Answers come from `forwarder` (another server) or `local_chat` (this process).
    """

    options: ServeOptions
    gate_service: GateService
    forwarder: UpstreamForwarder | None = None
    local_chat: LocalChat | None = None
    rate_limiter: RateLimiter | None = field(init=False, default=None)
    decision_log: DecisionLog | None = field(init=False, default=None)
    learner: TrafficLearner | None = field(init=False, default=None)
    snapshot: MetricsSnapshot = field(init=False, default_factory=MetricsSnapshot)
    spans: RequestSpans | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Create the components enabled by the options. Only `start_learning` creates the learner."""
        options = self.options
        # On a server with API keys, the requests of one key can use only half of the capacity, rounded up.
        max_per_client = options.waiting if options.keys is None else math.ceil(options.waiting / 2)
        self.active_requests = RequestSlots(options.waiting, max_per_client)
        self.unfinished_bodies = RequestSlots(UPLOAD_FACTOR * options.waiting, options.waiting)
        self.upload_budget = BodyBudget(load_limits.MAX_UNFINISHED_BYTES, options.largest_body)
        self.parsed_budget = BodyBudget(load_limits.MAX_PARSED_BYTES, options.largest_body)
        self._parser_thread = FairExecutor(1)  # only one, because threads that parse slow down the event loop
        self._deletion_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by name of the API key
        self._readiness = SharedCall[schemas.ReadyResponse]()
        self._model_lists: defaultdict[tuple[str, ...], SharedCall[bytes]] = defaultdict(SharedCall)  # by account
        self.access_policy, self.metrics = AccessPolicy(options), ServerMetrics(self.breakers)
        if options.otel:
            self.spans = RequestSpans(create_tracer_provider(), includes_questions=options.keep_questions)
        if options.keys is not None:
            self.rate_limiter = RateLimiter(options.keys, database=options.database)
            self.rate_limiter.check_store(self.access_policy.list_keys() or ())
        stores_texts = options.keep_questions or self.gate_service.rag.log is not None
        if options.decisions is not None:
            self.decision_log = self._open_decision_log(options.decisions, stores_keys=stores_texts)
        self.snapshot_exchange = SnapshotExchange(lambda: self.get_snapshot().model_dump_json(), self.decision_log)
        self.recent = RecentDecisions(stores_texts=stores_texts)

    def _open_decision_log(self, location: str, *, stores_keys: bool) -> DecisionLog:
        """Open the decision log in a file or database. `stores_keys`: whether to store hashes, to find questions."""
        return DecisionLog(
            location,
            stores_questions=self.options.keep_questions,
            stores_keys=stores_keys,
            retain_days=self.options.retain_days,
            on_loss=self.metrics.add_lost_decisions,
            is_shared=self.options.workers > 1,
        )

    @property
    def breakers(self) -> list[CircuitBreaker | BreakersByKey]:
        """The circuit breakers of the gate, the retriever and, if there is one, the upstream."""
        upstream_breakers = [] if self.forwarder is None else [self.forwarder.upstream.breaker]
        return [self.gate_service.gate_breakers, self.gate_service.retriever_breakers, *upstream_breakers]

    # --- lifecycle --------------------------------------------------------------------------------

    def start_learning(self, settings: PipelineOptions) -> None:
        """Create the learner (audits, A/B tests, history), if an option enables it."""
        components = (self.gate_service, self.forwarder, self.decision_log, self.recent, self.metrics.add_audit)
        self.learner = build_learner(settings, self.options, *components)

    async def replace_gate_service(self, gate_service: GateService, settings: PipelineOptions) -> Callable[[], None]:
        """Use a gate service with new settings for new requests. Requests in progress keep the old one.

        Returns:
            A function that closes the old gate service. Call it when no request uses that service any more.
        """
        forwarder = None
        if self.forwarder is not None:
            forwarder = UpstreamForwarder(self.forwarder.upstream, gate_service, self.options)
        budget = None if self.learner is None else self.learner.auditor.budget  # the new learner continues it
        components = (gate_service, forwarder, self.decision_log, self.recent, self.metrics.add_audit)
        # In a thread, so that other requests are answered meanwhile: reading many stored audits takes seconds.
        learner = await asyncio.to_thread(build_learner, settings, self.options, *components, budget)
        close_old = self.gate_service.make_closer()
        self.gate_service, self.forwarder = gate_service, forwarder
        if self.local_chat is not None:
            self.local_chat = LocalChat(gate_service, self.options)
        self.metrics.breakers = self.breakers  # those of the new gate service
        if self.learner is not None:
            self.learner.auditor.stop()
        if learner is not None:
            learner.start = time.perf_counter()
        self.learner = learner
        return close_old

    async def close(self) -> None:
        """Write all pending data, and close all components."""
        if self.learner is not None:
            await self.learner.close()
        self.gate_service.make_closer()()
        self.snapshot.times.clear()  # the counts outlive this worker, but its times are no longer the latest
        self._parser_thread.shutdown(wait=False, cancel_futures=True)
        await self.snapshot_exchange.close()
        for component in (self.decision_log, self.metrics, self.spans, self.rate_limiter):
            if component is not None:
                component.close()
        if self.forwarder is not None:
            await self.forwarder.upstream.close()

    # --- every request ----------------------------------------------------------------------------

    def get_snapshot(self) -> MetricsSnapshot:
        """Return the statistics of this process, with the number of decisions that could not be stored."""
        self.snapshot.lost_decisions = 0 if self.decision_log is None else self.decision_log.lost_count
        return self.snapshot

    async def record(self, route: str, response: Response, trace: RequestTrace) -> Response:
        """Record a request before its response is sent: decision log, audits and metrics.

        Returns:
            The response to send. With the option `durable`, this is an error if the decision could not be stored.
        """
        seconds = time.perf_counter() - trace.start
        if trace.decision is not None:
            response = await self._record_decision(route, response, trace)
        if isinstance(response, EventStreamResponse):
            trace.on_end.append(partial(self._record_stream_end, route, response, trace, seconds))
        else:
            self._count_request(route, response.status_code, seconds, seconds, trace)
        return response

    def _record_stream_end(
        self, route: str, response: EventStreamResponse, trace: RequestTrace, start_seconds: float
    ) -> None:
        """Count a stream, and replace its record if it ended in an error or came from the LLM in this process.

        The choice and the timings of that LLM are known only at the end.
        """
        seconds, status = time.perf_counter() - trace.start, response.error_status or 200
        is_local = trace.way == "in-process"
        if trace.decision is not None and (is_local or status != 200):
            record = trace.to_record(trace.model_name if is_local else self.gate_service.rag.model.name, status)
            if self.decision_log is not None:
                self.decision_log.append(record, trace.question, trace.owner, seconds, trace.question_keys)
            self.recent.append(record, trace.question, trace.owner, trace.question_keys, seconds)
        self._count_request(route, status, start_seconds, seconds if is_local else start_seconds, trace)

    def _count_request(self, route: str, status: int, start: float, seconds: float, trace: RequestTrace) -> None:
        """Add a request to the metrics. Its response started after `start` seconds, and was ready after `seconds`."""
        self.metrics.add_request(route, status, start, trace)
        has_no_key = self.options.keys is not None and not trace.owner
        is_rejected = has_no_key or (trace.client_request is None and status == 403)  # 403: not by the upstream
        if route in ANSWER_ROUTES and not is_rejected:
            self.snapshot.add_request(status, seconds, trace)
            self.snapshot_exchange.schedule_write()

    async def _record_decision(self, route: str, response: Response, trace: RequestTrace) -> Response:
        """Store a decision in the decision log, then in memory, and learn from its response. Return what to send."""
        record = trace.to_record(self.gate_service.rag.model.name, response.status_code)
        if route not in ANSWER_ROUTES:  # the application searches and answers itself
            record["only_decided"] = True
        # In this fair thread, the long questions of one key delay only its own decisions.
        if self.recent.stores_texts:
            await trace.hash_questions(self._parser_thread)
        if self.decision_log is not None:
            seconds = time.perf_counter() - trace.start
            texts = (trace.question, trace.owner, seconds, trace.question_keys)
            commit = self.decision_log.append(record, *texts)
            if self.options.durable and not await self.decision_log.wait_for_commit(
                commit, self.options.deadline - seconds
            ):
                if not commit.done() or is_locked(commit.exception()):  # the decision may still be written later
                    self.decision_log.append({**record, "status": 503}, *texts)
                return await reject_unstored(response, trace.headers)
        age = time.perf_counter() - trace.start
        self.recent.append(record, trace.question, trace.owner, trace.question_keys, age)
        if self.learner is not None and trace.client_request is not None:
            self.learner.observe(response, trace)
        return response

    async def count_requests(self, key: ApiKey | None, count: int = 1) -> None:
        """Count requests of an API key, if it has a rate.

        Raises:
            ApiError: 429 if the key has used up its requests per minute, 503 if they cannot be counted.
        """
        if key is not None and self.rate_limiter is not None and count > 0:
            await self.rate_limiter.admit(key, count)

    async def receive_body(self, request: Request, client: str) -> None:
        """Wait for the body of a request, and keep it. Slow uploads do not count as active requests.

        Raises:
            ApiError: 408, 413 or 429 if the body is too slow or too large, or if too many bodies arrive at once.
        """
        timeout = min(BODY_TIMEOUT_SECONDS, self.options.deadline / 2)
        reserve = partial(self.upload_budget.reserve, client)
        with self.unfinished_bodies.hold(client):
            request.state.body = await json_api.read_body(
                request, max_bytes=self.options.largest_body, timeout=timeout, reserve=reserve
            )

    async def read_request(
        self, request: Request, trace: RequestTrace, max_values: int = json_api.MAX_JSON_VALUES
    ) -> dict[str, Any]:
        """Return the received body of a request as a JSON object. Large ones are parsed in a thread; keys take turns."""
        raw_body: bytes = request.state.body
        if not json_api.is_large(raw_body):
            return json_api.parse_json_object(raw_body, max_values)
        run = load_limits.choose_runner(self._parser_thread, len(raw_body), max_values)
        client = load_limits.identify_client(request, request.state.key)
        with self.parsed_budget.hold(client, len(raw_body)):
            size = await run_while_connected(request, run(partial(json_api.estimate_memory, raw_body)))
        self.parsed_budget.reserve(client, size)
        trace.body_memory = size
        trace.on_end.append(partial(self.parsed_budget.reserve, client, -size))
        return await run_while_connected(request, run(partial(json_api.parse_json_object, raw_body, max_values)))

    @property
    def deadline(self) -> float:
        """Latest end of a request that starts now, as a time of the event loop's clock."""
        return asyncio.get_running_loop().time() + self.options.deadline

    # --- answers and decisions --------------------------------------------------------------------

    async def chat(self, request: Request, trace: RequestTrace) -> Response:
        """Answer POST /v1/chat/completions, with the upstream or with the model in this process."""
        body = await self.read_request(request, trace)
        trace.client_request = ClientRequest(body, request.headers)
        if self.forwarder is not None:
            forwarded = ForwardedRequest(body, request.state.body, request.headers, trace, self.deadline)
            work = self.forwarder.chat(forwarded)
        elif self.local_chat is not None:
            work = self.local_chat.chat(body, json_api.free_body(request), trace, self.deadline)
        return await run_while_connected(request, work)

    async def forward(self, request: Request, trace: RequestTrace) -> Response:
        """Answer POST /v1/completions, /v1/responses and /v1/embeddings with the upstream. No gate decides on the last.

        Raises:
            ApiError: 404 if the server has no upstream.
        """
        path = request.scope["path"].removeprefix("/v1")  # in `request.url`, it could come from the header Host
        if self.forwarder is None:
            raise json_api.make_missing_error(f"no upstream server for /v1{path}", "upstream", "no_upstream")
        max_values = json_api.MAX_JSON_VALUES if path in REQUEST_FORMATS else json_api.MAX_FORWARDED_VALUES
        body = await self.read_request(request, trace, max_values)
        json_api.parse_request(schemas.CompletionRequest if path == "/completions" else schemas.InputRequest, body)
        forwarded = ForwardedRequest(body, request.state.body, request.headers, trace, self.deadline)
        if path in REQUEST_FORMATS:
            trace.client_request = ClientRequest(body, request.headers, path)
            return await run_while_connected(request, answer_prompt(self.forwarder, forwarded, path))
        trace.ungated_reason = "the gate does not decide on requests to this endpoint"
        return await run_while_connected(request, self.forwarder.pass_through(forwarded, path))

    async def decide(self, request: Request, trace: RequestTrace) -> Response:
        """Answer POST /v1/decide, which decides on questions without answering them."""
        body = await self.read_request(request, trace)
        questions = body.get("questions")
        if isinstance(questions, list):
            check_question_rate(request.state.key, len(questions))
            await self.count_requests(request.state.key, len(questions) - 1)  # the first one is already counted
        work = decide_questions(
            self.gate_service, self.forwarder, body, json_api.free_body(request), request.headers, trace
        )
        return json_api.json_response(await run_while_connected(request, work), headers=trace.headers)

    async def rerank(self, request: Request, trace: RequestTrace) -> Response:
        """Answer POST /v1/rerank: order documents by relevance."""
        reranker = self.gate_service.rag.reranker
        if reranker is None:
            raise json_api.make_missing_error("no reranker", "rerank", "no_reranker")
        rerank_request = json_api.parse_request(schemas.RerankRequest, await self.read_request(request, trace))
        work = rerank_documents(self.gate_service, reranker, rerank_request, trace)
        return json_api.json_response(await run_while_connected(request, work))

    async def list_models(self, request: Request, trace: RequestTrace) -> Response:
        """Answer GET /v1/models with all LLMs, and knowgate/GATE for each selectable gate."""
        account = () if self.forwarder is None else self.forwarder.upstream.get_account(request.headers)
        if len(self._model_lists) == MAX_ACCOUNTS:
            self._model_lists.clear()
        content = await self._model_lists[account].run(
            partial(write_model_list, self.gate_service, self.forwarder, request.headers)
        )
        return Response(content, media_type="application/json")

    # --- the decision log -------------------------------------------------------------------------

    def _require_decision_log(self) -> DecisionLog:
        """Return the decision log. Without one, raise a 404 error."""
        if self.decision_log is None:
            raise json_api.make_missing_error("no decision log", "decisions", "no_log")
        return self.decision_log

    async def _find_decision(self, id: str, trace: RequestTrace) -> dict[str, Any]:
        """Return a decision from the decision log. If it is not there, or belongs to another key, raise a 404 error."""
        decision = await self._require_decision_log().find(id, trace.owner_filter)
        if decision is None:
            raise json_api.make_unknown_decision_error(id)
        return decision

    async def get_decision(self, request: Request, trace: RequestTrace) -> Response:
        """Answer GET /v1/decisions/{id} with a decision and its feedback."""
        decision = await self._find_decision(request.path_params["id"], trace)
        return json_api.json_response(schemas.StoredDecision.model_validate(decision))

    async def add_feedback(self, request: Request, trace: RequestTrace) -> Response:
        """Answer POST /v1/feedback, which stores a rating or correction of an answer."""
        feedback = json_api.parse_request(schemas.FeedbackRequest, await self.read_request(request, trace))
        await self._find_decision(feedback.id, trace)
        decisions = self._require_decision_log()
        return json_api.json_response(await record_feedback(feedback, trace, decisions, self.recent, self.learner))

    async def delete_decision(self, request: Request, trace: RequestTrace) -> Response:
        """Answer DELETE /v1/decisions/{id}. Other decisions on the same question stay."""
        decision = await self._find_decision(request.path_params["id"], trace)
        async with self._deletion_locks[trace.owner]:
            ids = await self._require_decision_log().delete(id=decision["id"], owner=trace.owner_filter)
            return json_api.json_response(await self._finish_deletion(ids, decision.get("question"), trace))

    async def delete_question(self, request: Request, trace: RequestTrace) -> Response:
        """Answer POST /v1/forget: delete everything about a question. Only admins delete entries of other API keys."""
        question = json_api.parse_request(schemas.DeletionRequest, await self.read_request(request, trace)).question
        async with self._deletion_locks[trace.owner]:  # one deletion of each key, because it reads many rows
            return json_api.json_response(await self._delete_question(question, trace))

    async def _delete_question(self, question: str, trace: RequestTrace) -> schemas.DeletionResponse:
        """Delete everything about a question, as far as the API key of the request may delete it."""
        owner = trace.owner_filter
        ids = self.recent.find_ids(question, owner)
        self.recent.delete(ids)
        await self.snapshot_exchange.share_deletion(question, owner)
        may_remain = False
        if self.decision_log is not None:  # has all decisions; another worker may have deleted some of those in memory
            ids = await self.decision_log.delete(question=question, owner=owner)
            may_remain = await self.decision_log.has_unfindable(owner)
        response = await self._finish_deletion(ids, question, trace)
        if may_remain:
            response.forgotten = False
            response.note = f"{response.note} {UNFINDABLE_NOTE}".strip()
        return response

    async def _finish_deletion(
        self, ids: Collection[str], question: str | None, trace: RequestTrace
    ) -> schemas.DeletionResponse:
        """Delete decisions from memory, and their question from the history. Only admins can change the history."""
        self.recent.delete(ids)
        history = self.gate_service.rag.log
        return await asyncio.to_thread(delete_from_history, history, question, trace.is_admin, len(ids))

    # --- learning and monitoring ------------------------------------------------------------------

    def _require_learner(self) -> TrafficLearner:
        """Return the component that learns from requests. Raise a 404 error without one."""
        if self.learner is None:
            raise json_api.make_missing_error("no audits to learn from", "audit", "off")
        return self.learner

    async def get_learning(self, request: Request, trace: RequestTrace) -> Response:
        """Answer GET /v1/learning with the results of audits and A/B tests."""
        results = self._require_learner().to_json(self.metrics.count_audits)
        return json_api.json_response(schemas.LearningResponse.model_validate(results))

    async def clear_alarm(self, request: Request, trace: RequestTrace) -> Response:
        """Answer POST /v1/learning/clear: clear the alarm of one gate, and restart its audits."""
        learner = self._require_learner()
        clear_request = json_api.parse_request(schemas.ClearAlarmRequest, await self.read_request(request, trace))
        await learner.auditor.clear_alarm(clear_request.arm)
        return await self.get_learning(request, trace)

    async def get_metrics(self, request: Request, trace: RequestTrace) -> Response:
        """Answer GET /metrics with all metrics in the text format of Prometheus."""
        return Response(await self.metrics.format_shared(self.learner), media_type=PROMETHEUS_CONTENT_TYPE)

    async def get_readiness(self, request: Request, trace: RequestTrace) -> Response:
        """Answer GET /ready: whether the server works, with its problems. Status 503 means not ready."""
        readiness = await self._readiness.run(self._check_readiness)
        return json_api.json_response(readiness, 200 if readiness.ready else 503)

    async def _check_readiness(self) -> schemas.ReadyResponse:
        """Return whether the server can answer requests, with its problems."""
        states = {breaker.name: breaker.state for breaker in self.breakers}
        can_read_keys = self.access_policy.list_keys() is not None
        is_ready = states.get("upstream") != "open" and can_read_keys
        lost = self.get_snapshot().combine(await self.snapshot_exchange.read_others()).lost_decisions
        problems = [f"{name} is {state}" for name, state in states.items() if state != "closed"]
        problems += [f"{lost} decisions could not be stored"] * bool(lost)
        if not can_read_keys:
            problems.append("the file of API keys cannot be read")
        problems += self._list_component_problems()
        gate, stale = self.gate_service.rag.gate.name, self.gate_service.staleness
        return schemas.ReadyResponse(
            ready=is_ready, breakers=states, gate=gate, stale=stale, degraded=problems, lost_decisions=lost
        )

    def _list_component_problems(self) -> list[str]:
        """Return the problems of the rate limiter, the learner and the worker processes."""
        limiter_problem = "" if self.rate_limiter is None else self.rate_limiter.problem
        learner_problems = [] if self.learner is None else self.learner.list_problems()
        problems = [limiter_problem, *learner_problems, read_worker_problem()]
        return [problem for problem in problems if problem]  # "" stands for no problem
