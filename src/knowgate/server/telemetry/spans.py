"""What became of a request as OpenTelemetry spans: the request, and inside it gate, retrieval and generation.

Names and attributes are those of the gen_ai conventions (in development: https://github.com/open-telemetry/
semantic-conventions-genai). Where spans go is said by the usual variables (OTEL_EXPORTER_OTLP_ENDPOINT, ...). Questions
are in them only where they may be kept. Spans are made when a request is over, from the times that were taken anyhow.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from knowgate.errors import MissingExtra
from knowgate.server.telemetry.trace import RequestTrace, StageTiming

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

GENERATION_STAGES = ("draft", "read", "generate", "answer")
CHAT_ATTRIBUTES = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai"}
NANOSECONDS = 1_000_000_000
SERVER_ERROR = 500


def create_tracer_provider() -> TracerProvider:
    """Spans go to the collector that the environment names."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise MissingExtra("--otel", "otel") from None
    name = os.environ.get("OTEL_SERVICE_NAME", "knowgate")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class RequestSpans:
    """keeps_questions: the text of questions may leave this process."""

    def __init__(self, provider: TracerProvider, *, keeps_questions: bool = False):
        self._provider = provider
        self._tracer = provider.get_tracer("knowgate")
        self._keeps_questions = keeps_questions

    def see(self, method: str, route: str, status: int, trace: RequestTrace, headers: Mapping[str, str]) -> None:
        """A request that is over. headers: its own, which may name the span it belongs to."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        now, since = time.time_ns(), time.perf_counter()
        start = now - int((since - trace.begun) * NANOSECONDS)
        request = self._tracer.start_span(
            f"{method} {route}",
            extract(dict(headers)),
            SpanKind.SERVER,
            {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                **build_decision_attributes(trace),
            },
            start_time=start,
        )
        if status >= SERVER_ERROR:
            request.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(request)
        for stage in trace.stages:
            begun = start + int((stage.begun - trace.begun) * NANOSECONDS)
            kind = SpanKind.CLIENT if is_remote(stage, trace) else SpanKind.INTERNAL
            attributes = self._attributes(stage, trace)
            span = self._tracer.start_span(name_span(stage, trace), inside, kind, attributes, start_time=begun)
            span.end(begun + int(stage.seconds * NANOSECONDS))
        request.end(now)

    def _attributes(self, stage: StageTiming, trace: RequestTrace) -> dict[str, Any]:
        if stage.name in GENERATION_STAGES:
            return {**CHAT_ATTRIBUTES, **({"gen_ai.request.model": trace.model} if trace.model else {})}
        if stage.name != "retrieve":
            return {"knowgate.stage": stage.name}
        found = [{"id": one.id, "score": one.score} for one in trace.passages]
        asked = {"gen_ai.retrieval.query.text": trace.question} if self._keeps_questions and trace.question else {}
        return {"gen_ai.operation.name": "retrieval", "gen_ai.retrieval.documents": json.dumps(found), **asked}

    def close(self) -> None:
        """Until all of them are sent."""
        self._provider.shutdown()


def is_remote(stage: StageTiming, trace: RequestTrace) -> bool:
    """Whether another server did it."""
    return stage.name in GENERATION_STAGES and trace.way != "in-process"


def name_span(stage: StageTiming, trace: RequestTrace) -> str:
    if stage.name in GENERATION_STAGES:
        return f"chat {trace.model}".strip()
    return "retrieval" if stage.name == "retrieve" else f"knowgate {stage.name}"


def build_decision_attributes(trace: RequestTrace) -> dict[str, Any]:
    found: dict[str, Any] = {"knowgate.id": trace.id, "knowgate.way": trace.way, "knowgate.degraded": trace.degraded}
    if trace.decision is not None:
        found |= {
            "knowgate.retrieve": trace.decision.retrieve,
            "knowgate.need": trace.decision.need,
            "knowgate.threshold": trace.decision.threshold,
            "knowgate.gate": trace.decision.gate,
            "knowgate.passages": len(trace.passages),
        }
    return found
