"""What fails several times is left alone, tried again after a while, and used again when it works."""

import threading

import pytest

from knowgate.server.chat.gate_service import GateService
from tests.server.test_chat import ask
from tests.server.test_failures import BrokenGate, with_keeper
from tests.server.test_ways import FOUND
from tests.support.processes import PATIENCE


class MoodyRetriever:
    """Fails while it is told to."""

    name, fingerprint = "moody", "moody"

    def __init__(self):
        self.fails, self.asked = True, 0

    def search(self, queries, k):
        self.asked += 1
        if self.fails:
            raise RuntimeError("secret words")
        return [FOUND for _ in queries]


def with_parts(seconds=30, **parts):
    def change(service):
        with_keeper(service, GateService(service.keeper.rag.replace(**parts), seconds=seconds, strict=False))

    return change


def pass_time(breaker):
    """As if its pause were over."""
    breaker.opened -= 2 * breaker.pause


def test_a_retriever_that_failed_too_often_is_left_alone_until_one_request_tries_it(serve):
    moody = MoodyRetriever()
    address, app = serve(gate="always", change=with_parts(retriever=moody))
    told = [ask(address).json()["knowgate"] for _ in range(7)]
    assert moody.asked == 5
    assert all(one["degraded"] == ["retriever"] and one["passages"] == [] for one in told)
    moody.fails = False
    pass_time(app.state.service.keeper.retriever_breaker)
    found = [ask(address).json()["knowgate"] for _ in range(2)]
    assert [(one["degraded"], len(one["passages"])) for one in found] == [([], 1), ([], 1)]


def test_a_gate_is_used_again_when_it_works(serve):
    score = [float("nan")]
    address, app = serve(gate="always", change=with_parts(gate=BrokenGate(lambda questions: score)))
    assert [ask(address).json()["knowgate"]["degraded"] for _ in range(6)] == [["gate"]] * 6
    score[0] = 0.0
    assert ask(address).json()["knowgate"]["degraded"] == ["gate"]
    pass_time(app.state.service.keeper.gate_breaker)
    assert ask(address).json()["knowgate"]["retrieve"] is False


def test_an_upstream_is_used_again_when_it_works(serve, stub):
    stub.status = 500
    address, app = serve(gate="never")
    assert [ask(address).status_code for _ in range(6)] == [500] * 5 + [503]
    stub.status = 200
    assert ask(address).status_code == 503
    (breaker,) = app.state.service.forwarding.upstream.breakers
    pass_time(breaker)
    assert [ask(address).status_code for _ in range(2)] == [200, 200]


class HeldRetriever(MoodyRetriever):
    def __init__(self):
        super().__init__()
        self.let_go = threading.Event()

    def search(self, queries, k):
        self.let_go.wait(PATIENCE)
        return [FOUND for _ in queries]


def test_a_retriever_that_takes_too_long_is_an_answer_from_memory(serve):
    held = HeldRetriever()
    address, _ = serve(gate="always", change=with_parts(seconds=0.3, retriever=held))
    told = ask(address).json()["knowgate"]
    held.let_go.set()
    assert (told["degraded"], told["passages"]) == (["retriever"], [])


@pytest.mark.parametrize("way", ["draft", "race"])
def test_a_retriever_that_fails_beside_a_sure_draft_is_nobodys_business(serve, way):
    address, _ = serve(gate="logprob:mean", options={"way": way}, change=with_parts(retriever=MoodyRetriever()))
    assert ask(address).json()["knowgate"]["degraded"] == []
