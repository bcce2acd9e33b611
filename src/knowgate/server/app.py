"""The ASGI application of the server: creates its components, processes requests, and reloads settings."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from knowgate.core.redaction import redact_urls
from knowgate.errors import BadSetting, KnowgateError
from knowgate.gates import DEFAULT_GATE
from knowgate.models.fair_executor import CLIENT
from knowgate.pipeline.builder import build_pipeline, load_gate_models, load_search_models
from knowgate.pipeline.settings import PipelineOptions
from knowgate.retrieval.engines.web import WebRetriever
from knowgate.server.auth.api_keys import ApiKey
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.local_chat import LocalChat
from knowgate.server.chat.request_options import FingerprintCachingRetriever
from knowgate.server.circuit_breaker import guard_topics
from knowgate.server.client_connection import DisconnectError
from knowgate.server.dashboard.page import DashboardAssets
from knowgate.server.endpoints import ENDPOINTS, Endpoint
from knowgate.server.json_api import ApiError
from knowgate.server.load_limits import collect_large_garbage, identify_client, share_processor
from knowgate.server.options import ServeOptions, load_serve_options
from knowgate.server.service import Service
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.server.upstream.client import UpstreamClient
from knowgate.server.upstream.draft import UpstreamDraftModel, arbiter_makes_drafts, is_reachable
from knowgate.server.upstream.forwarding import UpstreamForwarder
from knowgate.server.worker_supervisor import RELOAD_SIGNAL
from knowgate.types import Gate, Model, Signal

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected. It appears in metrics, but is never sent.
CLEANUP_SECONDS = 3600.0  # interval at which old data is deleted
ERASE_SECONDS = 10.0  # interval at which copies of deleted decisions are erased
BREAKER_SECONDS = 1.0
MEMORY_SECONDS = 10.0


def create_app(
    settings: PipelineOptions,
    options: ServeOptions | None = None,
    read_settings: Callable[[], PipelineOptions] | None = None,
) -> Starlette:
    """Create the server as an ASGI application, with models, gates and indexes loaded.

    Args:
        settings: Options of the pipeline: LLM, gate, documents and rules.
        options: Options of the server. Default: the table [serve] of the settings.
        read_settings: Function that reads the settings again, called when the process receives SIGHUP. Without it,
            SIGHUP does not reload anything.

    Raises:
        BadSetting: The settings contradict each other. An example is a gate that the LLM does not support.
    """
    service = build_service(settings, options or load_serve_options(settings))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        """Listen for SIGHUP while the server runs, and close the service at the end."""
        app.state.reloader = SettingsReloader(service, settings, read_settings)
        app.state.reloader.listen()
        works = [work(service) for work in (delete_expired_hourly, erase_deleted, update_breakers, delete_from_memory)]
        works += [collect_large_garbage(), share_processor(lambda: service.gate_service.rag.model)]
        tasks = [asyncio.create_task(work) for work in works]
        yield
        for task in tasks:
            task.cancel()
        await service.close()

    routes = [Route(endpoint.path, EndpointApp(service, endpoint), methods=[endpoint.method]) for endpoint in ENDPOINTS]
    app = Starlette(
        routes=[*routes, Mount("/dashboard", DashboardAssets())],
        lifespan=lifespan,
        exception_handlers={HTTPException: _handle_http_exception},
    )
    app.router.redirect_slashes = False  # the address of a redirect would come from the Host header
    app.state.service = service
    return app


async def delete_expired_hourly(service: Service) -> None:
    """Delete expired decisions and expired cached web searches, every hour."""
    while True:
        if service.decision_log is not None:
            service.decision_log.delete_expired()
        retriever = service.gate_service.rag.retriever
        if isinstance(retriever, FingerprintCachingRetriever) and isinstance(retriever.retriever, WebRetriever):
            try:
                await asyncio.to_thread(retriever.retriever.delete_expired)
            except OSError:
                log.exception("Expired web searches could not be deleted. This is tried again in an hour.")
        del retriever  # otherwise this task would keep the old index in memory after a reload of the settings
        await asyncio.sleep(CLEANUP_SECONDS)


async def erase_deleted(service: Service) -> None:
    """Erase deleted decisions from the file or database. All workers together do that once in ERASE_SECONDS."""
    while True:
        await asyncio.sleep(ERASE_SECONDS * service.options.workers)
        if service.decision_log is not None:
            service.decision_log.erase_deleted()


async def update_breakers(service: Service) -> None:
    """Report the states of the circuit breakers every second, also while other workers answer GET /metrics."""
    while True:
        service.metrics.update_breakers()
        await asyncio.sleep(BREAKER_SECONDS)


async def delete_from_memory(service: Service) -> None:
    """Delete decisions from memory that clients deleted through other processes, every MEMORY_SECONDS."""
    while True:
        await service.recent.apply_deletions(await service.snapshot_exchange.read_deletions())
        await asyncio.sleep(MEMORY_SECONDS)


# --- request processing ---------------------------------------------------------------------------


@dataclass(frozen=True)
class EndpointApp:
    """ASGI application of one endpoint.

    A class instead of a function, so that Starlette calls the application directly.
    """

    service: Service
    endpoint: Endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and record it in the metrics and the decision log."""
        trace = RequestTrace()
        request = Request(scope, receive, send)
        try:
            response = await self._respond(request, trace)
            response = await self.service.record(self.endpoint.path, response, trace)
            try:
                await response(scope, receive, send)
            finally:
                if self.service.spans is not None:
                    self.service.spans.export(
                        request.method, self.endpoint.path, response.status_code, trace, request.headers
                    )
        finally:
            trace.end()

    async def _respond(self, request: Request, trace: RequestTrace) -> Response:
        """Check the API key, receive the request body, and run the handler in a slot, if the endpoint needs one."""
        try:
            key = self._authenticate(request, trace)
            await self.service.count_requests(key)
            if not self.endpoint.needs_slot:
                return await self._run_handler(request, trace)
            client = identify_client(request, key)
            if request.method == "POST":
                await self.service.receive_body(request, client)
            self.service.active_requests.acquire(client)
        except ApiError as error:
            return error.to_response()
        # Not before the response is sent, because it takes memory while the client does not read it.
        trace.on_end.append(partial(self.service.active_requests.release, client))
        return await self._run_handler(request, trace)

    def _authenticate(self, request: Request, trace: RequestTrace) -> ApiKey | None:
        """Return the API key of a request, or None. Store its rights in the trace.

        Raises:
            ApiError: The key is missing or invalid, or may not use this endpoint.
        """
        policy = self.service.access_policy
        key = None if self.endpoint.is_public else policy.authenticate(request)
        policy.authorize(key, needs_admin=self.endpoint.needs_admin)
        trace.owner = "" if key is None else key.name
        CLIENT.set(trace.owner)  # by this name, local models and searches let API keys take turns
        trace.is_admin = key is None or key.admin
        trace.shares_labels = trace.is_admin or self.service.options.share_labels
        request.state.key = key
        return key

    async def _run_handler(self, request: Request, trace: RequestTrace) -> Response:
        """Run the handler until the deadline. Turn every exception into an error response."""
        try:
            async with asyncio.timeout(self.service.options.deadline):
                if self.service.learner is not None:
                    await self.service.learner.auditor.poll()  # so that an alarm of another server is known
                return await self.endpoint.handler(self.service, request, trace)
        except ApiError as error:
            if trace.decision is not None:  # it is stored, so the client can ask for it by its id
                error.headers |= trace.headers
            return error.to_response()
        except TimeoutError:
            message = "the answer was not ready before the deadline of the server. Try again later."
            headers = {} if trace.decision is None else trace.headers
            return ApiError(504, message, "deadline", headers).to_response()
        except DisconnectError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception:
            log.exception("Request %s failed", trace.id)
            message = f"internal error. The server's log has details of request {trace.id}."
            return ApiError(500, message, "internal", trace.headers).to_response()


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    """Answer requests with an unknown path or method with a JSON error."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    messages = {
        404: f"unknown endpoint {request.scope['path'][:100]}. See /docs for all endpoints.",
        405: f"the method {request.method} is not allowed for this endpoint. See /docs for the allowed ones.",
    }
    headers: dict[str, Any] = dict(getattr(error, "headers", None) or {})
    return ApiError(status, messages.get(status, "the request cannot be processed."), headers=headers).to_response()


# --- building -------------------------------------------------------------------------------------


def build_service(settings: PipelineOptions, options: ServeOptions) -> Service:
    """Load all components of a server.

    Raises:
        BadSetting: The components do not work together.
    """
    gate_service = build_gate_service(settings, options)
    if options.upstream is None:
        service = Service(options, gate_service, local_chat=LocalChat(gate_service, options))
    else:
        if not is_reachable(options.upstream):
            url = redact_urls(options.upstream)
            log.warning("The upstream %s cannot be reached now. Requests fail until it can. Check that it runs.", url)
        if options.upstream_model is None and (options.audit or settings.log):
            log.warning(
                "The upstream's LLM has no name here, so audits and labels can mix the answers of several LLMs if requests name "
                "several. Set `upstream_model` to the LLM that the gate decides for."
            )
        upstream = UpstreamClient(options.upstream, options)
        service = Service(options, gate_service, forwarder=UpstreamForwarder(upstream, gate_service, options))
    service.start_learning(settings)
    return service


def build_gate_service(settings: PipelineOptions, options: ServeOptions, model: Model | None = None) -> GateService:
    """Build the service for decisions and searches. With an upstream (another server with the LLM), no LLM is loaded.

    Args:
        settings: Options of the pipeline: LLM, gate, documents and rules.
        options: Options of the server.
        model: LLM that is already loaded. Default: load the one that the settings name.

    Raises:
        BadSetting: The options of the server do not fit the gate or arbiter of the pipeline.
    """
    if options.upstream is not None and settings.log_drafts:
        raise BadSetting(
            "`log_drafts` works only with an LLM in this process. Remove it. With `upstream`, audits (`audit`) add labels of "
            "questions that the gate reads no whole draft of."
        )
    if options.upstream is not None:
        # The default gate depends on whether the upstream returns log-probabilities, so the upstream is asked.
        is_default_gate = settings.gate == DEFAULT_GATE
        model = model or UpstreamDraftModel(options.upstream, options.upstream_model, asks_upstream=is_default_gate)
    elif options.way is not None:
        raise BadSetting("the option `way` works only with the option `upstream`. Remove `way`, or set `upstream`.")
    rag = build_pipeline(settings, model=model)
    if rag.rules is not None:
        rag = rag.replace(rules=guard_topics(rag.rules, options.gate_seconds))
    if isinstance(rag.model, UpstreamDraftModel):
        check_upstream_logprobs(rag.gate, rag.model)
    if rag.log is not None:
        rag.log.load_embedder()  # takes seconds, for which the first logged question would have to wait
    load_search_models(rag)
    if rag.retriever is not None:
        rag = rag.replace(retriever=FingerprintCachingRetriever(rag.retriever, options.gate_seconds))
    gate_spec = "" if settings.gate == DEFAULT_GATE else str(settings.gate)
    gate_service = GateService(rag, timeout=options.gate_seconds, strict=options.strict, gate_spec=gate_spec)
    if options.upstream is not None and not gate_service.staleness:
        load_gate_models(rag)
    _check_draft_use(gate_service, settings, options)
    return gate_service


def _check_draft_use(gate_service: GateService, settings: PipelineOptions, options: ServeOptions) -> None:
    """Check that the gate and the arbiter get the drafts (answers without passages) that they read.

    Raises:
        BadSetting: The gate or the arbiter reads drafts, but the server makes none.
    """
    rag = gate_service.rag
    gate_reads_draft = not gate_service.get_signal_request(rag, RequestTrace()).is_empty
    if options.way == "question" and gate_reads_draft:
        raise BadSetting(
            f"the gate '{rag.gate.name}' reads a draft answer, but way='question' generates none. Set way='draft' or "
            "way='race', or use a gate that reads only questions."
        )
    makes_drafts = gate_reads_draft or arbiter_makes_drafts(rag)
    if options.way == "question" and arbiter_makes_drafts(rag):
        raise BadSetting(
            f"the arbiter of the gate '{rag.gate.name}' compares draft answers, but way='question' generates none. Remove "
            "`way`, or set arbiter='none'."
        )
    # Only an arbiter that the user set must be used. The default arbiter may stay unused.
    must_use_arbiter = rag.bound_arbiter is not None and settings.arbiter is not None
    if options.upstream is not None and must_use_arbiter and not makes_drafts:
        raise BadSetting(
            f"the option `arbiter` compares draft answers, but the gate '{rag.gate.name}' works without drafts. Remove "
            "`arbiter`, or use a gate that reads drafts."
        )


def check_upstream_logprobs(gate: Gate, upstream: UpstreamDraftModel) -> None:
    """Check that the upstream returns the log-probabilities needed by the gate.

    Raises:
        BadSetting: The gate needs log-probabilities, but the upstream returns only text.
    """
    if Signal.LOGPROBS not in gate.needs or upstream.returns_logprobs:
        return
    if upstream.returns_logprobs is None:
        log.warning(
            "It is unknown whether the upstream returns log-probabilities, which the gate '%s' needs. Requests "
            "without them retrieve, and the field `knowgate.degraded` of the response names the problem.",
            gate.name,
        )
        return
    raise BadSetting(
        f"the gate '{gate.name}' needs log-probabilities, but the upstream LLM server returns only text. Turn them on in that "
        "server, or leave `gate` out. To train a gate on texts alone, use `knowgate import-answers` and `knowgate fit`."
    )


# --- reloading ------------------------------------------------------------------------------------


class SettingsReloader:
    """Reloader of the settings after the signal SIGHUP.

    It replaces gate, threshold, rules and documents. Requests in progress keep the old settings.
    """

    def __init__(
        self, service: Service, settings: PipelineOptions, read_settings: Callable[[], PipelineOptions] | None
    ):
        self.loop = asyncio.get_running_loop()
        self._service = service
        self._settings = settings
        self._read_settings = read_settings
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[bool]] = set()

    def listen(self) -> None:
        """Install the handler of SIGHUP. Python allows this only in the main thread."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        if self._read_settings is not None and RELOAD_SIGNAL is not None and is_main_thread:
            self.loop.add_signal_handler(RELOAD_SIGNAL, self._start_reload)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {RELOAD_SIGNAL})  # it was deferred while the server started

    def _start_reload(self) -> None:
        """Reload the settings in the background. At most one reload runs and one waits."""
        if len(self._tasks) > 1:
            return
        task = asyncio.ensure_future(self.reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def reload(self) -> bool:
        """Read the settings again, and use them for new requests. An unchanged LLM stays loaded.

        Returns:
            Whether the new settings are in effect. If they are invalid, the error is logged and the old ones are kept.
        """
        if self._read_settings is None:
            return False
        async with self._lock:
            try:
                settings = await asyncio.to_thread(self._read_settings)
                if (settings.log is None) != (self._settings.log is None):  # questions are stored only for a history
                    raise BadSetting("`log` was added or removed. Restart the server for that.")
                gate_service = await asyncio.to_thread(self._build_gate_service, settings)
                close_old = await self._service.replace_gate_service(gate_service, settings)
            except Exception as error:  # noqa: BLE001 - such as too many open files, which no other line would report
                reason = error if isinstance(error, KnowgateError) else f"{type(error).__name__}: {error}"
                log.error("The new settings cannot be used, so the old ones stay in effect: %s", reason)
                return False
            self._close_later(close_old)
            self._settings = settings
            log.warning("The settings were reloaded: gate %s.", gate_service.rag.gate.name)
            return True

    def _build_gate_service(self, settings: PipelineOptions) -> GateService:
        """Build a gate service with new settings. An unchanged LLM is used again."""
        # With an upstream, the server has no LLM of its own that could change.
        keeps_model = settings.model == self._settings.model or self._service.forwarder is not None
        model = self._service.gate_service.rag.model if keeps_model else None
        return build_gate_service(settings, self._service.options, model)

    def _close_later(self, close_old: Callable[[], None]) -> None:
        """Close the old gate service after the deadline, when no request can use it any more."""
        self.loop.call_later(self._service.options.deadline, self.loop.run_in_executor, None, close_old)
        # An old index closes its files when it is collected: now if no request uses it, otherwise after the deadline.
        self.loop.call_later(self._service.options.deadline, gc.collect)
        gc.collect()
