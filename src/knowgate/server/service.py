"""What the server does, one method for each address. Knows requests; the ways of a chat are in files of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from knowgate.doors import user_path
from knowgate.errors import BadSetting
from knowgate.history import HistoryStore
from knowgate.pipeline import Settings, build_pipeline
from knowgate.server.answering import answer_prompt
from knowgate.server.bodies import read_body, read_flag, read_object
from knowgate.server.breaker import Breaker
from knowgate.server.deciding import decide_questions
from knowgate.server.decision_log import DecisionLog
from knowgate.server.doorkeeper import Doorkeeper
from knowgate.server.drafts import AskedModel
from knowgate.server.forgetting import forget_in, question_to_forget
from knowgate.server.forwarding import Exchange, Forwarding
from knowgate.server.gatekeeper import Gatekeeper
from knowgate.server.limits import Meter
from knowgate.server.local_chat import LocalChat
from knowgate.server.metrics import Metrics
from knowgate.server.options import ServeOptions
from knowgate.server.policy import NAMEABLE, PREFIX
from knowgate.server.problems import Problem, json_response
from knowgate.server.prompts import FORMS
from knowgate.server.reranking import rank, read_request
from knowgate.server.spans import Spans, open_provider
from knowgate.server.streaming import while_connected
from knowgate.server.trace import Trace
from knowgate.server.upstreams import Upstreams, read_address
from knowgate.types import Model

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
    meter: Meter | None = field(init=False, default=None)
    spans: Spans | None = field(init=False, default=None)
    at_work: int = 0

    def __post_init__(self) -> None:
        self.door, self.metrics = Doorkeeper(self.options), Metrics(self.breakers)
        if self.options.otel:
            self.spans = Spans(open_provider(), keeps_questions=self.options.keep_questions)
        if self.door.file is not None:
            self.meter = Meter(self.door.file)
        if self.options.decisions is not None:
            path = user_path(self.options.decisions)
            self.log = DecisionLog(path, keeps_questions=self.options.keep_questions)

    def take(self, keeper: Gatekeeper) -> Callable[[], None]:
        """From now on this one decides; what is under way keeps the old one, which the caller closes when it can."""
        before, self.keeper = self.keeper, keeper
        if self.forwarding is not None:
            self.forwarding = Forwarding(self.forwarding.upstream, keeper, self.options)
        if self.local is not None:
            self.local = LocalChat(keeper, self.options)
        self.metrics.breakers = self.breakers
        return before.close

    async def close(self) -> None:
        self.keeper.close()
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
        """{"id": of a decision, "rating": "up" or "down", "comment": a text}."""
        _, body = await self.body(request)
        id, rating, comment = body.get("id"), body.get("rating"), body.get("comment")
        if not isinstance(id, str) or rating not in ("up", "down") or not isinstance(comment, str | None):
            raise Problem(400, "give 'id', 'rating' (up or down), and perhaps a 'comment'.", "invalid_feedback")
        if not await self._log.rate(id, rating, comment):
            raise Problem(404, "there is no such decision.", "no_decision")
        return json_response({"id": id, "rating": rating})

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
        return Response(self.metrics.text, media_type="text/plain; version=0.0.4; charset=utf-8")

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
        if self.log is not None and trace.decision is not None:
            self.log.put(trace.record, trace.question)

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


def build_service(settings: Settings, options: ServeOptions) -> Service:
    """Everything loaded and found to work together."""
    keeper = build_keeper(settings, options)
    if options.upstream is None:
        return Service(options, keeper, local=LocalChat(keeper, options))
    addresses = [read_address(written) for written in options.upstream]
    upstream = Upstreams(addresses, passes_keys=options.keys is None)
    return Service(options, keeper, forwarding=Forwarding(upstream, keeper, options))


def build_keeper(settings: Settings, options: ServeOptions, model: Model | None = None) -> Gatekeeper:
    """Who decides and looks up. model: one that is loaded already."""
    if options.upstream is None:
        if options.way is not None:
            raise BadSetting("--way belongs to --upstream; a model in this process needs one pass.")
        rag = build_pipeline(settings, model=model)
        return Gatekeeper(rag, seconds=options.gate_seconds, strict=options.strict)
    if settings.log is not None:
        raise BadSetting("--log does not work with --upstream yet: leave it away.")
    asked = model or AskedModel(read_address(options.upstream[0]).url, options.upstream_model)
    rag = build_pipeline(settings, model=asked)
    keeper = Gatekeeper(rag, seconds=options.gate_seconds, strict=options.strict)
    if options.way == "question" and not keeper.want_of(rag).is_nothing:
        raise BadSetting(f"gate '{rag.gate.name}' reads a draft: use --way draft or race, or a gate that reads none.")
    if rag.weighing is not None and settings.arbiter is not None and keeper.want_of(rag).is_nothing:
        raise BadSetting(f"--arbiter weighs drafts, and the gate '{rag.gate.name}' reads none: leave it away.")
    return keeper
