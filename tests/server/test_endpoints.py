"""Endpoints other than chats: decision log, feedback, metrics, forwarding, reranking; and batches and limits."""

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import knowgate as kg
from knowgate.server.app import create_app
from knowgate.server.chat import decisions
from knowgate.server.chat.decisions import MAX_DOCUMENT_CHARS
from knowgate.server.endpoints import ENDPOINTS
from knowgate.server.json_api import ApiError
from knowgate.server.options import ServeOptions
from knowgate.server.telemetry.metrics import SharedCall
from tests.server.conftest import KNOWN, UNKNOWN
from tests.server.test_chat import ask
from tests.support.processes import until

# --- decisions, feedback, metrics -----------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
def test_a_decision_can_be_read_with_its_feedback(serve, tmp_path, keeps):
    address, _ = serve(gate="always", options={"decisions": str(tmp_path / "d.db"), "keep_questions": keeps})
    id = ask(address).headers["x-knowgate-id"]
    rated = httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "down", "comment": "wrong town"})
    result = httpx.get(f"{address}/v1/decisions/{id}").json()
    assert rated.status_code == 200
    assert (result["id"], result["retrieve"], result["gate"]) == (id, True, "always")
    assert [(item["rating"], item["comment"]) for item in result["feedback"]] == [("down", "wrong town")]
    assert (result.get("question") == UNKNOWN) is keeps


def test_decisions_survive_a_restart(serve, tmp_path):
    options = {"decisions": str(tmp_path / "d.db")}
    first, _ = serve(gate="always", options=options)
    id = ask(first).headers["x-knowgate-id"]
    httpx.get(f"{first}/v1/decisions/{id}")  # what was read is written
    second, _ = serve(gate="always", options=options)
    assert httpx.get(f"{second}/v1/decisions/{id}").json()["id"] == id


@pytest.mark.parametrize(
    "body",
    [{}, {"id": 3, "rating": "up"}, {"id": "kg-1", "rating": "good"}, {"id": "kg-1", "rating": "up", "answer": "Rom"}],
)
def test_invalid_feedback_is_rejected(serve, tmp_path, body):
    address, _ = serve(gate="always", options={"decisions": str(tmp_path / "d.db")})
    assert httpx.post(f"{address}/v1/feedback", json=body).status_code == 400


def test_an_unknown_decision_or_a_missing_decision_log_is_404(serve, tmp_path):
    with_log, _ = serve(gate="always", options={"decisions": str(tmp_path / "d.db")})
    without, _ = serve(gate="always")
    assert httpx.get(f"{with_log}/v1/decisions/kg-none").json()["error"]["code"] == "no_decision"
    error = httpx.get(f"{without}/v1/decisions/kg-none").json()["error"]
    assert error["code"] == "no_log"
    assert "option `decisions` of `knowgate serve`" in error["message"]


def test_a_decision_log_that_is_no_database_is_rejected_at_startup(invented, stub, tmp_path):
    (tmp_path / "d.db").write_text("no database" * 100)
    options = ServeOptions(upstream=stub.url, decisions=str(tmp_path / "d.db"))
    with pytest.raises(kg.KnowgateError, match=r"the decision log .* cannot be opened"):
        create_app(kg.PipelineOptions(gate="always", docs=invented.docs), options)


def test_metrics_count_decisions_without_text_of_questions(serve):
    address, _ = serve(gate="always")
    ask(address)
    ask(address, "Thanks a lot!", knowgate={"retrieve": "never"})
    text = httpx.get(f"{address}/metrics").text
    assert 'knowgate_decisions_total{decision="retrieve",gate="always",reason="score",way="question"} 1.0' in text
    assert 'knowgate_decisions_total{decision="skip",gate="never",reason="score",way="question"} 1.0' in text
    assert 'knowgate_requests_total{route="/v1/chat/completions",status="200"} 2.0' in text
    assert "Babakoland" not in text


