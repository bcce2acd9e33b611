"""What a request can ask for: a guaranteed loss, a filter of documents, and deletion."""

import asyncio
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import ClassVar

import httpx
import pytest

from knowgate.data.history import open_history
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
from knowgate.errors import BrokenIndex, RejectionError, ServerError
from knowgate.pipeline.traffic_log import TrafficLog
from knowgate.retrieval.engines.web import SearchBudgetError
from knowgate.server.chat import request_options
from knowgate.server.chat.request_options import FilteredRetriever, FilterMatcher, FingerprintCachingRetriever
from knowgate.server.schemas import PassageFilter
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.types import Passage
from tests.server.conftest import KNOWN, UNKNOWN
from tests.server.test_chat import ask
from tests.support.hash_embedder import HashEmbedder
from tests.support.processes import PATIENCE, until

# --- policy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", [True, False])
def test_a_demanded_loss_without_a_guarantee_retrieves_with_a_reason(serve, upstream):
    address, _ = serve(upstream=upstream, gate="never")
    report = ask(address, model="knowgate", knowgate={"max_loss": 0.01}).json()["knowgate"]
    assert (report["retrieve"], report["gate"], len(report["passages"])) == (True, "never", 1)
    assert "not proven here that skipping loses at most 1.00%" in report["reason"]
    assert "the gate has no guarantee. Prove one with `knowgate calibrate`" in report["reason"]
    own_choice = {"max_loss": 0.01, "retrieve": "never"}
    assert not ask(address, model="knowgate", knowgate=own_choice).json()["knowgate"]["retrieve"]


@pytest.mark.parametrize(("proven", "retrieves"), [(0.02, False), (0.05, True), (None, True)])
def test_a_gate_that_guarantees_the_demanded_loss_decides(serve, monkeypatch, proven, retrieves):
    address, app = serve(gate="never")
    monkeypatch.setattr(type(app.state.service.gate_service.rag), "proven_loss", property(lambda rag: proven))
    report = ask(address, knowgate={"max_loss": 0.02}).json()["knowgate"]
    assert report["retrieve"] is retrieves
    assert ("the proven limit of the gate is 5.00%" in report["reason"]) is (proven == 0.05)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "decide"])
def test_a_guarantee_covers_only_the_llm_of_the_server(serve, monkeypatch, path):
    address, app = serve(gate="never", options={"upstream_model": "stub-llm"})
    monkeypatch.setattr(type(app.state.service.gate_service.rag), "proven_loss", property(lambda rag: 0.01))
    question = {"messages": [{"role": "user", "content": UNKNOWN}], "prompt": UNKNOWN, "question": UNKNOWN}
    name = {"chat/completions": "messages", "completions": "prompt", "decide": "question"}[path]
    for model, max_loss, retrieves in [
        ("stub-llm", 0.02, False),
        ("other-llm", 0.02, True),
        ("other-llm", None, False),
    ]:
        limits = {"knowgate": {"max_loss": max_loss}} if max_loss else {}
        body = {"model": model, name: question[name], **limits}
        reply = httpx.post(f"{address}/v1/{path}", json=body, timeout=30).json()
        report = reply if path == "decide" else reply["knowgate"]
        assert (report["retrieve"], "not about the LLM 'other-llm'" in report["reason"]) == (retrieves, retrieves)


