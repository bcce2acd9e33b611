"""What the server does, one method for each address. Knows requests; the ways of a chat are in files of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from knowgate.data.history.entries import HistoryStore, question_key
from knowgate.pipeline.settings import PipelineOptions
from knowgate.retrieval.rerankers import rerank
from knowgate.server.auth.access_control import AccessPolicy, RateLimiter
from knowgate.server.chat.decisions import answer_prompt, decide_questions
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.local_chat import LocalChat
from knowgate.server.chat.request_formats import REQUEST_FORMATS
from knowgate.server.chat.request_options import MODEL_PREFIX, SELECTABLE_GATES
from knowgate.server.circuit_breaker import CircuitBreaker
from knowgate.server.json_api import ApiError, json_response, parse_json_object, read_body, read_bool
from knowgate.server.learning.audit import delete_audit_texts
from knowgate.server.learning.learner import TrafficLearner, build_learner, read_feedback, record_feedback
from knowgate.server.options import ServeOptions
from knowgate.server.streaming import run_while_connected
from knowgate.server.telemetry.decision_log import DecisionLog, RecentDecisions
from knowgate.server.telemetry.metrics import ServerMetrics, format_learning_metrics
from knowgate.server.telemetry.snapshot import MetricsSnapshot, SnapshotExchange
from knowgate.server.telemetry.spans import RequestSpans, create_tracer_provider
from knowgate.server.telemetry.trace import ClientRequest, RequestTrace
from knowgate.server.upstream.forwarding import ForwardedRequest, UpstreamForwarder
from knowgate.types import Passage, Reranker


def read_deletion_request(body: Mapping[str, Any]) -> str:
    question = body.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ApiError(400, "'question' must be the text of a question.", "invalid_question")
    return question


def delete_from_histories(stores: Sequence[HistoryStore], question: str) -> int:
    """How many entries are gone."""
    key = question_key(question)
    return sum(store.forget(ids=store.find_ids(key)) for store in stores)


MAX_DOCUMENTS = 1000  # documents of one request


@dataclass(frozen=True)
class RerankRequest:
    query: str
    texts: list[str]
    top: int
    shows_documents: bool


def read_rerank_request(body: Mapping[str, Any]) -> RerankRequest:
    query, documents = body.get("query"), body.get("documents")
    if not isinstance(query, str) or not query.strip():
        raise ApiError(400, "'query' must be a text that says something.", "invalid_query")
    if not isinstance(documents, list) or not 1 <= len(documents) <= MAX_DOCUMENTS:
        raise ApiError(400, f"'documents' must be a list of 1 to {MAX_DOCUMENTS} documents.", "invalid_documents")
    given = [one.get("text") if isinstance(one, dict) else one for one in documents]
    texts = [text for text in given if isinstance(text, str)]
    if len(texts) < len(given):
        raise ApiError(400, "a document must be a text, or an object with a 'text'.", "invalid_documents")
    top = body.get("top_n", len(texts))
    if not isinstance(top, int) or isinstance(top, bool) or top < 1:
        raise ApiError(400, "'top_n' must be a whole number of at least 1.", "invalid_type")
    return RerankRequest(query, texts, top, bool(body.get("return_documents")))


def rerank_documents(reranker: Reranker, request: RerankRequest, id: str) -> dict[str, Any]:
    passages = [Passage(str(number), text) for number, text in enumerate(request.texts)]
    (best,) = rerank(reranker, [request.query], [passages], request.top)
    return {"id": id, "model": reranker.name, "results": [_result(one, request.shows_documents) for one in best]}


def _result(passage: Passage, shows_document: bool) -> dict[str, Any]:
    found = {"index": int(passage.id), "relevance_score": passage.score}
    return {**found, "document": {"text": passage.text}} if shows_document else found


PROMETHEUS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BODY_TIMEOUT_SECONDS = 30.0  # seconds until a request is there, of those it has


@dataclass
class Service:
    """The parts of a running server. forwarding: with an upstream; local: without one."""

    options: ServeOptions
    keeper: GateService
    forwarding: UpstreamForwarder | None = None
    local: LocalChat | None = None

    door: AccessPolicy = field(init=False)
    metrics: ServerMetrics = field(init=False)
    log: DecisionLog | None = field(init=False, default=None)
    recent: RecentDecisions = field(init=False)
    learner: TrafficLearner | None = field(init=False, default=None)
    figures: MetricsSnapshot = field(default_factory=MetricsSnapshot)
    together: SnapshotExchange = field(init=False)
    meter: RateLimiter | None = field(init=False, default=None)
    spans: RequestSpans | None = field(init=False, default=None)
    at_work: int = 0

    def __post_init__(self) -> None:
        self.door, self.metrics = AccessPolicy(self.options), ServerMetrics(self.breakers)
        if self.options.otel:
            self.spans = RequestSpans(create_tracer_provider(), keeps_questions=self.options.keep_questions)
        if self.door.file is not None:
            self.meter = RateLimiter(self.door.file, database=self.options.database)
        if self.options.decisions is not None:
            self.log = DecisionLog(self.options.decisions, keeps_questions=self.options.keep_questions)
        self.together = SnapshotExchange(lambda: self.figures.told(), self.log)
        self.recent = RecentDecisions(keeps_texts=self.options.keep_questions or self.keeper.rag.log is not None)

    def learn(self, settings: PipelineOptions) -> None:
        """Learn from traffic, as far as that is switched on."""
        self.learner = build_learner(settings, self.options, self.keeper, self.forwarding, self.log, self.recent)

    def take(self, keeper: GateService, settings: PipelineOptions) -> Callable[[], None]:
        """From now on this one decides; what is under way keeps the old one, which the caller closes when it can."""
        forwarding = self.forwarding and UpstreamForwarder(self.forwarding.upstream, keeper, self.options)
        learner = build_learner(settings, self.options, keeper, forwarding, self.log, self.recent)
        before, self.keeper, self.forwarding = self.keeper, keeper, forwarding
        if self.local is not None:
            self.local = LocalChat(keeper, self.options)
        self.metrics.breakers = self.breakers
        if self.learner is not None:
            self.learner.auditor.stop()
        self.learner = learner
        return before.close

    async def close(self) -> None:
        if self.learner is not None:
            await self.learner.close()
        self.keeper.close()
        await self.together.close()
        if self.log is not None:
            self.log.close()
        self.metrics.close()
        if self.spans is not None:
            self.spans.close()
        if self.meter is not None:
            self.meter.close()
        if self.forwarding is not None:
            await self.forwarding.upstream.close()

    async def body(self, request: Request) -> tuple[bytes, dict[str, Any]]:
        raw = await read_body(request, self.options.largest_body, min(BODY_TIMEOUT_SECONDS, self.options.deadline / 2))
        return raw, parse_json_object(raw)

    async def chat(self, request: Request, trace: RequestTrace) -> Response:
        raw, body = await self.body(request)
        trace.asked = ClientRequest(body, request.headers)
        if self.forwarding is not None:
            work = self.forwarding.chat(ForwardedRequest(body, raw, request.headers, trace, self.until))
        elif self.local is not None:
            work = self.local.chat(body, trace, self.until)
        return await run_while_connected(request, work)

    @property
    def until(self) -> float:
        return asyncio.get_running_loop().time() + self.options.deadline

    async def hand_on(self, request: Request, trace: RequestTrace) -> Response:
        """What is the upstream's alone; decided on where it is a plain question."""
        if self.forwarding is None:
            raise ApiError(404, f"{request.url.path} is an upstream's: start with --upstream.", "no_upstream")
        raw, body = await self.body(request)
        read_bool(body, "stream")
        exchange = ForwardedRequest(body, raw, request.headers, trace, self.until)
        path = request.url.path.removeprefix("/v1")
        if path in REQUEST_FORMATS:
            trace.asked = ClientRequest(body, request.headers, path)
            return await run_while_connected(request, answer_prompt(self.forwarding, exchange, path))
        trace.ungated = "nothing is decided about such requests"
        return await run_while_connected(request, self.forwarding.hand_on(exchange, path))

    async def rerank(self, request: Request, trace: RequestTrace) -> Response:
        reranker = self.keeper.rag.reranker
        if reranker is None:
            raise ApiError(404, "there is no reranker here: start with --rerank.", "no_reranker")
        wanted = read_rerank_request((await self.body(request))[1])
        return json_response(await self.keeper.beside(lambda: rerank_documents(reranker, wanted, trace.id)))

    async def decision(self, request: Request, trace: RequestTrace) -> Response:
        found = await self._log.find(request.path_params["id"])
        if found is None:
            raise ApiError(404, "there is no such decision.", "no_decision")
        return json_response(found)

    async def feedback(self, request: Request, trace: RequestTrace) -> Response:
        """{"id": of a decision, "rating": "up" or "down", "comment": a text, "correction": the right answer}."""
        _, body = await self.body(request)
        return json_response(await record_feedback(read_feedback(body), self._log, self.recent, self.learner))

    async def forget_decision(self, request: Request, trace: RequestTrace) -> Response:
        """A decision, and where its question was kept all else that is known of that question."""
        found = await self._log.find(request.path_params["id"])
        if found is None:
            raise ApiError(404, "there is no such decision.", "no_decision")
        ids = await self._log.forget(id=found["id"], question=found.get("question", ""))
        return json_response(await self._forgotten(ids, found.get("question")))

    async def forget(self, request: Request, trace: RequestTrace) -> Response:
        """{"question": its text}."""
        question = read_deletion_request((await self.body(request))[1])
        ids = await self.log.forget(question=question) if self.log is not None else []
        return json_response(await self._forgotten(ids, question))

    async def _forgotten(self, ids: list[str], question: str | None) -> dict[str, Any]:
        gone = 0 if question is None else await asyncio.to_thread(delete_from_histories, self.histories, question)
        self.recent.forget(ids)
        if self.log is not None:
            await delete_audit_texts(self.log, ids)
        return {"forgotten": True, "decisions": len(ids), "history": gone}

    @property
    def histories(self) -> list[HistoryStore]:
        """What gates learn from, with all that waits to be written into it."""
        kept = self.keeper.rag.log
        if kept is not None:
            kept.close()
        return [] if kept is None else [kept.store]

    @property
    def _log(self) -> DecisionLog:
        if self.log is None:
            raise ApiError(404, "decisions are not kept here: start with --decisions FILE.", "no_log")
        return self.log

    async def counted(self, request: Request, trace: RequestTrace) -> Response:
        return Response(
            self.metrics.text + format_learning_metrics(self.learner),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    def enter(self) -> None:
        """One request more; refused where too many are at work."""
        if self.at_work >= self.options.waiting:
            raise ApiError(429, "too many requests at once; try again in a moment.", "busy", {"retry-after": "1"})
        self.at_work += 1

    def leave(self) -> None:
        self.at_work -= 1

    def told(self, route: str, response: Response, seconds: float, trace: RequestTrace) -> None:
        """What became of a request is counted, and kept if that is wanted."""
        self.metrics.see(route, response.status_code, seconds, trace)
        if trace.asked is not None:
            self.figures.see(route, response.status_code, seconds, trace)
            self.together.note()
        if trace.decision is None:
            return
        record = trace.record
        self.recent.see(record, trace.question)
        if self.learner is not None and trace.asked is not None:
            self.learner.see(response, trace)
        if self.log is not None:
            self.log.put({**record, "model": self.keeper.rag.model.name}, trace.question)

    async def decide(self, request: Request, trace: RequestTrace) -> Response:
        _, body = await self.body(request)
        work = decide_questions(self.keeper, self.forwarding, body, request.headers, trace)
        return json_response(await run_while_connected(request, work), headers=trace.headers)

    async def models(self, request: Request, trace: RequestTrace) -> Response:
        cards: list[Mapping[str, Any]] = []
        if self.forwarding is not None:
            cards += await self.forwarding.upstream.models(request.headers)
        else:
            cards.append(_card(self.keeper.rag.model.name))
        cards += [_card(MODEL_PREFIX), *(_card(f"{MODEL_PREFIX}/{name}") for name in SELECTABLE_GATES)]
        return json_response({"object": "list", "data": cards})

    async def ready(self, request: Request, trace: RequestTrace) -> Response:
        """Whether a question would be answered as it should; what is in the way, where it would not."""
        breakers = {one.name: one.state for one in self.breakers}
        is_down = self.forwarding is not None and self.forwarding.upstream.is_down
        wrong = [f"{name} is {state}" for name, state in breakers.items() if state != "closed"]
        record = {"ready": not is_down, "breakers": breakers}
        record |= {"gate": self.keeper.rag.gate.name, "stale": self.keeper.stale, "degraded": wrong}
        return json_response(record, 200 if record["ready"] else 503)

    @property
    def breakers(self) -> list[CircuitBreaker]:
        found = [self.keeper.gate_breaker, self.keeper.retriever_breaker]
        return [*found, *self.forwarding.upstream.breakers] if self.forwarding is not None else found


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "knowgate"}


async def get_learning(service: Service, request: Request, trace: RequestTrace) -> Response:
    return json_response(_learner(service).record)


async def clear_alarm(service: Service, request: Request, trace: RequestTrace) -> Response:
    """{"arm": "a" or "b"}."""
    learner = _learner(service)
    _, body = await service.body(request)
    await learner.auditor.clear(str(body.get("arm", "a")))
    return json_response(learner.record)


def _learner(service: Service) -> TrafficLearner:
    if service.learner is None:
        raise ApiError(404, "nothing is learnt from traffic here: start with --audit, --shadow or --log.", "off")
    return service.learner
