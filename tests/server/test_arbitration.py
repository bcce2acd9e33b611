"""Arbitration with an upstream: its answer with passages against its draft."""

import asyncio
import json
import threading
from typing import ClassVar

import httpx
import pytest

import knowgate as kg
from knowgate.server.app import create_app
from knowgate.server.options import ServeOptions
from knowgate.server.upstream.draft import MAX_BEGINNING_CHARS, read_until
from knowgate.types import Arbiter, Belief, Signal
from tests.server.conftest import UNKNOWN
from tests.server.test_chat import ask, events
from tests.server.test_forwarding import use_retriever
from tests.server.test_upstream_responses import chunk


class FixedArbiter(Arbiter):
    """Believes what it is report to. Remembers whether both answers came with log-probabilities."""

    name, fingerprint, needs = "firm", "firm", frozenset({Signal.LOGPROBS})

    def __init__(self, closed, error=None):
        self.closed, self.error, self.seen = closed, error, []

    def estimate(self, answers):
        if self.error is not None:
            raise self.error
        self.seen += [both.closed.tokens is not None and both.open.tokens is not None for both in answers]
        return [Belief(self.closed, 0.5, "so it was report") for _ in answers]


def use_arbiter(arbiter):
    def change(service):
        service.gate_service.rag = service.gate_service.rag.replace(arbiter=arbiter)

    return change


@pytest.mark.parametrize(("closed", "text"), [(0.9, "The answer is 42."), (0.1, "From the passages: 43.")])
def test_the_more_probable_answer_is_the_response(serve, stub, closed, text):
    stub.sure, arbiter = -3.0, FixedArbiter(closed)
    address, _ = serve(gate="logprob:mean", change=use_arbiter(arbiter))
    reply = ask(address).json()
    assert reply["choices"][0]["message"]["content"] == text
    assert reply["knowgate"]["choice"]["given"] == ("draft" if closed > 0.5 else "passages")
    assert (reply["choices"][0].get("logprobs"), arbiter.seen) == (None, [True])


def test_a_failing_arbiter_is_skipped_and_reported(serve, stub):
    stub.sure = -3.0
    address, _ = serve(gate="logprob:mean", change=use_arbiter(FixedArbiter(0.9, RuntimeError("secret words"))))
    reply = ask(address)
    assert reply.json()["choices"][0]["message"]["content"] == "From the passages: 43."
    assert (reply.json()["knowgate"]["degraded"], "secret" in reply.text) == (["arbiter"], False)


@pytest.mark.parametrize(("closed", "text"), [(0.9, "The answer is 42."), (0.1, "From the passages: 43.")])
def test_a_stream_with_a_complete_draft_is_arbitrated(serve, stub, closed, text):
    stub.sure, arbiter = -3.0, FixedArbiter(closed)
    address, _ = serve(gate="logprob:mean", change=use_arbiter(arbiter))
    reply = ask(address, stream=True)
    chunks = events(reply)
    assert said(chunks) == text
    assert chunks[0]["knowgate"]["choice"]["given"] == ("draft" if closed > 0.5 else "passages")
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert reply.text.endswith("data: [DONE]\n\n")
    assert not any(chunk["choices"][0].get("logprobs") for chunk in chunks)
    assert arbiter.seen == [True]


def test_a_stream_with_a_partial_draft_is_not_arbitrated_and_reports_it(serve, stub):
    stub.sure, arbiter = -3.0, FixedArbiter(0.9)
    address, _ = serve(gate="logprob:first", change=use_arbiter(arbiter))
    chunks = events(ask(address, stream=True))
    assert said(chunks) == "From the passages: 43."
    assert chunks[0]["knowgate"]["unweighed"].endswith("only the beginning of this stream was drafted")
    assert arbiter.seen == []


