"""What stands beside chats: keys, the log of decisions, metrics, pass-through, reranking, batches, many at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import knowgate as kg
from knowgate.server.app import create_app
from knowgate.server.auth.api_keys import add_key, read_keys, revoke_key
from knowgate.server.entrypoint import run_server
from knowgate.server.options import ServeOptions
from tests.server.conftest import KNOWN, UNKNOWN
from tests.server.test_chat import ask

# --- who may come in ------------------------------------------------------------------------------


def test_with_keys_only_their_holders_are_answered(serve, stub, tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, "app")
    address, _ = serve(gate="never", options={"keys": str(file)})
    url, body = f"{address}/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}
    given = [
        {},
        {"Authorization": "Bearer kg-wrong"},
        {"Authorization": f"Basic {key}"},
        {"Authorization": f"Bearer {key}"},
    ]
    assert [httpx.post(url, json=body, headers=one).status_code for one in given] == [401, 401, 401, 200]
    assert httpx.get(f"{address}/metrics").status_code == 401
    assert httpx.get(f"{address}/health").status_code == 200
    assert all(key not in str(headers) for headers in stub.headers)


def test_a_revoked_key_is_refused_by_a_running_server(serve, tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, "app")
    address, _ = serve(gate="never", options={"keys": str(file)})
    asked = {"url": f"{address}/v1/models", "headers": {"Authorization": f"Bearer {key}"}}
    assert httpx.get(**asked).status_code == 200
    revoke_key(file, "app")
    assert httpx.get(**asked).status_code == 401


def test_a_file_of_keys_holds_no_key(tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, "app")
    assert key not in file.read_text()
    assert [one.name for one in read_keys(file)] == ["app"]
    with pytest.raises(kg.KnowgateError, match="already"):
        add_key(file, "app")
    with pytest.raises(kg.KnowgateError, match="no key 'other'"):
        revoke_key(file, "other")


def test_without_keys_a_server_does_not_listen_to_the_outside(made):
    with pytest.raises(kg.KnowgateError, match="needs API keys"):
        run_server(kg.PipelineOptions(), ServeOptions(host="0.0.0.0"))


def test_without_keys_the_clients_own_key_goes_to_the_upstream(serve, stub):
    address, _ = serve(gate="never")
    body = {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}
    httpx.post(f"{address}/v1/chat/completions", json=body, headers={"Authorization": "Bearer sk-mine"})
    assert stub.headers[0]["Authorization"] == "Bearer sk-mine"


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}])
def test_pages_of_other_sites_are_refused(serve, stub, headers):
    address, _ = serve(gate="never")
    body = {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}
    reply = httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers
    assert stub.bodies == []


# --- decisions, feedback, metrics -----------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
def test_a_decision_can_be_looked_up_later_with_its_feedback(serve, tmp_path, keeps):
    address, _ = serve(gate="always", options={"decisions": str(tmp_path / "d.db"), "keep_questions": keeps})
    id = ask(address).headers["x-knowgate-id"]
    rated = httpx.post(f"{address}/v1/feedback", json={"id": id, "rating": "down", "comment": "wrong town"})
    found = httpx.get(f"{address}/v1/decisions/{id}").json()
    assert rated.status_code == 200
    assert (found["id"], found["retrieve"], found["gate"]) == (id, True, "always")
    assert [(one["rating"], one["comment"]) for one in found["feedback"]] == [("down", "wrong town")]
    assert (found.get("question") == UNKNOWN) is keeps


def test_what_was_decided_is_there_after_a_restart(serve, tmp_path):
    options = {"decisions": str(tmp_path / "d.db")}
    first, _ = serve(gate="always", options=options)
    id = ask(first).headers["x-knowgate-id"]
    httpx.get(f"{first}/v1/decisions/{id}")  # what was read is written
    second, _ = serve(gate="always", options=options)
    assert httpx.get(f"{second}/v1/decisions/{id}").json()["id"] == id


@pytest.mark.parametrize("body", [{}, {"id": 3, "rating": "up"}, {"id": "kg-1", "rating": "good"}])
def test_feedback_that_says_nothing_is_refused(serve, tmp_path, body):
    address, _ = serve(gate="always", options={"decisions": str(tmp_path / "d.db")})
    assert httpx.post(f"{address}/v1/feedback", json=body).status_code == 400


def test_unknown_decisions_and_servers_that_keep_none_answer_404(serve, tmp_path):
    with_log, _ = serve(gate="always", options={"decisions": str(tmp_path / "d.db")})
    without, _ = serve(gate="always")
    assert httpx.get(f"{with_log}/v1/decisions/kg-none").json()["error"]["code"] == "no_decision"
    assert httpx.get(f"{without}/v1/decisions/kg-none").json()["error"]["code"] == "no_log"


def test_a_file_that_is_no_database_is_refused_at_the_start(made, stub, tmp_path):
    (tmp_path / "d.db").write_text("no database" * 100)
    options = ServeOptions(upstream=stub.url, decisions=str(tmp_path / "d.db"))
    with pytest.raises(kg.KnowgateError, match="log of decisions"):
        create_app(kg.PipelineOptions(gate="always", docs=made.docs), options)


def test_what_happened_is_counted_without_a_word_of_a_question(serve):
    address, _ = serve(gate="always")
    ask(address)
    ask(address, "Thanks a lot!", knowgate={"retrieve": "never"})
    text = httpx.get(f"{address}/metrics").text
    assert 'knowgate_decisions_total{decision="retrieve",gate="always",reason="score",way="question"} 1.0' in text
    assert 'knowgate_decisions_total{decision="skip",gate="never",reason="score",way="question"} 1.0' in text
    assert 'knowgate_requests_total{route="/v1/chat/completions",status="200"} 2.0' in text
    assert "Babakoland" not in text


# --- pass-through and reranking -------------------------------------------------------------------


@pytest.mark.parametrize("path", ["completions", "embeddings", "responses"])
def test_what_is_the_upstreams_alone_passes_through(serve, path):
    address, _ = serve(gate="always")
    body = {"model": "m", "input": ["one", "two"], "prompt": ["one", "two"], "nobody_knows": 1}
    reply = httpx.post(f"{address}/v1/{path}", json=body)
    assert reply.json() == {"object": f"/v1/{path}", "got": body}
    assert reply.headers["x-knowgate-way"] == "pass-through"


def test_without_an_upstream_there_is_nothing_to_pass_on(serve):
    address, _ = serve(upstream=False, gate="never")
    assert httpx.post(f"{address}/v1/embeddings", json={"input": "x"}).json()["error"]["code"] == "no_upstream"


class LengthReranker:
    name, fingerprint = "length", "length"

    def score(self, questions, passages):
        return [[float(len(one.text)) for one in row] for row in passages]


def test_documents_are_reranked_as_cohere_does(serve):
    def change(service):
        object.__setattr__(service.keeper.rag, "reranker", LengthReranker())

    address, _ = serve(gate="always", change=change)
    body = {"query": "Who?", "documents": ["aa", {"text": "aaaa"}, "a"], "top_n": 2, "return_documents": True}
    found = httpx.post(f"{address}/v1/rerank", json=body).json()["results"]
    assert found == [
        {"index": 1, "relevance_score": 4.0, "document": {"text": "aaaa"}},
        {"index": 0, "relevance_score": 2.0, "document": {"text": "aa"}},
    ]
    assert httpx.post(f"{address}/v1/rerank", json={"query": "Who?", "documents": [3]}).status_code == 400


# --- many at once ---------------------------------------------------------------------------------


def test_questions_that_come_together_are_answered_together(serve):
    seen, hold = [], threading.Event()

    def change(service):
        model, read = service.keeper.rag.model, service.keeper.rag.model.read

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
    told = [reply["choices"][0]["message"]["content"] for reply in replies]
    assert told == ["Bababastad", "Babakostad"] * 4


def test_one_bad_question_does_not_fail_those_it_came_with(serve):
    def change(service):
        model, generate = service.keeper.rag.model, service.keeper.rag.model.generate

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
def test_too_many_requests_are_told_to_come_again(serve, stub, streamed):
    stub.slow = 0.5
    address, app = serve(gate="never", options={"waiting": 2})
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: ask(address, stream=streamed), range(6)))
    statuses = sorted(reply.status_code for reply in replies)
    assert statuses == [200, 200, 429, 429, 429, 429]
    assert {reply.headers["retry-after"] for reply in replies if reply.status_code == 429} == {"1"}
    assert app.state.service.at_work == 0
    assert ask(address).status_code == 200
