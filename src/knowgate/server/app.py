"""From settings to a server whose parts are loaded and found to work together."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from knowgate.errors import BadSetting, KnowgateError
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.settings import PipelineOptions
from knowgate.server.chat.gate_service import FingerprintCachingRetriever, GateService
from knowgate.server.chat.local_chat import LocalChat
from knowgate.server.dashboard.page import build_dashboard_routes, get_dashboard
from knowgate.server.json_api import ApiError, json_response
from knowgate.server.openapi import build_docs_page, build_openapi
from knowgate.server.options import ServeOptions, load_serve_options
from knowgate.server.service import Service, clear_alarm, get_learning
from knowgate.server.streaming import ClientDisconnected, EventStreamResponse
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.server.upstream.client import UpstreamPool, parse_weighted_address
from knowgate.server.upstream.draft import UpstreamDraftModel
from knowgate.server.upstream.forwarding import UpstreamForwarder
from knowgate.types import Model


def build_service(settings: PipelineOptions, options: ServeOptions) -> Service:
    """Everything loaded and found to work together."""
    service = _build_parts(settings, options)
    service.learn(settings)
    return service


def _build_parts(settings: PipelineOptions, options: ServeOptions) -> Service:
    keeper = build_gate_service(settings, options)
    if options.upstream is None:
        return Service(options, keeper, local=LocalChat(keeper, options))
    addresses = [parse_weighted_address(written) for written in options.upstream]
    upstream = UpstreamPool(addresses, passes_keys=options.keys is None)
    return Service(options, keeper, forwarding=UpstreamForwarder(upstream, keeper, options))


def build_gate_service(settings: PipelineOptions, options: ServeOptions, model: Model | None = None) -> GateService:
    """Who decides and looks up. model: one that is loaded already."""
    if options.upstream is None:
        if options.way is not None:
            raise BadSetting("--way belongs to --upstream; a model in this process needs one pass.")
        rag = _build_rag(settings, model)
        return GateService(rag, seconds=options.gate_seconds, strict=options.strict)
    asked = model or UpstreamDraftModel(parse_weighted_address(options.upstream[0]).url, options.upstream_model)
    rag = _build_rag(settings, asked)
    keeper = GateService(rag, seconds=options.gate_seconds, strict=options.strict)
    if options.way == "question" and not keeper.want_of(rag).is_empty:
        raise BadSetting(f"gate '{rag.gate.name}' reads a draft: use --way draft or race, or a gate that reads none.")
    if rag.bound_arbiter is not None and settings.arbiter is not None and keeper.want_of(rag).is_empty:
        raise BadSetting(f"--arbiter weighs drafts, and the gate '{rag.gate.name}' reads none: leave it away.")
    return keeper


def _build_rag(settings: PipelineOptions, model: Model | None) -> AdaptiveRAG:
    rag = build_pipeline(settings, model=model)
    return rag if rag.retriever is None else rag.replace(retriever=FingerprintCachingRetriever(rag.retriever))


RELOAD_SIGNAL = getattr(signal, "SIGHUP", None)  # Windows has none
log = logging.getLogger(__name__)


class SettingsReloader:
    """read: gives the settings as they are now."""

    def __init__(self, service: Service, settings: PipelineOptions, read: Callable[[], PipelineOptions] | None):
        self.service = service
        self.settings = settings
        self._read = read
        self.loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[bool]] = set()

    def listen(self) -> None:
        """From now on, if this is a process's main thread: others hear no signals."""
        if self._read is None or RELOAD_SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
        self.loop.add_signal_handler(RELOAD_SIGNAL, self._begin)

    def _begin(self) -> None:
        task = asyncio.ensure_future(self.reload())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def reload(self) -> bool:
        """Whether the new settings hold now; where they cannot, the old ones do."""
        if self._read is None:
            return False
        async with self._turn:
            try:
                settings = await asyncio.to_thread(self._read)
                same = settings.model == self.settings.model or self.service.forwarding is not None
                model = self.service.keeper.rag.model if same else None
                keeper = await asyncio.to_thread(build_gate_service, settings, self.service.options, model)
                self._retire(self.service.take(keeper, settings))
            except KnowgateError as error:
                log.error("The settings cannot be used, so the old ones hold: %s", error)
                return False
            self.settings = settings
            log.warning("Settings were read again: gate %s.", keeper.rag.gate.name)
            return True

    def _retire(self, close: Callable[[], None]) -> None:
        """When the last request that uses it must be over."""
        self.loop.call_later(self.service.options.deadline, close)


