"""The three modes of forwarding to an upstream, and the placement of passages."""

import threading

import pytest

import knowgate as kg
from knowgate.server.app import create_app
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.request_formats import insert_passages
from knowgate.server.json_api import ApiError
from knowgate.server.options import ServeOptions
from knowgate.types import Passage
from tests.server.conftest import UNKNOWN
from tests.server.test_chat import ask
from tests.support.processes import PATIENCE

FOUND = [Passage("d1", "The capital of Babakoland is Babakostad.", "Towns")]


class WatchedRetriever:
    """Says when it was asked, remembers how many answers the stub had given by then, and may be held up."""

    name, fingerprint = "watched", "watched"

    def __init__(self, stub=None, *, held=False):
        self.stub = stub
        self.answered = []
        self.asked, self.let_go, self.done = threading.Event(), threading.Event(), threading.Event()
        if not held:
            self.let_go.set()

    def search(self, queries, k):
        self.answered.append(self.stub.answered if self.stub else 0)
        self.asked.set()
        self.let_go.wait(PATIENCE)
        self.done.set()
        return [FOUND for _ in queries]


def use_retriever(retriever):
    def change(service):
        rag = service.gate_service.rag.replace(retriever=retriever)
        service.gate_service = service.forwarder.gate_service = GateService(rag, timeout=30, strict=False)

    return change


def test_draft_mode_searches_after_the_draft(serve, stub):
    stub.sure, watched = -3.0, WatchedRetriever(stub)
    address, _ = serve(gate="logprob:mean", options={"way": "draft"}, change=use_retriever(watched))
    report = ask(address).json()["knowgate"]
    assert (report["way"], report["retrieve"], len(stub.bodies)) == ("draft", True, 2)
    assert watched.answered == [1]


def test_race_mode_searches_during_the_draft(serve, stub):
    watched = WatchedRetriever(stub)
    address, _ = serve(gate="logprob:mean", options={"way": "race"}, change=use_retriever(watched))
    stub.sure, stub.waits_for = -3.0, watched.asked  # there is no draft before the search has begun
    report = ask(address).json()["knowgate"]
    assert (report["way"], [item["id"] for item in report["passages"]]) == ("race", ["d1"])
    assert watched.answered == [0]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_confident_draft_does_not_wait_for_the_search(serve, stub, streamed):
    watched = WatchedRetriever(held=True)
    address, _ = serve(gate="logprob:mean", options={"way": "race"}, change=use_retriever(watched))
    reply = ask(address, stream=streamed)
    assert not watched.done.is_set()
    watched.let_go.set()
    assert reply.headers["x-knowgate-retrieve"] == "false"
    assert len(stub.bodies) == 1


def test_question_mode_makes_one_call(serve, stub):
    address, _ = serve(gate="always", options={"way": "question"})
    assert ask(address).json()["knowgate"]["way"] == "question"
    assert len(stub.bodies) == 1


def test_question_mode_rejects_a_gate_that_reads_drafts(invented, stub):
    settings = kg.PipelineOptions(gate="logprob:mean", docs=invented.docs)
    with pytest.raises(kg.KnowgateError, match=r"reads a draft answer, but .* Set way='draft' or way='race'"):
        create_app(settings, ServeOptions(upstream=stub.url, way="question"))


def test_question_mode_rejects_an_arbiter_that_compares_drafts(invented, stub):
    settings = kg.PipelineOptions(gate="always", docs=invented.docs, arbiter="rules:make_drafts=true")
    with pytest.raises(kg.KnowgateError, match=r"compares draft answers, but way='question' generates none"):
        create_app(settings, ServeOptions(upstream=stub.url, way="question"))


def test_a_gate_that_an_upstream_does_not_support_is_rejected_at_startup(invented, stub):
    with pytest.raises(kg.KnowgateError, match="needs labels"):
        create_app(kg.PipelineOptions(gate="prompt", docs=invented.docs), ServeOptions(upstream=stub.url))


