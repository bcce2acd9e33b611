"""OpenTelemetry spans: names, parents and attributes."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from knowgate.server.telemetry import spans
from knowgate.server.telemetry.spans import RequestSpans, _name_span, create_tracer_provider
from knowgate.server.telemetry.trace import RequestTrace, StageTiming
from tests.server.conftest import UNKNOWN
from tests.server.test_chat import ask
from tests.support.processes import until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def stored():
    return InMemorySpanExporter()


def watching(stored, **options):
    def change(service):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(stored))
        service.spans = RequestSpans(provider, **options)

    return change


def finished(stored):
    """A request's own span comes last, when its reply was sent."""
    until(lambda: any(span.kind is SpanKind.SERVER for span in stored.get_finished_spans()))
    return stored.get_finished_spans()


def test_a_request_is_a_span_with_child_spans_for_its_stages(serve, stub, stored):
    stub.sure = -3.0
    address, _ = serve(gate="logprob:mean", change=watching(stored))
    ask(address)
    *stages, request = finished(stored)
    names = [span.name for span in stages]
    assert names == ["chat stub-llm", "knowgate gate", "retrieval", "chat stub-llm", "knowgate arbiter"]
    assert (request.name, request.kind) == ("POST /v1/chat/completions", SpanKind.SERVER)
    assert request.attributes["knowgate.retrieve"] is True
    assert {span.parent.span_id for span in stages} == {request.context.span_id}
    assert all(request.start_time <= span.start_time <= span.end_time <= request.end_time for span in stages)


def test_spans_follow_the_gen_ai_conventions(serve, stored):
    address, _ = serve(gate="always", change=watching(stored))
    ask(address)
    result = {span.name: span for span in finished(stored)}
    retrieval, chat = result["retrieval"], result["chat stub-llm"]
    assert retrieval.attributes["gen_ai.operation.name"] == "retrieval"
    assert [item["id"] for item in json.loads(retrieval.attributes["gen_ai.retrieval.documents"])] == ["d1"]
    assert (chat.kind, chat.attributes["gen_ai.operation.name"]) == (SpanKind.CLIENT, "chat")
    assert chat.attributes["gen_ai.request.model"] == "stub-llm"


@pytest.mark.parametrize("keeps", [False, True])
def test_spans_contain_questions_only_if_allowed(serve, stored, keeps):
    address, _ = serve(gate="always", change=watching(stored, includes_questions=keeps))
    ask(address)
    report = "".join(span.to_json() for span in finished(stored))
    assert (UNKNOWN in report) is keeps


def test_the_trace_context_of_the_client_is_used_and_forwarded(serve, stub, stored):
    address, _ = serve(gate="never", change=watching(stored))
    body = {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}
    httpx.post(f"{address}/v1/chat/completions", json=body, headers={"traceparent": PARENT})
    assert f"{finished(stored)[-1].context.trace_id:032x}" == PARENT.split("-")[1]
    assert stub.headers[0]["traceparent"] == PARENT


@pytest.mark.parametrize(
    ("state", "entries"), [("vendor=1", {"vendor": "1"}), ("secret text", {}), (f"vendor={'x' * 250}," * 2, {})]
)
def test_other_headers_of_the_client_are_neither_parsed_nor_logged(stored, caplog, state, entries):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(stored))
    headers = {"traceparent": PARENT, "tracestate": state, "baggage": "secret text"}
    RequestSpans(provider).export("GET", "/health", 200, RequestTrace(), headers)
    context = stored.get_finished_spans()[0].context
    assert (f"{context.trace_id:032x}", dict(context.trace_state)) == (PARENT.split("-")[1], entries)
    assert "secret" not in caplog.text


def test_a_long_response_of_the_collector_is_not_read(monkeypatch):
    sent, encodings = [], []

    class EndlessCollector(BaseHTTPRequestHandler):
        def do_POST(self):
            encodings.append(self.headers["accept-encoding"])
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            try:
                while len(sent) < 200:
                    self.wfile.write(bytes(1 << 20))
                    sent.append(1)
            except OSError:
                pass  # the server has closed the connection

        def log_message(self, *args):
            pass

    collector = ThreadingHTTPServer(("127.0.0.1", 0), EndlessCollector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    provider = create_tracer_provider()
    RequestSpans(provider).export("GET", "/health", 200, RequestTrace(), {})
    assert provider.force_flush(20_000)
    collector.shutdown()
    collector.server_close()  # waits until the request has ended
    provider.shutdown()
    assert encodings == ["identity"]
    assert len(sent) < 50  # MB, in the buffers of the system


def test_spans_are_off_by_default(serve):
    _, app = serve(gate="never")
    assert app.state.service.spans is None


def test_a_collector_that_hangs_does_not_delay_the_end_of_the_server(monkeypatch, caplog):
    monkeypatch.setattr(spans, "FLUSH_SECONDS", 0.1)
    released, sent = threading.Event(), threading.Event()

    class HangingProcessor(SpanProcessor):
        def shutdown(self):
            released.wait(30)
            sent.set()

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(HangingProcessor())
    RequestSpans(provider).close()
    assert not sent.is_set()
    assert "did not answer in 0.1 seconds" in caplog.text
    released.set()


def test_an_odd_name_of_an_llm_can_be_exported():
    trace = RequestTrace(model_name="llm-\ud800")
    assert _name_span(StageTiming("answer", 0.0, 1.0), trace) == "chat llm-?"