@pytest.mark.parametrize("upstream", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_each_request_notices_whether_the_guarantee_still_holds(serve, monkeypatch, upstream, stream):
    address, app = serve(upstream=upstream, gate="never")
    retrieves = []
    for proven in (0.01, None, 0.01):
        monkeypatch.setattr(type(app.state.service.gate_service.rag), "proven_loss", property(lambda rag, p=proven: p))
        reply = ask(address, model="knowgate", knowgate={"max_loss": 0.02}, stream=stream)
        retrieves.append(reply.headers["x-knowgate-retrieve"])
    assert retrieves == ["false", "true", "false"]


def test_a_guarantee_for_short_answers_does_not_hold_for_a_request_of_longer_ones(serve, monkeypatch):
    address, app = serve(upstream=False, gate="never")
    rag_type = type(app.state.service.gate_service.rag)
    monkeypatch.setattr(rag_type, "proven_loss", property(lambda rag: 0.01 if rag.max_tokens == 32 else None))

    def is_retrieved(**fields):
        return ask(address, model="knowgate", knowgate={"max_loss": 0.02}, **fields).json()["knowgate"]["retrieve"]

    assert [is_retrieved(), is_retrieved(max_tokens=32), is_retrieved(max_tokens=64)] == [False, False, True]


class Asked:
    """A retriever that counts how often it is asked who it is; `says` may be an error."""

    name = "asked"

    def __init__(self, *says):
        self.says, self.count = says, 0

    @property
    def fingerprint(self):
        said = self.says[min(self.count, len(self.says) - 1)]
        self.count += 1
        if isinstance(said, Exception):
            raise said
        return said

    def search(self, queries, k):
        if "fail" in queries:
            raise ServerError("no search today")
        return [[] for _ in queries]


def test_the_index_fingerprint_is_not_read_for_every_request(serve):
    address, app = serve(gate="never")
    rag = app.state.service.gate_service.rag
    rag.retriever.retriever = engine = Asked("one")
    for _ in range(3):
        report = ask(address, knowgate={"max_loss": 0.01, "retrieve": "auto"}).json()["knowgate"]
        assert "not proven here" in report["reason"]
    assert engine.count == 1


def test_an_index_without_fingerprint_has_no_guarantee(serve):
    address, app = serve(gate="never")
    app.state.service.gate_service.rag.retriever.retriever = engine = Asked(ServerError("gone"))
    report = ask(address, knowgate={"max_loss": 0.01}).json()["knowgate"]
    assert report["retrieve"]
    assert "the guarantee of the gate cannot be checked now" in report["reason"]
    assert engine.count == 1


def test_a_fingerprint_is_cached_for_a_minute_or_until_a_failure():
    now, engine = [0.0], Asked("one", "one", "two", ServerError("gone"), "three", "four")
    result = FingerprintCachingRetriever(engine, 10.0, clock=lambda: now[0])

    def update(seconds):
        now[0] = seconds
        asyncio.run(result.update_fingerprint())
        return result.fingerprint

    assert [result.fingerprint, result.fingerprint, result.name] == ["one", "one", "asked"]
    assert [update(0.0), update(59.9), update(60.0)] == ["one", "one", "two"]
    for seconds in (120.0, 124.9):  # the failure is remembered for five seconds
        with pytest.raises(BrokenIndex, match="cannot be identified"):
            update(seconds)
    assert update(125.0) == "three"
    with pytest.raises(ServerError):
        result.search(["fail"], 1)
    assert update(126.0) == "four"


def test_a_fingerprint_that_is_computed_once_is_read_again_after_a_minute():
    class Counting:
        count = 0

        @cached_property
        def fingerprint(self):
            self.count += 1
            return str(self.count)

    now = [0.0]
    retriever = FingerprintCachingRetriever(Counting(), 10.0, clock=lambda: now[0])
    seen = []
    for now[0] in (0.0, 59.0, 61.0):
        asyncio.run(retriever.update_fingerprint())
        seen.append(retriever.fingerprint)
    assert seen == ["1", "1", "2"]


def test_requests_that_are_canceled_while_a_fingerprint_is_read_delay_no_others():
    release = threading.Event()

    class Hanging(Asked):
        @property
        def fingerprint(self):
            self.count += 1
            release.wait(PATIENCE)
            return "one"

    async def count_readings():
        retriever = FingerprintCachingRetriever(Hanging(), 0.5)
        waiting = [asyncio.create_task(retriever.update_fingerprint()) for _ in range(4)]
        for task in waiting[:3]:
            await asyncio.sleep(0.1)
            task.cancel()
        start = time.monotonic()
        await waiting[3]
        release.set()
        return retriever.retriever.count, time.monotonic() - start

    count, seconds = asyncio.run(count_readings())
    assert count == 1
    assert seconds < 0.5


def test_others_do_not_wait_while_the_fingerprint_of_an_index_is_read(serve):
    reading, gate = threading.Event(), threading.Event()

    class Slow(Asked):
        @property
        def fingerprint(self):
            reading.set()
            gate.wait(20)
            return super().fingerprint

    address, app = serve(gate="never")
    app.state.service.gate_service.rag.retriever.retriever = Slow("one")
    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(ask, address, knowgate={"max_loss": 0.01})
        shown = threads.submit(httpx.get, f"{address}/v1/dashboard", timeout=30)
        assert reading.wait(20)
        assert httpx.get(f"{address}/health", timeout=5).status_code == 200
        assert not asked.done()
        gate.set()
        assert (asked.result().status_code, shown.result().status_code) == (200, 200)


@pytest.mark.parametrize("upstream", [True, False])
@pytest.mark.parametrize(("wanted", "result"), [("d1", ["d1"]), ("d0", ["d0"]), (["x*", "d0"], ["d0"]), ("x*", [])])
def test_a_filter_restricts_the_documents(serve, upstream, wanted, result):
    address, _ = serve(upstream=upstream, gate="always")
    reply = ask(address, model="knowgate", knowgate={"filter": {"id": wanted}})
    assert reply.status_code == 200
    assert [item["id"] for item in reply.json()["knowgate"]["passages"]] == result


@pytest.mark.parametrize(("options", "adds_label"), [({"filter": {"id": "d1"}}, False), ({"threshold": 0.4}, True)])
def test_a_request_with_a_filter_adds_no_label(serve, options, adds_label):
    """The LLM may decline to answer because the filter leaves out a passage."""
    _, app = serve(gate="never")
    trace = RequestTrace()
    asyncio.run(app.state.service.gate_service.read_options({"model": "knowgate", "knowgate": options}, trace))
    assert trace.shares_labels is adds_label


def test_a_filter_searches_deeper_until_enough_passages_match():
    class Many:
        name, fingerprint = "many", "many"
        asked: ClassVar = []

        def search(self, queries, k):
            self.asked.append(k)
            return [[Passage(f"p{number}", "text") for number in range(k)] for _ in queries]

    (result,) = FilteredRetriever(Many(), PassageFilter(id="p*0")).search(["?"], 3)
    assert [item.id for item in result] == ["p0", "p10", "p20"]
    assert Many.asked == [12, 48]


@pytest.mark.parametrize("error", [RejectionError, SearchBudgetError])
def test_a_filter_gives_what_it_has_found_if_a_deeper_search_is_rejected(error):
    class Limited:
        name, fingerprint = "limited", "limited"

        def search(self, queries, k):
            if k > 12:
                raise error("the response is too large")
            return [[Passage(f"p{number}", "text") for number in range(k)] for _ in queries]

    (result,) = FilteredRetriever(Limited(), PassageFilter(id="p*0")).search(["?"], 3)
    assert [item.id for item in result] == ["p0", "p10"]
    with pytest.raises(error):
        FilteredRetriever(Limited(), PassageFilter(id="x")).search(["?"], 3)


@pytest.mark.parametrize("field", ["id", "title"])
def test_a_filter_is_compared_with_what_is_shown_of_a_long_id_or_title(field):
    labels = {"id": "1", "title": "t", field: "x" * 500 + "y" * 1_000_000}
    assert FilterMatcher(PassageFilter(**{field: "*x"})).matches(Passage(text="text", **labels))


def test_large_filters_are_not_kept_in_the_cache_of_compiled_patterns():
    large = tuple(f"[a-{number}]" * 40 for number in range(32))
    assert request_options._compile_patterns(large) is not request_options._compile_patterns(large)
    assert request_options._compile_patterns(("hr/*",)) is request_options._compile_patterns(("hr/*",))


@pytest.mark.parametrize("upstream", [True, False])
def test_a_filter_that_takes_too_long_is_a_bad_request(serve, monkeypatch, upstream):
    monkeypatch.setattr(request_options, "FILTER_SECONDS", 0.0)
    reply = ask(serve(upstream=upstream, gate="always")[0], model="knowgate", knowgate={"filter": {"id": "*"}})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "slow_filter")