def test_a_follow_up_is_searched_together_with_the_earlier_question(serve, stub):
    watched = WatchedRetriever()
    asked = []
    watched.search = lambda queries, k: asked.extend(queries) or [FOUND for _ in queries]
    address, _ = serve(gate="always", change=use_retriever(watched))
    turns = [UNKNOWN, "Babakostad", "And its river?"]
    messages = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), turns, strict=True)
    ]
    ask(address, messages=messages)
    assert asked == [f"{UNKNOWN} And its river?"]


# --- where passages go ----------------------------------------------------------------------------


def test_user_placement_puts_passages_before_the_last_message():
    body = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}], "seed": 1}
    sent = insert_passages(body, FOUND, "user")
    assert sent["messages"][0] == body["messages"][0]
    assert sent["seed"] == 1
    assert (
        '<passage id="1">\nTowns\nThe capital of Babakoland is Babakostad.\n</passage>'
        in sent["messages"][1]["content"]
    )
    assert sent["messages"][1]["content"].endswith("</passages>\n\nWho?")


def test_system_placement_extends_or_creates_the_system_prompt():
    with_one = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}]}
    without = {"messages": [{"role": "user", "content": "Who?"}]}
    assert insert_passages(with_one, FOUND, "system")["messages"][0]["content"].startswith("Be kind.\n\nPassages")
    assert [item["role"] for item in insert_passages(without, FOUND, "system")["messages"]] == ["system", "user"]


def test_documents_placement_adds_a_field():
    body = {"messages": [{"role": "user", "content": "Who?"}]}
    sent = insert_passages(body, FOUND, "documents")
    assert sent["messages"] == body["messages"]
    assert sent["documents"] == [{"id": "d1", "title": "Towns", "text": FOUND[0].text}]


def test_documents_placement_keeps_the_documents_of_the_client():
    own = {"id": "mine", "text": "my own"}
    body = {"messages": [{"role": "user", "content": "Who?"}], "documents": [own]}
    sent = insert_passages(body, FOUND, "documents")
    assert [item["id"] for item in sent["documents"]] == ["mine", "d1"]
    assert body["documents"] == [own]
    with pytest.raises(ApiError, match="'documents' must be a list"):
        insert_passages({**body, "documents": "x"}, FOUND, "documents")


def test_a_message_in_parts_gets_passages_as_a_part():
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]}
    parts = insert_passages(body, FOUND, "user")["messages"][0]["content"]
    assert (len(parts), parts[1]) == (2, {"type": "text", "text": "Who?"})


def test_without_a_named_gate_an_upstream_that_returns_only_text_takes_one_call_and_always_retrieves(serve, stub):
    stub.refuses = ("logprobs",)
    address, _ = serve(options={"upstream_model": "stub"})
    stub.bodies.clear()  # what it was asked to find out what it returns
    report = ask(address).json()["knowgate"]
    assert (report["gate"], report["retrieve"], len(stub.bodies)) == ("always", True, 1)


def test_an_upstream_that_is_down_does_not_keep_the_server_from_starting(invented):
    settings = kg.PipelineOptions(model=invented.model, docs=invented.docs)
    app = create_app(settings, ServeOptions(upstream="http://127.0.0.1:1/v1", upstream_model="m"))
    assert app.state.service.gate_service.rag.gate.name == "logprob"


def test_a_cookie_of_the_upstream_is_not_sent_with_the_request_of_another_client(serve, stub, monkeypatch):
    plain = stub._plain

    async def set_cookie(body):
        response = await plain(body)
        response.set_cookie("session", "7")
        return response

    monkeypatch.setattr(stub, "_plain", set_cookie)
    options = {"upstream": stub.url.replace("127.0.0.1", "localhost")}
    address, _ = serve(upstream=False, gate="never", options=options)
    for _ in range(2):
        assert ask(address).status_code == 200
    assert [headers.get("Cookie") for headers in stub.headers] == [None, None]
