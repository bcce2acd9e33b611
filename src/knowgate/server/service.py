"""What the server does, one method for each address. Knows requests; the ways of a chat are in files of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from knowgate.history import HistoryStore
from knowgate.pipeline import Settings
from knowgate.server.answering import answer_prompt
from knowgate.server.bodies import read_body, read_flag, read_object
from knowgate.server.breaker import Breaker
from knowgate.server.deciding import decide_questions
from knowgate.server.decision_log import DecisionLog
from knowgate.server.doorkeeper import Doorkeeper
from knowgate.server.figures import Figures
from knowgate.server.forgetting import forget_in, question_to_forget
from knowgate.server.forwarding import Exchange, Forwarding
from knowgate.server.gatekeeper import Gatekeeper
from knowgate.server.learning.build import build_learner
from knowgate.server.learning.feedback import read_feedback, take_feedback
from knowgate.server.learning.gauges import gauges_text
from knowgate.server.learning.kept import forget_texts
from knowgate.server.learning.learner import Learner
from knowgate.server.limits import Meter
from knowgate.server.local_chat import LocalChat
from knowgate.server.metrics import Metrics
from knowgate.server.options import ServeOptions
from knowgate.server.policy import NAMEABLE, PREFIX
from knowgate.server.problems import Problem, json_response
from knowgate.server.prompts import FORMS
from knowgate.server.recent import Recent
from knowgate.server.reranking import rank, read_request
from knowgate.server.spans import Spans, open_provider
from knowgate.server.streaming import while_connected
from knowgate.server.together import Together
from knowgate.server.trace import Asked, Trace

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
ARRIVE = 30.0  # seconds until a request is there, of those it has


@dataclass
class Service:
    """The parts of a running server. forwarding: with an upstream; local: without one."""

    options: ServeOptions
    keeper: Gatekeeper
    forwarding: Forwarding | None = None
    local: LocalChat | None = None

    door: Doorkeeper = field(init=False)
    metrics: Metrics = field(init=False)
    log: DecisionLog | None = field(init=False, default=None)
    recent: Recent = field(init=False)
    learner: Learner | None = field(init=False, default=None)
    figures: Figures = field(default_factory=Figures)
    together: Together = field(init=False)
    meter: Meter | None = field(init=False, default=None)
    spans: Spans | None = field(init=False, default=None)
    at_work: int = 0

    def __post_init__(self) -> None:
        self.door, self.metrics = Doorkeeper(self.options), Metrics(self.breakers)
        if self.options.otel:
            self.spans = Spans(open_provider(), keeps_questions=self.options.keep_questions)
        if self.door.file is not None:
            self.meter = Meter(self.door.file, database=self.options.database)
        if self.options.decisions is not None:
            self.log = DecisionLog(self.options.decisions, keeps_questions=self.options.keep_questions)
        self.together = Together(lambda: self.figures.told(), self.log)
        self.recent = Recent(keeps_texts=self.options.keep_questions or self.keeper.rag.log is not None)

    def learn(self, settings: Settings) -> None:
        """Learn from traffic, as far as that is switched on."""
        self.learner = build_learner(settings, self.options, self.keeper, self.forwarding, self.log, self.recent)

    def take(self, keeper: Gatekeeper, settings: Settings) -> Callable[[], None]:
        """From now on this one decides; what is under way keeps the old one, which the caller closes when it can."""
        forwarding = self.forwarding and Forwarding(self.forwarding.upstream, keeper, self.options)
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
        raw = await read_body(request, self.options.largest_body, min(ARRIVE, self.options.deadline / 2))
        return raw, read_object(raw)

    async def chat(self, request: Request, trace: Trace) -> Response:
        raw, body = await self.body(request)
        trace.asked = Asked(body, request.headers)
        if self.forwarding is not None:
            work = self.forwarding.chat(Exchange(body, raw, request.headers, trace, self.until))
        elif self.local is not None:
            work = self.local.chat(body, trace, self.until)
        return await while_connected(request, work)

    @property
    def until(self) -> float:
        return asyncio.get_running_loop().time() + self.options.deadline

    async def hand_on(self, request: Request, trace: Trace) -> Response:
        """What is the upstream's alone; decided on where it is a plain question."""
        if self.forwarding is None:
            raise Problem(404, f"{request.url.path} is an upstream's: start with --upstream.", "no_upstream")
        raw, body = await self.body(request)
        read_flag(body, "stream")
        exchange = Exchange(body, raw, request.headers, trace, self.until)
        path = request.url.path.removeprefix("/v1")
        if path in FORMS:
            trace.asked = Asked(body, request.headers, path)
            return await while_connected(request, answer_prompt(self.forwarding, exchange, path))
        trace.ungated = "nothing is decided about such requests"
        return await while_connected(request, self.forwarding.hand_on(exchange, path))

    async def rerank(self, request: Request, trace: Trace) -> Response:
        reranker = self.keeper.rag.reranker
        if reranker is None:
            raise Problem(404, "there is no reranker here: start with --rerank.", "no_reranker")
        wanted = read_request((await self.body(request))[1])
        return json_response(await self.keeper.beside(lambda: rank(reranker, wanted, trace.id)))

    async def decision(self, request: Request, trace: Trace) -> Response:
        found = await self._log.find(request.path_params["id"])
        if found is None:
            raise Problem(404, "there is no such decision.", "no_decision")
        return json_response(found)

    async def feedback(self, request: Request, trace: Trace) -> Response:
        """{"id": of a decision, "rating": "up" or "down", "comment": a text, "correction": the right answer}."""
        _, body = await self.body(request)
        return json_response(await take_feedback(read_feedback(body), self._log, self.recent, self.learner))

    async def forget_decision(self, request: Request, trace: Trace) -> Response:
        """A decision, and where its question was kept all else that is known of that question."""
        found = await self._log.find(request.path_params["id"])
        if found is None:
            raise Problem(404, "there is no such decision.", "no_decision")
        ids = await self._log.forget(id=found["id"], question=found.get("question", ""))
        return json_response(await self._forgotten(ids, found.get("question")))

    async def forget(self, request: Request, trace: Trace) -> Response:
        """{"question": its text}."""
        question = question_to_forget((await self.body(request))[1])
        ids = await self.log.forget(question=question) if self.log is not None else []
        return json_response(await self._forgotten(ids, question))

    async def _forgotten(self, ids: list[str], question: str | None) -> dict[str, Any]:
        gone = 0 if question is None else await asyncio.to_thread(forget_in, self.histories, question)
        self.recent.forget(ids)
        if self.log is not None:
            await forget_texts(self.log, ids)
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
            raise Problem(404, "decisions are not kept here: start with --decisions FILE.", "no_log")
        return self.log

    async def counted(self, request: Request, trace: Trace) -> Response:
        return Response(
            self.metrics.text + gauges_text(self.learner), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def enter(self) -> None:
        """One request more; refused where too many are at work."""
        if self.at_work >= self.options.waiting:
            raise Problem(429, "too many requests at once; try again in a moment.", "busy", {"retry-after": "1"})
        self.at_work += 1

    def leave(self) -> None:
        self.at_work -= 1

    def told(self, route: str, response: Response, seconds: float, trace: Trace) -> None:
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

    async def decide(self, request: Request, trace: Trace) -> Response:
        _, body = await self.body(request)
        work = decide_questions(self.keeper, self.forwarding, body, request.headers, trace)
        return json_response(await while_connected(request, work), headers=trace.headers)

    async def models(self, request: Request, trace: Trace) -> Response:
        cards: list[Mapping[str, Any]] = []
        if self.forwarding is not None:
            cards += await self.forwarding.upstream.models(request.headers)
        else:
            cards.append(_card(self.keeper.rag.model.name))
        cards += [_card(PREFIX), *(_card(f"{PREFIX}/{name}") for name in NAMEABLE)]
        return json_response({"object": "list", "data": cards})

    async def ready(self, request: Request, trace: Trace) -> Response:
        """Whether a question would be answered as it should; what is in the way, where it would not."""
        breakers = {one.name: one.state for one in self.breakers}
        is_down = self.forwarding is not None and self.forwarding.upstream.is_down
        wrong = [f"{name} is {state}" for name, state in breakers.items() if state != "closed"]
        record = {"ready": not is_down, "breakers": breakers}
        record |= {"gate": self.keeper.rag.gate.name, "stale": self.keeper.stale, "degraded": wrong}
        return json_response(record, 200 if record["ready"] else 503)

    @property
    def breakers(self) -> list[Breaker]:
        found = [self.keeper.gate_breaker, self.keeper.retriever_breaker]
        return [*found, *self.forwarding.upstream.breakers] if self.forwarding is not None else found


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "knowgate"}
