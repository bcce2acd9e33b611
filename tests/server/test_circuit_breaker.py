"""Circuit breakers: a component that fails repeatedly is not called, probed after a pause, and used again."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from knowgate.errors import ServerError
from knowgate.gates.rules.rule_set import RuleSet
from knowgate.gates.rules.topic_rule import TopicRule
from knowgate.retrieval.engines.elastic import OpenSearchRetriever
from knowgate.retrieval.engines.web import WebRetriever
from knowgate.retrieval.engines.web_engines import WebOptions
from knowgate.retrieval.rerankers.remote import RemoteReranker
from knowgate.server.auth.api_keys import add_key
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.request_options import FingerprintCachingRetriever
from knowgate.server.circuit_breaker import BreakersByKey, CircuitBreaker, GuardedTopicRule, guard_topics
from tests.server.conftest import KNOWN
from tests.server.test_chat import ask
from tests.server.test_failures import FailingGate, use_gate_service
from tests.server.test_forwarding import FOUND
from tests.support.processes import PATIENCE, until


class FlakyRetriever:
    """Fails while it is report to."""

    name, fingerprint = "moody", "moody"

    def __init__(self):
        self.fails, self.asked = True, 0

    def search(self, queries, k):
        self.asked += 1
        if self.fails:
            raise RuntimeError("secret words")
        return [FOUND for _ in queries]


def use_parts(seconds=30, **parts):
    def change(service):
        use_gate_service(service, GateService(service.gate_service.rag.replace(**parts), timeout=seconds, strict=False))

    return change


def skip_recovery_time(breaker):
    """Set the clock of a breaker past its recovery time."""
    breaker.last_failure -= 2 * breaker.recovery_seconds


def test_a_failing_retriever_is_not_called_until_one_request_probes_it(serve):
    retriever = FlakyRetriever()
    address, app = serve(gate="always", change=use_parts(retriever=retriever))
    report = [ask(address).json()["knowgate"] for _ in range(7)]
    assert retriever.asked == 5
    assert all(item["degraded"] == ["retriever"] and item["passages"] == [] for item in report)
    retriever.fails = False
    skip_recovery_time(app.state.service.gate_service.retriever_breakers.get(""))
    result = [ask(address).json()["knowgate"] for _ in range(2)]
    assert [(item["degraded"], len(item["passages"])) for item in result] == [([], 1), ([], 1)]


def test_a_gate_is_used_again_after_it_recovers(serve):
    score = [float("nan")]
    address, app = serve(gate="always", change=use_parts(gate=FailingGate(lambda questions: score)))
    assert [ask(address).json()["knowgate"]["degraded"] for _ in range(6)] == [["gate"]] * 6
    score[0] = 0.0
    assert ask(address).json()["knowgate"]["degraded"] == ["gate"]
    skip_recovery_time(app.state.service.gate_service.gate_breakers.get(""))
    assert ask(address).json()["knowgate"]["retrieve"] is False


def test_questions_of_one_key_at_which_the_gate_fails_do_not_stop_it_for_other_keys(serve, tmp_path):
    def fail_at_nonsense(questions):
        return [float("nan") if "nonsense" in question.text else 0.0 for question in questions]

    file = tmp_path / "keys.json"
    headers = {name: {"Authorization": f"Bearer {add_key(file, name)}"} for name in ("attacker", "other")}
    gate = use_parts(gate=FailingGate(fail_at_nonsense))
    address, _ = serve(gate="always", change=gate, options={"keys": str(file)})

    def decide(name, question, **fields):
        return httpx.post(f"{address}/v1/decide", json={"question": question, **fields}, headers=headers[name]).json()

    assert all("fallback" in decide("attacker", "nonsense")["reason"] for _ in range(5))
    assert "failed repeatedly" in decide("attacker", "Who wrote Emma?")["reason"]
    assert decide("attacker", "Who wrote Emma?", model="knowgate/never")["retrieve"] is False
    ready = httpx.get(f"{address}/ready").json()
    assert (ready["breakers"]["gate"], ready["degraded"]) == ("open", ["gate is open"])  # no other key has used it
    assert decide("other", "Who wrote Emma?")["retrieve"] is False
    ready = httpx.get(f"{address}/ready").json()
    assert (ready["breakers"]["gate"], ready["degraded"]) == ("closed", [])
    assert all("fallback" in decide("other", "nonsense")["reason"] for _ in range(5))
    assert 'knowgate_breaker_open{part="gate"} 0.0' in httpx.get(f"{address}/metrics", headers=headers["other"]).text


class NonsenseRetriever(FlakyRetriever):
    """Fails for questions with the word nonsense, and never returns for those with the word slow."""

    def __init__(self):
        super().__init__()
        self.let_go = threading.Event()

    def search(self, queries, k):
        self.fails = "nonsense" in queries[0]
        if "slow" in queries[0]:
            self.let_go.wait(PATIENCE)
        return super().search(queries, k)


@pytest.mark.parametrize(("word", "seconds"), [("nonsense", 30), ("slow", 0.3)])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_searches_of_one_key_that_fail_do_not_stop_retrieval_for_other_keys(serve, tmp_path, word, seconds, route):
    file, retriever = tmp_path / "keys.json", NonsenseRetriever()
    headers = {name: {"Authorization": f"Bearer {add_key(file, name)}"} for name in ("attacker", "other")}
    address, _ = serve(
        gate="always", change=use_parts(seconds=seconds, retriever=retriever), options={"keys": str(file)}
    )

    def search(name, question):
        body = {"model": "knowgate", "prompt": question, "messages": [{"role": "user", "content": question}]}
        return httpx.post(f"{address}/v1/{route}", json=body, headers=headers[name]).headers.get("x-knowgate-degraded")

    assert [search("attacker", f"What is {word} {number}?") for number in range(5)] == ["retriever"] * 5
    n_searches = retriever.asked
    assert search("attacker", "Who wrote Emma?") == "retriever"
    assert retriever.asked == n_searches  # the breaker of this key is open
    assert search("other", "Who wrote Emma?") is None
    assert httpx.get(f"{address}/ready").json()["breakers"]["retriever"] == "closed"
    retriever.let_go.set()


def test_breakers_of_all_keys_are_reported_once_no_key_succeeds_any_more():
    breakers, now = BreakersByKey("gate"), [100.0]
    for name in ("a", "b"):
        breakers.get(name).clock = lambda: now[0]
        breakers.get(name).record_success()
    for seconds, state in ((0, "closed"), (16, "open")):
        now[0] += seconds
        for name in ("a", "b"):
            for _ in range(5):
                breakers.get(name).record_failure()
        assert breakers.state == state


def test_metrics_of_a_worker_follow_its_breakers_although_nobody_reads_them_there(serve):
    _, app = serve(gate="never")
    service = app.state.service
    breaker = service.gate_service.retriever_breakers.get("")
    for change, is_open in ((breaker.trip, 1.0), (breaker.record_success, 0.0)):
        change()
        read = partial(service.metrics.registry.get_sample_value, "knowgate_breaker_open", {"part": breaker.name})
        until(lambda read=read, is_open=is_open: read() == is_open)


def test_an_upstream_is_used_again_after_it_recovers(serve, stub):
    address, app = serve(gate="never")
    upstream = app.state.service.forwarder.upstream
    url, upstream.url = upstream.url, "http://127.0.0.1:1/v1"
    assert [ask(address).status_code for _ in range(6)] == [502] * 5 + [503]
    upstream.url = url
    assert ask(address).status_code == 503
    skip_recovery_time(upstream.breaker)
    assert [ask(address).status_code for _ in range(2)] == [200, 200]


def test_error_responses_of_the_upstream_do_not_open_its_breaker(serve, stub):
    stub.status = 500
    address, _ = serve(gate="never")
    assert [ask(address).status_code for _ in range(7)] == [500] * 7


def test_slow_requests_do_not_open_the_breaker_of_an_upstream_that_lists_its_models(serve, stub):
    address, app = serve(gate="never", options={"first_byte_seconds": 0.1})
    stub.waits_for = threading.Event()
    assert [ask(address).status_code for _ in range(7)] == [504] * 7
    stub.waits_for = None
    assert ask(address).status_code == 200
    assert app.state.service.forwarder.upstream.breaker.state == "closed"


def test_a_failure_counts_only_if_no_call_succeeded_meanwhile():
    now = [0.0]
    breaker = CircuitBreaker("upstream", failure_threshold=2, clock=lambda: now[0])
    now[0] = 5.0
    breaker.record_success()
    for _ in range(3):
        breaker.record_failure(start=4.0)
    assert breaker.state == "closed"
    for _ in range(2):
        breaker.record_failure(start=6.0)
    assert breaker.state == "open"


def test_a_breaker_that_a_probe_confirms_is_opened_by_trip_alone():
    breaker = CircuitBreaker("upstream", probes_first=True, failure_threshold=2)
    for _ in range(2):
        breaker.record_failure()
    assert breaker.state == "half-open"
    breaker.trip()
    breaker.record_failure()
    assert breaker.state == "open"


@pytest.fixture
def web_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("knowgate.retrieval.engines.web.cache_dir", lambda: tmp_path)


@pytest.mark.usefixtures("web_cache")
def test_a_reached_cap_of_web_searches_opens_no_breaker_and_cached_questions_are_answered(serve):
    result = {"url": "https://bala.example/", "title": "Canteen", "content": "Mira runs it."}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"results": [result]}))
    web = WebRetriever("searxng", "http://searx.example", WebOptions(minute=1), transport)
    address, app = serve(gate="always", change=use_parts(retriever=FingerprintCachingRetriever(web, 10.0)))

    def search(question):
        report = ask(address, question).json()["knowgate"]
        return report["degraded"], len(report["passages"])

    assert search("Who runs the canteen?") == ([], 1)
    start = time.monotonic()
    assert [search(f"Who wrote book {number}?") for number in range(7)] == [(["retriever"], 0)] * 7
    assert time.monotonic() - start < 9  # a search does not wait at the cap
    breaker = app.state.service.gate_service.retriever_breakers.get("")
    assert (breaker.state, breaker.failure_count) == ("closed", 0)
    breaker.trip()
    assert search("Who runs the canteen?") == ([], 1)
    assert search("Who wrote Emma?") == (["retriever"], 0)


@pytest.mark.usefixtures("web_cache")
def test_a_reranker_that_fails_after_a_cached_search_leads_to_a_degraded_reply(serve):
    result = {"url": "https://bala.example/", "title": "Canteen", "content": "Mira runs it."}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"results": [result]}))
    web = WebRetriever("searxng", "http://searx.example", WebOptions(), transport)
    failing = httpx.MockTransport(lambda request: httpx.Response(500))
    reranker = RemoteReranker("big@http://rerank.example", transport=failing)
    address, _ = serve(
        gate="always", change=use_parts(retriever=FingerprintCachingRetriever(web, 10.0), reranker=reranker)
    )
    for _ in range(2):
        reply = ask(address, "Who runs the canteen?")
        assert (reply.status_code, reply.json()["knowgate"]["degraded"]) == (200, ["retriever"])


def reject_nonsense(status):
    """Return an HTTP transport of a search and rerank server that rejects questions with the word nonsense."""

    def answer(request):
        if b"nonsense" in request.content:
            return httpx.Response(status, headers={"Location": "http://elsewhere.example/"})
        scores = [{"index": 0, "relevance_score": 0.5}]
        hit = {"_id": "1", "_score": 1.0, "_source": {"text": "Mira runs it."}}
        return httpx.Response(200, json={"hits": {"hits": [hit]}, "results": scores})

    return httpx.MockTransport(answer)


def make_search_server(status):
    return {"retriever": OpenSearchRetriever("http://search.example", "handbook", transport=reject_nonsense(status))}


def make_rerank_server(status):
    retriever = FlakyRetriever()
    retriever.fails = False
    reranker = RemoteReranker("big@http://rerank.example", transport=reject_nonsense(status))
    return {"retriever": retriever, "reranker": reranker}


@pytest.mark.parametrize("make_server", [make_search_server, make_rerank_server])
@pytest.mark.parametrize(("status", "opens"), [(302, False), (400, False), (413, False), (401, True), (403, True)])
def test_questions_that_a_server_rejects_degrade_only_themselves(serve, make_server, status, opens):
    address, app = serve(gate="always", change=use_parts(**make_server(status)))
    breaker = app.state.service.gate_service.retriever_breakers.get("")

    def search(question):
        report = ask(address, question).json()["knowgate"]
        return report["degraded"], len(report["passages"])

    assert [search(f"nonsense {number}?") for number in range(6)] == [(["retriever"], 0)] * 6
    assert breaker.state == ("open" if opens else "closed")
    breaker.trip()
    skip_recovery_time(breaker)
    assert search("nonsense again?") == (["retriever"], 0)
    assert breaker.state == ("open" if opens else "half-open")
    assert search("Who runs the canteen?") == ((["retriever"], 0) if opens else ([], 1))


def make_odd_server(reply):
    """Return a SearXNG retriever whose engine sends this reply to questions with the word odd."""
    good = b'{"results": [{"url": "http://a.example", "title": "A", "content": "Mira runs it."}]}'
    return httpx.MockTransport(
        lambda request: httpx.Response(200, content=reply if b"odd" in request.url.query else good)
    )


@pytest.mark.parametrize(
    ("reply", "report"),
    [
        (rb'{"results": [{"url": "http://b.example", "title": "\ud800", "content": "cut \ud83d"}]}', ([], 1)),
        (b'{"results": [{"url": "http://b.example", "content": "caf\xe9", "score": 1e400}]}', (["retriever"], 0)),
        (b'{"results": ' + b"[" * 99 + b"]" * 99 + b"}", (["retriever"], 0)),
        (b'{"error": "odd"}', (["retriever"], 0)),
        (b"<html>", (["retriever"], 0)),
    ],
)
@pytest.mark.usefixtures("web_cache")
def test_odd_replies_to_some_questions_do_not_stop_retrieval_for_others(serve, reply, report):
    options = WebOptions(minute=1000)
    web = WebRetriever("searxng", "http://s.example", options, make_odd_server(reply))
    address, app = serve(gate="always", change=use_parts(retriever=FingerprintCachingRetriever(web, 10.0)))

    def search(question):
        report = ask(address, question).json()["knowgate"]
        return report["degraded"], len(report["passages"])

    assert [search(f"odd {number}?") for number in range(6)] == [report] * 6
    assert app.state.service.gate_service.retriever_breakers.get("").state == "closed"
    assert search("Who runs the canteen?") == ([], 1)


class BlockedRetriever(FlakyRetriever):
    def __init__(self):
        super().__init__()
        self.let_go = threading.Event()

    def search(self, queries, k):
        self.let_go.wait(PATIENCE)
        return [FOUND for _ in queries]


class SlowDeepRetriever(FlakyRetriever):
    """Takes long for many passages, as searches with a filter do."""

    n_deep = 0

    def search(self, queries, k):
        self.n_deep += k > 1
        time.sleep(1.6 if k > 1 else 0)  # far above the timeout, so that a busy machine makes no difference
        return [FOUND for _ in queries]


def test_slow_searches_with_a_filter_neither_open_the_breaker_nor_delay_others(serve):
    retriever = SlowDeepRetriever()
    address, app = serve(gate="always", change=use_parts(seconds=0.5, retriever=retriever))
    filtered = {"filter": {"id": "*z"}}
    reports = []
    until(lambda: reports.append(ask(address, knowgate=filtered).json()["knowgate"]) or len(reports) > 20)
    assert all(report["degraded"] == ["retriever"] for report in reports)
    assert retriever.n_deep <= 6  # after several timeouts, there are no more searches with a filter
    report = ask(address).json()["knowgate"]
    assert (report["degraded"], len(report["passages"])) == ([], 1)
    assert app.state.service.gate_service.retriever_breakers.state == "closed"


def test_failures_of_searches_with_a_filter_count_as_failures_of_the_retriever(serve):
    address, app = serve(gate="always", change=use_parts(retriever=FlakyRetriever()))
    for _ in range(5):
        ask(address, knowgate={"filter": {"id": "*z"}})
    assert app.state.service.gate_service.retriever_breakers.state == "open"


def test_a_search_that_waits_for_others_does_not_count_as_a_failure(serve):
    held = BlockedRetriever()
    address, app = serve(gate="always", change=use_parts(seconds=0.3, retriever=held))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: ask(address), range(8)))
    held.let_go.set()
    assert app.state.service.gate_service.retriever_breakers.get("").failure_count < 5


def test_a_search_that_times_out_is_answered_without_passages(serve):
    held = BlockedRetriever()
    address, _ = serve(gate="always", change=use_parts(seconds=0.3, retriever=held))
    report = ask(address).json()["knowgate"]
    held.let_go.set()
    assert (report["degraded"], report["passages"]) == (["retriever"], [])


@pytest.mark.parametrize("way", ["draft", "race"])
def test_a_failed_search_is_not_reported_if_the_draft_is_the_answer(serve, way):
    address, _ = serve(gate="logprob:mean", options={"way": way}, change=use_parts(retriever=FlakyRetriever()))
    assert ask(address).json()["knowgate"]["degraded"] == []


def test_an_open_breaker_allows_one_probe_after_its_pause():
    now = [0.0]
    breaker = CircuitBreaker("upstream", failure_threshold=2, recovery_seconds=10, clock=lambda: now[0])
    breaker.record_failure()
    assert breaker.try_acquire()
    breaker.record_failure()
    assert (breaker.state, breaker.try_acquire()) == ("open", False)
    now[0] = 11.0
    assert [breaker.try_acquire(), breaker.try_acquire()] == [True, False]
    breaker.record_success()
    assert (breaker.state, breaker.try_acquire()) == ("closed", True)


@pytest.mark.parametrize("upstream", [True, False])
def test_a_topic_rule_whose_embedding_server_is_down_matches_nothing(serve, tmp_path, caplog, upstream):
    rules = tmp_path / "rules.toml"
    rule = TopicRule("pay", "retrieve", ("When is payday?",), embedder="openai:m@http://127.0.0.1:9/v1")
    rules.write_text(rule.to_toml())
    address, _ = serve(upstream=upstream, gate="logprob:mean", rules=str(rules))
    report = ask(address, KNOWN, model="knowgate").json()["knowgate"]
    assert (report["retrieve"], report.get("rule")) == (False, None)
    assert httpx.post(f"{address}/v1/decide", json={"question": KNOWN}, timeout=30).status_code == 200
    assert "A topic rule failed" in caplog.text


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 5), (0.2, 1)])  # a timeout is enough
def test_a_topic_rule_is_not_asked_for_a_while_after_several_failures_or_a_timeout(seconds, calls):
    class Failing:
        count = 0

        def embed(self, texts):
            self.count += 1
            time.sleep(seconds)
            raise ServerError("the server is down")

    rule = GuardedTopicRule("pay", "retrieve", ("When is payday?",), timeout=0.2 if seconds else PATIENCE)
    rule.__dict__["model"] = model = Failing()
    assert [rule.matches("When is payday?", None) for _ in range(8)] == [False] * 8
    assert (model.count, rule.breaker.state) == (calls, "open")


def test_topics_with_one_embedding_model_share_a_breaker_and_load_their_examples(monkeypatch):
    loaded = []
    monkeypatch.setattr(GuardedTopicRule, "load", lambda rule: loaded.append(rule.name))
    topics = [
        TopicRule(name, "retrieve", ("When?",), embedder=f"openai:{name[0]}@http://127.0.0.1:9/v1")
        for name in ("a1", "a2", "b1")
    ]
    first, second, third = guard_topics(RuleSet(tuple(topics)), gate_seconds=5.0).rules
    assert (loaded, first.timeout) == (["a1", "a2", "b1"], 2.0)
    assert first.breaker is second.breaker is not third.breaker
