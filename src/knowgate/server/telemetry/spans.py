"""Exports OpenTelemetry spans: one for each request, with child spans for gate, retrieval and generation.

Names and attributes follow the gen_ai semantic conventions (in development:
https://github.com/open-telemetry/semantic-conventions-genai). The spans are created when a request has ended, from the
timings in its trace. The usual environment variables (OTEL_EXPORTER_OTLP_ENDPOINT, ...) configure the exporter.
"""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from knowgate.core.text import replace_surrogates
from knowgate.errors import require_extra
from knowgate.server.telemetry.trace import RequestTrace, StageTiming

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from requests import Response

log = logging.getLogger(__name__)
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)  # its warnings quote the headers of clients

FLUSH_SECONDS = 3.0  # maximum time to send the remaining spans when the server ends
GENERATION_STAGES = ("draft", "read", "generate", "answer")
NANOSECONDS = 1_000_000_000
MAX_CONTEXT_CHARS = 512  # longer trace headers of clients are ignored; parsing them could take long
MAX_COLLECTOR_BYTES = 65_536  # the rest of a response of the collector is not read


def create_tracer_provider() -> TracerProvider:
    """Create an OpenTelemetry tracer provider that exports spans over OTLP.

    Raises:
        MissingExtra: The packages of the extra `otel` are not installed.
    """
    with require_extra("otel=True", "otel"):
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    name = os.environ.get("OTEL_SERVICE_NAME", "knowgate")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    session = requests.Session()
    session.headers["Accept-Encoding"] = "identity"
    session.hooks["response"].append(_limit_response)
    # With such a variable, the exporter gets a session with credentials from a plugin.
    has_plugin = any(variable.endswith("_CREDENTIAL_PROVIDER") for variable in os.environ)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(session=None if has_plugin else session)))
    return provider


def _limit_response(response: Response, **options: Any) -> None:
    """Read at most MAX_COLLECTOR_BYTES of a response, and close its connection if there is more."""
    import requests
    from urllib3.exceptions import HTTPError

    try:
        content = response.raw.read(MAX_COLLECTOR_BYTES, decode_content=False)
    except HTTPError as error:
        raise requests.ConnectionError(error) from None  # after which the exporter tries again
    finally:
        response.close()
    response.raw = io.BytesIO(content)


class RequestSpans:
    """Exports the traces of requests as OpenTelemetry spans.

    Args:
        provider: OpenTelemetry's tracer provider.
        includes_questions: Whether spans may contain the text of questions.
    """

    def __init__(self, provider: TracerProvider, *, includes_questions: bool = False):
        self._provider = provider
        self._tracer = provider.get_tracer("knowgate")
        self._includes_questions = includes_questions

    def export(self, method: str, route: str, status: int, trace: RequestTrace, headers: Mapping[str, str]) -> None:
        """Export the span of a request that has just ended, with one child span for each stage.

        Args:
            method: HTTP method of the request.
            route: Path of the endpoint.
            status: HTTP status of the response.
            trace: Record of the request, with the timings of its stages.
            headers: Headers of the request. With the header `traceparent`, the client names a span of its own. This
                span becomes the parent. Other headers than `traceparent` and `tracestate` are ignored.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Spans have times in nanoseconds since 1970. The trace has times of the clock `perf_counter`, in seconds.
        end = time.time_ns()
        start = end - int((time.perf_counter() - trace.start) * NANOSECONDS)
        http: dict[str, Any] = {"http.request.method": method, "http.route": route, "http.response.status_code": status}
        attributes = {**http, **_describe_decision(trace)}
        context_headers = {name: headers.get(name, "") for name in ("traceparent", "tracestate")}
        usable = {name: value for name, value in context_headers.items() if len(value) <= MAX_CONTEXT_CHARS}
        parent = TraceContextTextMapPropagator().extract(usable)
        name = f"{method} {route}"
        request_span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=start)
        if status >= 500:
            request_span.set_status(Status(StatusCode.ERROR))
        context = set_span_in_context(request_span)
        for stage in trace.stages:
            self._export_stage(stage, trace, context, start)
        request_span.end(end)

    def _export_stage(self, stage: StageTiming, trace: RequestTrace, context: Any, request_start: int) -> None:
        """Export the span of one stage of a request.

        Args:
            stage: The stage.
            trace: Record of the request.
            context: Context with the span of the request.
            request_start: Start of the request in nanoseconds since 1970.
        """
        from opentelemetry.trace import SpanKind

        start = request_start + int((stage.start - trace.start) * NANOSECONDS)
        # A call of an LLM on another server, the upstream, is a span of kind "client". All others are "internal".
        is_remote = stage.name in GENERATION_STAGES and trace.way != "in-process"
        kind = SpanKind.CLIENT if is_remote else SpanKind.INTERNAL
        attributes = self._describe_stage(stage, trace)
        span = self._tracer.start_span(_name_span(stage, trace), context, kind, attributes, start_time=start)
        span.end(start + int(stage.seconds * NANOSECONDS))

    def _describe_stage(self, stage: StageTiming, trace: RequestTrace) -> dict[str, Any]:
        """Return the OpenTelemetry attributes of a stage of a request."""
        if stage.name in GENERATION_STAGES:
            model = {"gen_ai.request.model": replace_surrogates(trace.model_name)} if trace.model_name else {}
            return {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", **model}
        if stage.name != "retrieve":
            return {"knowgate.stage": stage.name}
        documents = [{"id": passage.id, "score": passage.score} for passage in trace.passages]
        attributes = {"gen_ai.operation.name": "retrieval", "gen_ai.retrieval.documents": json.dumps(documents)}
        if self._includes_questions and trace.question:
            attributes["gen_ai.retrieval.query.text"] = trace.question
        return attributes

    def close(self) -> None:
        """Send the remaining spans. After a few seconds, unsent spans are dropped."""
        # The SDK itself would wait for 30 seconds, and has no option for this time.
        shutdown = threading.Thread(target=self._provider.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(FLUSH_SECONDS)
        if shutdown.is_alive():
            log.warning("The OpenTelemetry collector did not answer in %g seconds. Some spans are lost.", FLUSH_SECONDS)


def _name_span(stage: StageTiming, trace: RequestTrace) -> str:
    """Return the name of the span of a stage, according to the gen_ai conventions."""
    if stage.name in GENERATION_STAGES:
        return f"chat {replace_surrogates(trace.model_name)}".strip()  # the exporter encodes names as UTF-8
    return "retrieval" if stage.name == "retrieve" else f"knowgate {stage.name}"


def _describe_decision(trace: RequestTrace) -> dict[str, Any]:
    """Return the OpenTelemetry attributes of a request and its decision."""
    attributes = {"knowgate.id": trace.id, "knowgate.way": trace.way, "knowgate.degraded": trace.degraded}
    if trace.decision is None:
        return attributes
    return {
        **attributes,
        "knowgate.retrieve": trace.decision.retrieve,
        "knowgate.need": trace.decision.need,
        "knowgate.threshold": trace.decision.threshold,
        "knowgate.gate": trace.decision.gate,
        "knowgate.passages": len(trace.passages),
    }