@pytest.mark.parametrize(
    "wish",
    [{"max_loss": 2}, {"max_loss": "little"}, {"filter": {"author": "x"}}, {"filter": 3}, {"filter": {"id": []}}],
)
def test_invalid_loss_and_filter_are_rejected(serve, wish):
    address, _ = serve(gate="always")
    reply = ask(address, knowgate=wish)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "policy")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("x" * 201, "'knowgate.filter.id.0' is invalid: it must have at most 200 characters."),
        (["a", "x" * 201], "'knowgate.filter.id.1' is invalid: it must have at most 200 characters."),
        (3, "'knowgate.filter.id' is invalid: it must be a list."),
    ],
)
def test_an_error_names_the_pattern_of_a_filter_that_is_invalid(serve, patterns, message):
    reply = ask(serve(gate="always")[0], knowgate={"filter": {"id": patterns}})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)


def test_an_error_says_that_a_question_is_empty(serve):
    reply = httpx.post(f"{serve(gate='always')[0]}/v1/decide", json={"questions": ["a", ""]})
    message = "'questions.1' is invalid: it must not be empty."
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)


# --- forgetting -----------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """A log of decisions that keeps questions."""
    return {"decisions": str(tmp_path / "d.db"), "keep_questions": True}


def test_forgetting_does_not_count_what_another_process_has_deleted(serve, tmp_path):
    options = {"decisions": str(tmp_path / "d.db"), "keep_questions": True}
    (first, _), (second, _) = (serve(gate="never", options=options) for _ in range(2))
    id = ask(first).headers["x-knowgate-id"]
    until(lambda: httpx.delete(f"{second}/v1/decisions/{id}").status_code == 200)
    ask(first)
    assert httpx.post(f"{first}/v1/forget", json={"question": UNKNOWN}).json()["decisions"] == 1