def test_many_requests_for_metrics_share_one_text(serve, monkeypatch):
    address, app = serve(gate="always")
    metrics = app.state.service.metrics
    format_once, calls = metrics.format, []
    monkeypatch.setattr(metrics, "format", lambda learner: calls.append(1) or format_once(learner))
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: httpx.get(f"{address}/metrics"), range(40)))
    assert {reply.status_code for reply in replies} == {200}
    assert len(calls) < 20


# --- forwarding and reranking -------------------------------------------------------------------


@pytest.mark.parametrize("path", ["completions", "embeddings", "responses"])
def test_other_endpoints_are_forwarded_to_the_upstream(serve, path):
    address, _ = serve(gate="always")
    body = {"model": "m", "input": ["one", "two"], "prompt": ["one", "two"], "nobody_knows": 1}
    reply = httpx.post(f"{address}/v1/{path}", json=body)
    assert reply.json() == {"object": f"/v1/{path}", "got": body}
    assert reply.headers["x-knowgate-way"] == "pass-through"


def test_forwarded_endpoints_need_an_upstream(serve):
    address, _ = serve(upstream=False, gate="never")
    assert httpx.post(f"{address}/v1/embeddings", json={"input": "x"}).json()["error"]["code"] == "no_upstream"


class LengthReranker:
    name, fingerprint = "length", "length"

    def score(self, questions, passages):
        return [[float(len(item.text)) for item in row] for row in passages]


class OddReranker(LengthReranker):
    """A reranker that calls a function instead of scoring."""

    def __init__(self, score):
        self.score = score


def use_reranker(reranker):
    return lambda service: object.__setattr__(service.gate_service.rag, "reranker", reranker)


