"""The three ways of a request with an upstream, and where passages go."""

import threading

import pytest

import knowgate as kg
from knowgate.server.app import create_app
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.request_formats import insert_passages
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


def with_retriever(retriever):
    def change(service):
        rag = service.keeper.rag.replace(retriever=retriever)
        service.keeper = service.forwarding.keeper = GateService(rag, seconds=30, strict=False)

    return change


def test_draft_first_searches_only_after_the_draft(serve, stub):
    stub.sure, watched = -3.0, WatchedRetriever(stub)
    address, _ = serve(gate="logprob:mean", options={"way": "draft"}, change=with_retriever(watched))
    told = ask(address).json()["knowgate"]
    assert (told["way"], told["retrieve"], len(stub.bodies)) == ("draft", True, 2)
    assert watched.answered == [1]


def test_a_race_searches_beside_the_draft(serve, stub):
    watched = WatchedRetriever(stub)
    stub.sure, stub.waits_for = -3.0, watched.asked  # there is no draft before the search has begun
    address, _ = serve(gate="logprob:mean", options={"way": "race"}, change=with_retriever(watched))
    told = ask(address).json()["knowgate"]
    assert (told["way"], [one["id"] for one in told["passages"]]) == ("race", ["d1"])
    assert watched.answered == [0]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_sure_draft_does_not_wait_for_the_search_it_raced_with(serve, stub, streamed):
    watched = WatchedRetriever(held=True)
    address, _ = serve(gate="logprob:mean", options={"way": "race"}, change=with_retriever(watched))
    reply = ask(address, stream=streamed)
    assert not watched.done.is_set()
    watched.let_go.set()
    assert reply.headers["x-knowgate-retrieve"] == "false"
    assert len(stub.bodies) == 1


def test_by_the_question_alone_one_call_is_made(serve, stub):
    address, _ = serve(gate="always", options={"way": "question"})
    assert ask(address).json()["knowgate"]["way"] == "question"
    assert len(stub.bodies) == 1


def test_a_gate_that_reads_a_draft_cannot_go_by_the_question_alone(made, stub):
    settings = kg.PipelineOptions(gate="logprob:mean", docs=made.docs)
    with pytest.raises(kg.KnowgateError, match="reads a draft: use --way draft or race"):
        create_app(settings, ServeOptions(upstream=stub.url, way="question"))


def test_a_gate_that_needs_what_an_upstream_does_not_give_is_refused_at_the_start(made, stub):
    with pytest.raises(kg.KnowgateError, match="needs labels"):
        create_app(kg.PipelineOptions(gate="prompt", docs=made.docs), ServeOptions(upstream=stub.url))


def test_a_follow_up_is_searched_with_the_question_before_it(serve, stub):
    watched = WatchedRetriever()
    asked = []
    watched.search = lambda queries, k: asked.extend(queries) or [FOUND for _ in queries]
    address, _ = serve(gate="always", change=with_retriever(watched))
    turns = [UNKNOWN, "Babakostad", "And its river?"]
    messages = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), turns, strict=True)
    ]
    ask(address, messages=messages)
    assert asked == [f"{UNKNOWN} And its river?"]


# --- where passages go ----------------------------------------------------------------------------


def test_passages_go_before_the_last_user_turn():
    body = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}], "seed": 1}
    sent = insert_passages(body, FOUND, "user")
    assert sent["messages"][0] == body["messages"][0]
    assert sent["seed"] == 1
    assert (
        '<passage id="1">\nTowns\nThe capital of Babakoland is Babakostad.\n</passage>'
        in sent["messages"][1]["content"]
    )
    assert sent["messages"][1]["content"].endswith("</passages>\n\nWho?")


def test_passages_go_into_the_system_prompt_or_become_one():
    with_one = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}]}
    without = {"messages": [{"role": "user", "content": "Who?"}]}
    assert insert_passages(with_one, FOUND, "system")["messages"][0]["content"].startswith("Be kind.\n\nPassages")
    assert [one["role"] for one in insert_passages(without, FOUND, "system")["messages"]] == ["system", "user"]


def test_passages_become_a_field_of_documents():
    body = {"messages": [{"role": "user", "content": "Who?"}]}
    sent = insert_passages(body, FOUND, "documents")
    assert sent["messages"] == body["messages"]
    assert sent["documents"] == [{"id": "d1", "title": "Towns", "text": FOUND[0].text}]


def test_a_turn_in_parts_gets_passages_as_a_part():
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]}
    parts = insert_passages(body, FOUND, "user")["messages"][0]["content"]
    assert (len(parts), parts[1]) == (2, {"type": "text", "text": "Who?"})