def test_a_stream_is_held_back_only_until_the_arbiter_accepts_it(serve, stub, monkeypatch):
    """The rules need 80 characters: then it goes out, while the rest is still to come."""
    stub.sure, long = -3.0, "Its capital, as the passages say in some detail, is Babakostad, " * 4
    answers = {True: long.strip(), False: "The answer is 42."}
    monkeypatch.setattr(type(stub), "answer", lambda self, body: answers["<passages>" in str(body)])
    address, _ = serve(gate="logprob:mean")
    sent, go, send = [], threading.Event(), type(stub)._send

    async def stopped(self, reply, body, delta, finish=None):
        await send(self, reply, body, delta, finish)
        sent.append(len(delta.get("content", "")) if "<passages>" in str(body) else 0)
        while sum(sent) > 100 and not go.is_set():
            await asyncio.sleep(0.01)

    monkeypatch.setattr(type(stub), "_send", stopped)
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": UNKNOWN}]}
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=30) as reply:
        pieces = reply.iter_text()
        heard = next(pieces)  # the upstream waits for us to have heard it
        go.set()
        heard += "".join(pieces)
    chunks = [json.loads(line[6:]) for line in heard.splitlines() if line.startswith("data: {")]
    assert said(chunks) == long.strip()
    choice = chunks[0]["knowgate"]["choice"]
    assert (choice["given"], choice["arbiter"]) == ("passages", "rules")


def test_a_stream_that_abstains_is_replaced_by_its_draft(serve, stub, monkeypatch):
    stub.sure, answers = -3.0, {True: "The passages do not mention it.", False: "The answer is 42."}
    monkeypatch.setattr(type(stub), "answer", lambda self, body: answers["<passages>" in str(body)])
    address, _ = serve(gate="logprob:mean")
    chunks = events(ask(address, stream=True))
    assert said(chunks) == "The answer is 42."
    assert chunks[0]["knowgate"]["choice"] == {
        "given": "draft",
        "arbiter": "rules",
        "reason": "the arbiter rules gives the answer from memory: the answer with passages says it cannot tell",
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("empty", ["", " ", "\n"])
def test_an_empty_draft_is_not_the_reply(serve, stub, monkeypatch, empty, stream):
    stub.sure, answers = -0.001, {True: "From the passages: 43.", False: empty}
    monkeypatch.setattr(type(stub), "answer", lambda self, body: answers["<passages>" in str(body)])
    address, _ = serve(gate="logprob:mean", change=use_arbiter(FixedArbiter(0.9)))
    reply = ask(address, stream=stream)
    answer = said(events(reply)) if stream else reply.json()["choices"][0]["message"]["content"]
    report = events(reply)[0]["knowgate"] if stream else reply.json()["knowgate"]
    assert answer == "From the passages: 43."
    assert (report["retrieve"], report["need"], report["degraded"]) == (True, 1.0, [])
    assert report["reason"].endswith("its answer without passages is empty")


def test_an_empty_draft_is_not_the_reply_after_an_empty_search(serve, stub, monkeypatch):
    stub.sure = -0.001
    monkeypatch.setattr(type(stub), "answer", lambda self, body: "" if "logprobs" in body else "The second attempt.")
    address, _ = serve(gate="logprob:mean", change=use_retriever(EmptyRetriever()))
    reply = ask(address).json()
    assert reply["choices"][0]["message"]["content"] == "The second attempt."
    assert reply["usage"]["completion_tokens"] == 8  # of both calls
    assert reply["knowgate"]["notes"] == ["nothing found"]


class EmptyRetriever:
    name, fingerprint = "empty", "empty"

    def search(self, queries, k):
        return [[] for _ in queries]


@pytest.mark.parametrize("path", ["completions", "responses", "decide"])
def test_an_empty_separate_draft_means_to_retrieve(serve, stub, monkeypatch, path):
    stub.sure, stub.speaks = -0.001, True
    monkeypatch.setattr(type(stub), "answer", lambda self, body: "43" if "<passages>" in str(body) else "")
    address, _ = serve(gate="logprob:mean")
    fields = {"completions": "prompt", "responses": "input", "decide": "question"}
    reply = httpx.post(f"{address}/v1/{path}", json={"model": "m", fields[path]: UNKNOWN}, timeout=30)
    assert reply.headers["x-knowgate-retrieve"] == "true"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("empty", ["", "\n"])
def test_an_empty_answer_with_passages_is_replaced_by_the_draft(serve, stub, monkeypatch, empty, stream):
    stub.sure, answers = -3.0, {True: empty, False: "The answer is 42."}
    monkeypatch.setattr(type(stub), "answer", lambda self, body: answers["<passages>" in str(body)])
    address, _ = serve(gate="logprob:mean", change=use_arbiter(FixedArbiter(0.1)))
    reply = ask(address, stream=stream)
    answer = said(events(reply)) if stream else reply.json()["choices"][0]["message"]["content"]
    assert answer == "The answer is 42."


def said(chunks):
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_by_default_an_abstention_is_replaced_by_the_draft(serve, stub, monkeypatch):
    stub.sure = -3.0
    monkeypatch.setattr(
        type(stub), "answer", lambda self, body: "The answer is 42." if "logprobs" in body else "I do not know."
    )
    address, _ = serve(gate="logprob:mean")
    assert ask(address).json()["choices"][0]["message"]["content"] == "The answer is 42."


def test_an_arbiter_is_rejected_if_the_gate_reads_no_draft(invented, stub):
    settings = kg.PipelineOptions(gate="always", docs=invented.docs, arbiter="rules")
    with pytest.raises(kg.KnowgateError, match="compares draft answers"):
        create_app(settings, ServeOptions(upstream=stub.url))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("closed", "text"), [(0.9, "The answer is 42."), (0.1, "From the passages: 43.")])
