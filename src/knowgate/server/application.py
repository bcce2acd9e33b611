"""The application: which address does what. Each request gets a trace, a deadline, and an answer whatever happens."""

from __future__ import annotations

import asyncio
import logging
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

from knowgate.pipeline import Settings
from knowgate.server.building import build_service
from knowgate.server.dashboard import dashboard, dashboard_routes
from knowgate.server.learning.addresses import clear_alarm, learning
from knowgate.server.openapi import openapi, page
from knowgate.server.options import ServeOptions, serve_options
from knowgate.server.problems import Problem, json_response
from knowgate.server.reloading import Reloading
from knowgate.server.service import Service
from knowgate.server.streaming import HungUp, Streamed
from knowgate.server.trace import Trace

log = logging.getLogger(__name__)
Work = Callable[[Service, Request, Trace], Awaitable[Response]]
NOBODY = 499  # nginx's word for a client that hung up; nobody reads it


def create_app(
    settings: Settings, options: ServeOptions | None = None, read: Callable[[], Settings] | None = None
) -> Starlette:
    """The server as an ASGI application. options: instead of the settings' table [serve].

    Models, gates and indexes are loaded here; a gate that cannot work is refused here. read: gives the settings as they
    are when the process is told to read them again (SIGHUP).
    """
    service = build_service(settings, options or serve_options(settings))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.reloading = Reloading(service, settings, read)
        app.state.reloading.listen()
        yield
        await service.close()

    def route(path: str, work: Work, method: str = "POST") -> Route:
        return Route(path, Endpoint(service, path, work), methods=[method])

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def programs(request: Request) -> Response:
        return json_response(openapi())

    async def people(request: Request) -> Response:
        return HTMLResponse(page())

    routes = [
        route("/v1/chat/completions", Service.chat),
        route("/v1/decide", Service.decide),
        *(route(f"/v1/{path}", Service.hand_on) for path in ("completions", "embeddings", "responses")),
        route("/v1/rerank", Service.rerank),
        route("/v1/feedback", Service.feedback),
        route("/v1/learning", learning, "GET"),
        route("/v1/learning/clear", clear_alarm),
        route("/v1/decisions/{id}", Service.decision, "GET"),
        route("/v1/decisions/{id}", Service.forget_decision, "DELETE"),
        route("/v1/forget", Service.forget),
        route("/metrics", Service.counted, "GET"),
        route("/v1/models", Service.models, "GET"),
        route("/v1/dashboard", dashboard, "GET"),
        *dashboard_routes(has_keys=service.options.keys is not None),
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
    work: Work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace, request = Trace(), Request(scope, receive, send)
        response = await _answered(self.service, self.work, request, trace)
        self.service.told(self.path, response, time.perf_counter() - trace.begun, trace)
        try:
            await response(scope, receive, send)
        finally:
            if trace.key is not None and self.service.meter is not None:
                await self.service.meter.spend(trace.key, request, response)
            if self.service.spans is not None:
                self.service.spans.see(request.method, self.path, response.status_code, trace, request.headers)


async def _answered(service: Service, work: Work, request: Request, trace: Trace) -> Response:
    """The reply, whatever happens. A stream counts as at work until it is over."""
    try:
        trace.key = service.door.check(request)
        if request.method == "GET":  # asked by those who watch, also when there is too much to do
            return await _worked(service, work, request, trace)
        if trace.key is not None and service.meter is not None:
            await service.meter.admit(trace.key)
        service.enter()
    except Problem as problem:
        return problem.response
    response = None
    try:
        response = await _worked(service, work, request, trace)
        return response
    finally:
        if isinstance(response, Streamed):
            response.when_over = service.leave
        else:
            service.leave()


async def _worked(service: Service, work: Work, request: Request, trace: Trace) -> Response:
    try:
        async with asyncio.timeout(service.options.deadline):
            return await work(service, request, trace)
    except Problem as problem:
        return problem.response
    except TimeoutError:
        return Problem(504, "the answer was not ready in time.", "deadline", trace.headers).response
    except HungUp:
        return Response(status_code=NOBODY)
    except Exception:
        log.exception("A request failed, id %s", trace.id)
        return Problem(500, f"something went wrong here, id {trace.id}.", "internal", trace.headers).response


async def _no_such_page(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: f"there is no {request.url.path[:100]} here.", 405: f"{request.method} is not allowed here."}
    headers: dict[str, Any] = dict(getattr(error, "headers", None) or {})
    return json_response(Problem(status, words.get(status, "this cannot be done.")).record, status, headers)
