"""The arbiter with an upstream: its answer with passages against its draft."""

import pytest

import knowgate as kg
from knowgate.server import ServeOptions, create_app
from knowgate.types import Arbiter, Belief, Signal
from tests.server.test_chat import ask


class FirmArbiter(Arbiter):
    """Believes what it is told to. Remembers whether both answers came with log-probabilities."""

    name, fingerprint, needs = "firm", "firm", frozenset({Signal.LOGPROBS})

    def __init__(self, closed, error=None):
        self.closed, self.error, self.seen = closed, error, []

    def believe(self, answers):
        if self.error is not None:
            raise self.error
        self.seen += [both.closed.tokens is not None and both.open.tokens is not None for both in answers]
        return [Belief(self.closed, 0.5, "so it was told") for _ in answers]


def with_arbiter(arbiter):
    def change(service):
        service.keeper.rag = service.keeper.rag.altered(arbiter=arbiter)

    return change


@pytest.mark.parametrize(("closed", "text"), [(0.9, "The answer is 42."), (0.1, "From the passages: 43.")])
def test_the_answer_that_is_believed_more_is_the_reply(serve, stub, closed, text):
    stub.sure, arbiter = -3.0, FirmArbiter(closed)
    address, _ = serve(gate="logprob:mean", change=with_arbiter(arbiter))
    reply = ask(address).json()
    assert reply["choices"][0]["message"]["content"] == text
    assert reply["knowgate"]["choice"]["given"] == ("draft" if closed > 0.5 else "passages")
    assert (reply["choices"][0].get("logprobs"), arbiter.seen) == (None, [True])


def test_an_arbiter_that_fails_is_left_out_and_said(serve, stub):
    stub.sure = -3.0
    address, _ = serve(gate="logprob:mean", change=with_arbiter(FirmArbiter(0.9, RuntimeError("secret words"))))
    reply = ask(address)
    assert reply.json()["choices"][0]["message"]["content"] == "From the passages: 43."
    assert (reply.json()["knowgate"]["degraded"], "secret" in reply.text) == (["arbiter"], False)


def test_a_stream_is_not_weighed(serve, stub):
    stub.sure, arbiter = -3.0, FirmArbiter(0.9)
    address, _ = serve(gate="logprob:mean", change=with_arbiter(arbiter))
    assert "passages: " in ask(address, stream=True).text
    assert arbiter.seen == []


def test_by_default_an_answer_with_passages_that_cannot_tell_gives_way(serve, stub, monkeypatch):
    stub.sure = -3.0
    monkeypatch.setattr(
        type(stub), "answer", lambda self, body: "The answer is 42." if "logprobs" in body else "I do not know."
    )
    address, _ = serve(gate="logprob:mean")
    assert ask(address).json()["choices"][0]["message"]["content"] == "The answer is 42."


def test_an_arbiter_has_nothing_to_weigh_where_the_gate_reads_no_draft(made, stub):
    settings = kg.Settings(gate="always", docs=made.docs, arbiter="rules")
    with pytest.raises(kg.KnowgateError, match="weighs drafts"):
        create_app(settings, ServeOptions(upstream=stub.url))