def test_an_arbiter_gets_a_draft_if_the_gate_reads_only_the_question(serve, stub, closed, text, stream):
    address, _ = serve(gate="always", change=use_arbiter(FixedArbiter(closed)))
    reply = ask(address, stream=stream)
    answer = said(events(reply)) if stream else reply.json()["choices"][0]["message"]["content"]
    assert answer == text
    assert len(stub.bodies) == 2  # LLM calls: the draft, and the answer with passages


def test_a_question_that_is_skipped_gets_no_draft_for_the_arbiter(serve, stub):
    address, _ = serve(gate="never", change=use_arbiter(FixedArbiter(0.9)))
    assert ask(address).json()["knowgate"]["way"] == "question"
    assert len(stub.bodies) == 1


@pytest.mark.parametrize("pieces", [["x" * 20_000, *["y"] * 300], ["x"] * 30_000], ids=["long", "many"])
def test_only_the_beginning_of_a_stream_is_checked_for_acceptance(pieces):
    lines = [b"data: " + chunk(piece) + b"\n\n" for piece in pieces]
    checked = []
    draft = asyncio.run(read_until(FakeResponse(lines), lambda text: checked.append(len(text))))
    assert max(checked) <= MAX_BEGINNING_CHARS
    assert len(checked) < 1_000
    assert draft.completion.text == "".join(pieces)  # it is read to the end


class FakeResponse:
    """A response whose body has arrived."""

    headers: ClassVar = {}

    def __init__(self, chunks):
        self.content = self
        self.chunks = chunks

    async def iter_any(self):
        for piece in self.chunks:
            yield piece


def test_a_streamed_tool_call_is_no_choice_of_the_arbiter(serve, stub, monkeypatch):
    stub.sure, send = -9.0, stub._send

    async def call_tool(reply, body, delta, finish=None):
        if "<passages>" in str(body) and delta:
            delta = {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look", "arguments": "{}"}}]}
        await send(reply, {**body, "logprobs": False} if "tool_calls" in delta else body, delta, finish)

    monkeypatch.setattr(stub, "_send", call_tool)
    address, _ = serve(gate="logprob:mean")
    report = events(ask(address, UNKNOWN, stream=True))[0]["knowgate"]
    assert (report["retrieve"], "choice" in report) == (True, False)