Handler = Callable[[Service, Request, RequestTrace], Awaitable[Response]]
CLIENT_CLOSED_REQUEST = 499  # nginx's word for a client that hung up; nobody reads it


def create_app(
    settings: PipelineOptions, options: ServeOptions | None = None, read: Callable[[], PipelineOptions] | None = None
) -> Starlette:
    """The server as an ASGI application. options: instead of the settings' table [serve].

    Models, gates and indexes are loaded here; a gate that cannot work is refused here. read: gives the settings as they
    are when the process is told to read them again (SIGHUP).
    """
    service = build_service(settings, options or load_serve_options(settings))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.reloading = SettingsReloader(service, settings, read)
        app.state.reloading.listen()
        yield
        await service.close()

    def route(path: str, work: Handler, method: str = "POST") -> Route:
        return Route(path, Endpoint(service, path, work), methods=[method])

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def programs(request: Request) -> Response:
        return json_response(build_openapi())

    async def people(request: Request) -> Response:
        return HTMLResponse(build_docs_page())

    routes = [
        route("/v1/chat/completions", Service.chat),
        route("/v1/decide", Service.decide),
        *(route(f"/v1/{path}", Service.hand_on) for path in ("completions", "embeddings", "responses")),
        route("/v1/rerank", Service.rerank),
        route("/v1/feedback", Service.feedback),
        route("/v1/learning", get_learning, "GET"),
        route("/v1/learning/clear", clear_alarm),
        route("/v1/decisions/{id}", Service.decision, "GET"),
        route("/v1/decisions/{id}", Service.forget_decision, "DELETE"),
        route("/v1/forget", Service.forget),
        route("/metrics", Service.counted, "GET"),
        route("/v1/models", Service.models, "GET"),
        route("/v1/dashboard", get_dashboard, "GET"),
        *build_dashboard_routes(has_keys=service.options.keys is not None),
        Route("/health", health, methods=["GET"]),
        Route("/openapi.json", programs, methods=["GET"]),
        Route("/docs", people, methods=["GET"]),
        route("/ready", Service.ready, "GET"),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_such_page})
    app.state.service = service
    return app


@dataclass(frozen=True)
class Endpoint:
    """An ASGI application, which Starlette calls with fewer layers around it than a function."""

    service: Service
    path: str
    work: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace, request = RequestTrace(), Request(scope, receive, send)
        response = await _answered(self.service, self.work, request, trace)
        self.service.told(self.path, response, time.perf_counter() - trace.begun, trace)
        try:
            await response(scope, receive, send)
        finally:
            if trace.key is not None and self.service.meter is not None:
                await self.service.meter.spend(trace.key, request, response)
            if self.service.spans is not None:
                self.service.spans.see(request.method, self.path, response.status_code, trace, request.headers)


async def _answered(service: Service, work: Handler, request: Request, trace: RequestTrace) -> Response:
    """The reply, whatever happens. A stream counts as at work until it is over."""
    try:
        trace.key = service.door.check(request)
        if request.method == "GET":  # asked by those who watch, also when there is too much to do
            return await _worked(service, work, request, trace)
        if trace.key is not None and service.meter is not None:
            await service.meter.admit(trace.key)
        service.enter()
    except ApiError as problem:
        return problem.response
    response = None
    try:
        response = await _worked(service, work, request, trace)
        return response
    finally:
        if isinstance(response, EventStreamResponse):
            response.when_over = service.leave
        else:
            service.leave()


async def _worked(service: Service, work: Handler, request: Request, trace: RequestTrace) -> Response:
    try:
        async with asyncio.timeout(service.options.deadline):
            return await work(service, request, trace)
    except ApiError as problem:
        return problem.response
    except TimeoutError:
        return ApiError(504, "the answer was not ready in time.", "deadline", trace.headers).response
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception:
        log.exception("A request failed, id %s", trace.id)
        return ApiError(500, f"something went wrong here, id {trace.id}.", "internal", trace.headers).response


async def _no_such_page(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: f"there is no {request.url.path[:100]} here.", 405: f"{request.method} is not allowed here."}
    headers: dict[str, Any] = dict(getattr(error, "headers", None) or {})
    return json_response(ApiError(status, words.get(status, "this cannot be done.")).record, status, headers)