@pytest.mark.parametrize(
    "score",
    [
        lambda questions, passages: [[math.nan for _ in row] for row in passages],
        lambda questions, passages: [row[1:] for row in passages],
        lambda questions, passages: [["high" for _ in row] for row in passages],
        lambda questions, passages: 1 / 0,
    ],
    ids=["NaN", "too few", "texts", "error"],
)
def test_a_reranker_that_fails_is_503(serve, score, caplog):
    address, _ = serve(gate="never", change=use_reranker(OddReranker(score)))
    reply = httpx.post(f"{address}/v1/rerank", json={"query": "Who?", "documents": ["a", "b"]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "reranker_down")
    assert "Traceback" not in caplog.text


def test_documents_are_reranked_in_batches_between_which_searches_run(serve):
    batches, is_second_batch, has_searched = [], threading.Event(), threading.Event()

    def score(questions, passages):
        if questions == ["Who?"]:  # otherwise the search reranks its passages
            batches.append(len(passages[0]))
        if len(batches) == 2 and not is_second_batch.is_set():
            is_second_batch.set()
            until(lambda: list(app.state.service.gate_service._search_lock._waiters))
        if len(batches) == 3:
            has_searched.wait(5)
        return [[float(len(passage.text)) for passage in row] for row in passages]

    address, app = serve(gate="always", change=use_reranker(OddReranker(score)))
    documents = ["x" * number for number in range(100)]
    with ThreadPoolExecutor(2) as pool:
        body = {"query": "Who?", "documents": documents, "top_n": 2, "return_documents": True}
        ranking = pool.submit(httpx.post, f"{address}/v1/rerank", json=body, timeout=30)
        assert is_second_batch.wait(10)
        assert ask(address).json()["knowgate"]["degraded"] == []
        has_searched.set()
    results = ranking.result().json()["results"]
    assert [item["index"] for item in results] == [99, 98]
    assert results[0]["document"]["text"] == documents[99]
    assert batches == [32, 32, 32, 4]


def test_long_documents_are_reranked_in_smaller_batches_by_a_reranker_in_this_process(serve):
    batches = []

    def score(questions, passages):
        batches.append(len(passages[0]))
        return [[0.5 for _ in row] for row in passages]

    address, _ = serve(gate="never", change=use_reranker(OddReranker(score)))
    documents = ["x" * length for length in (3000, 3000, 100, 100)]
    reply = httpx.post(f"{address}/v1/rerank", json={"query": "Who?", "documents": documents})
    assert (reply.status_code, batches) == (200, [1, 3])


def test_a_long_document_is_returned_whole_and_a_long_query_is_rejected(serve):
    lengths = []

    def score(questions, passages):
        lengths.extend(len(passage.text) for passage in passages[0])
        return [[1.0 for _ in row] for row in passages]

    address, _ = serve(gate="never", change=use_reranker(OddReranker(score)))
    body = {"query": "Who?", "documents": ["x" * 1_000_000], "return_documents": True}
    (result,) = httpx.post(f"{address}/v1/rerank", json=body).json()["results"]
    assert (len(result["document"]["text"]), lengths) == (1_000_000, [MAX_DOCUMENT_CHARS])
    assert httpx.post(f"{address}/v1/rerank", json={"query": "x" * 20_001, "documents": ["a"]}).status_code == 400


def test_reranking_follows_the_api_of_cohere(serve):
    def change(service):
        object.__setattr__(service.gate_service.rag, "reranker", LengthReranker())

    address, _ = serve(gate="always", change=change)
    body = {"query": "Who?", "documents": ["aa", {"text": "aaaa"}, "a"], "top_n": 2, "return_documents": True}
    result = httpx.post(f"{address}/v1/rerank", json=body).json()["results"]
    assert result == [
        {"index": 1, "relevance_score": 4.0, "document": {"text": "aaaa"}},
        {"index": 0, "relevance_score": 2.0, "document": {"text": "aa"}},
    ]
    assert httpx.post(f"{address}/v1/rerank", json={"query": "Who?", "documents": [3]}).status_code == 400


# --- batches and limits ---------------------------------------------------------------------------------


def test_simultaneous_questions_are_answered_in_one_batch(serve):
    seen, hold = [], threading.Event()

    def change(service):
        model, read = service.gate_service.rag.model, service.gate_service.rag.model.read

        def watched(prompts, want):
            seen.append(len(prompts))
            hold.wait(0.5)
            return read(prompts, want)

        model.read = watched

    address, _ = serve(upstream=False, gate="logprob:mean", change=change)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda text: ask(address, text, model="knowgate").json(), [KNOWN, UNKNOWN] * 4))
    assert sum(seen) == 8
    assert len(seen) < 8
    report = [reply["choices"][0]["message"]["content"] for reply in replies]
    assert report == ["Bababastad", "Babakostad"] * 4


def test_one_failing_question_does_not_fail_its_batch(serve):
    def change(service):
        model, generate = service.gate_service.rag.model, service.gate_service.rag.model.generate

        def fragile(prompts, **options):
            if any("Babakoland" in prompt.text for prompt in prompts):
                raise RuntimeError("this one breaks it")
            return generate(prompts, **options)

        model.generate = fragile

    address, _ = serve(upstream=False, gate="never", change=change)
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda text: ask(address, text, model="knowgate"), [KNOWN, UNKNOWN] * 2))
    assert [reply.status_code for reply in replies] == [200, 500] * 2


@pytest.mark.parametrize("streamed", [False, True])
def test_too_many_simultaneous_requests_are_answered_429(serve, stub, streamed):
    stub.slow = 0.5
    address, app = serve(gate="never", options={"waiting": 2})
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: ask(address, stream=streamed), range(6)))
    statuses = sorted(reply.status_code for reply in replies)
    assert statuses == [200, 200, 429, 429, 429, 429]
    assert {reply.headers["retry-after"] for reply in replies if reply.status_code == 429} == {"1"}
    until(lambda: app.state.service.active_requests.count == 0)
    assert ask(address).status_code == 200


# --- load -----------------------------------------------------------------------------------------