def test_deleting_a_decision_leaves_others_on_the_same_question_and_forgetting_deletes_all(serve, stored, tmp_path):
    address, _ = serve(gate="always", options=stored)
    first, again, other = (ask(address, text).headers["x-knowgate-id"] for text in (UNKNOWN, UNKNOWN.upper(), KNOWN))
    httpx.post(f"{address}/v1/feedback", json={"id": first, "rating": "up", "comment": "a secret"})

    def read():
        return [httpx.get(f"{address}/v1/decisions/{id}").status_code for id in (first, again, other)]

    assert httpx.delete(f"{address}/v1/decisions/{first}").json() == {"forgotten": True, "decisions": 1, "history": 0}
    assert read() == [404, 200, 200]
    httpx.post(f"{address}/v1/forget", json={"question": UNKNOWN})
    assert read() == [404, 404, 200]
    assert all(b"Babakoland" not in file.read_bytes() for file in tmp_path.glob("d.db*"))
    assert all(b"a secret" not in file.read_bytes() for file in tmp_path.glob("d.db*"))


def test_deleting_a_question_deletes_it_from_the_history(serve, stored, tmp_path):
    store = open_history(str(tmp_path / "h.db"), HashEmbedder())
    store.add([LogEntry(text, KnowledgeLabel.KNOWN, HistoryScope("m", "p")) for text in (UNKNOWN, KNOWN)])

    def change(service):
        object.__setattr__(service.gate_service.rag, "log", TrafficLog(store))

    address, _ = serve(gate="always", options=stored, change=change)
    ask(address)
    gone = httpx.post(f"{address}/v1/forget", json={"question": UNKNOWN.lower()}).json()
    assert gone == {"forgotten": True, "decisions": 1, "history": 1}
    assert [entry.question for entry in store.entries()] == [KNOWN]


def test_deleting_an_unknown_decision_is_404(serve, stored):
    address, _ = serve(gate="always", options=stored)
    assert httpx.delete(f"{address}/v1/decisions/kg-none").status_code == 404
    assert httpx.post(f"{address}/v1/forget", json={"question": " "}).status_code == 400
    assert httpx.post(f"{address}/v1/forget", json={"question": "Never asked?"}).json()["decisions"] == 0


def test_a_decision_without_stored_question_can_be_deleted_by_id(serve, tmp_path):
    address, _ = serve(gate="always", options={"decisions": str(tmp_path / "d.db")})
    id = ask(address).headers["x-knowgate-id"]
    assert httpx.delete(f"{address}/v1/decisions/{id}").json()["decisions"] == 1
    with sqlite3.connect(tmp_path / "d.db") as file:
        assert file.execute("SELECT count(*) FROM decisions").fetchone() == (0,)
    file.close()