def test_only_checks_metrics_and_pages_need_no_free_slot():
    free = {endpoint.path for endpoint in ENDPOINTS if not endpoint.needs_slot}
    pages = {"/", "/docs", "/openapi.json", "/v1/dashboard", "/v1/learning"}
    assert free == {"/health", "/ready", "/metrics", *pages}


def test_the_list_of_models_needs_a_free_slot(serve):
    address, app = serve(gate="never")
    app.state.service.active_requests.total = 0
    assert httpx.get(f"{address}/v1/models").status_code == 429
    assert httpx.get(f"{address}/ready").status_code == 200


def test_requests_that_wait_for_a_shared_call_share_its_result():
    async def share():
        results = []
        shared = SharedCall()

        async def work():
            results.append(len(results))
            await asyncio.sleep(0)
            return results[-1]

        first = await asyncio.gather(*[shared.run(work) for _ in range(100)])
        second = await asyncio.gather(*[shared.run(work) for _ in range(100)])
        return set(first), set(second), results

    assert asyncio.run(share()) == ({0}, {1}, [0, 1])  # later requests get a newer result


def test_a_shared_call_that_fails_fails_for_all_and_is_tried_again():
    async def share():
        shared = SharedCall()

        async def fail():
            raise ValueError

        errors = await asyncio.gather(*[shared.run(fail) for _ in range(3)], return_exceptions=True)
        return [type(error) for error in errors], await shared.run(lambda: asyncio.sleep(0, "done"))

    assert asyncio.run(share()) == ([ValueError] * 3, "done")


def test_many_requests_for_the_models_ask_the_upstream_few_times(serve, monkeypatch):
    address, app = serve(gate="never", options={"waiting": 200})
    upstream = app.state.service.forwarder.upstream
    counts, list_models = [], upstream.list_models

    async def count(headers):
        counts.append(len(counts))
        await asyncio.sleep(0.5)
        return await list_models(headers)

    monkeypatch.setattr(upstream, "list_models", count)
    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: httpx.get(f"{address}/v1/models", timeout=60), range(20)))
    assert {reply.status_code for reply in replies} == {200}
    assert len(counts) < len(replies)
    assert len({reply.content for reply in replies}) <= len(counts)


def test_a_list_of_questions_that_fails_midway_is_not_logged(serve, tmp_path, monkeypatch):
    address, _ = serve(upstream=False, gate="prompt", options={"decisions": str(tmp_path / "d.db")})
    decide, calls = decisions._decide_question, []

    async def fail_at_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise ApiError(502, "the LLM failed", "model_failed")
        return await decide(*arguments)

    monkeypatch.setattr(decisions, "_decide_question", fail_at_second)
    reply = httpx.post(f"{address}/v1/decide", json={"questions": [KNOWN, UNKNOWN]}, timeout=30)
    assert (reply.status_code, len(calls)) == (502, 2)
    assert httpx.get(f"{address}/v1/dashboard").json()["figures"]["arms"]["all"]["decided"] == 0


@pytest.mark.parametrize("path", ["feedback", "forget", "learning/clear"])
def test_many_unknown_fields_are_one_error(serve, tmp_path, path):
    address, _ = serve(gate="never", options={"decisions": str(tmp_path / "d.db"), "shadow": True})
    reply = httpx.post(f"{address}/v1/{path}", json={f"x{number}": 1 for number in range(10_000)}, timeout=30)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "the request body has more than 20 fields.")


def test_a_decision_of_a_rule_is_recorded(serve, tmp_path):
    address, _ = serve(gate="logprob:first", options={"decisions": str(tmp_path / "d.db")})
    reply = httpx.post(f"{address}/v1/decide", json={"question": "Thanks a lot!"}, timeout=30)
    assert reply.headers["x-knowgate-retrieve"] == "false"
    record = httpx.get(f"{address}/v1/decisions/{reply.json()['id']}").json()
    assert (record["rule"], record["retrieve"]) == (reply.json()["rule"], False)
