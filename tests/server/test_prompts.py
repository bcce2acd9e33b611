"""Plain questions that come as completions or responses; what is none goes through."""

import httpx
import pytest

from knowgate.server.chat.request_formats import REQUEST_FORMATS
from knowgate.server.streaming import StreamAnnotator
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.types import Passage
from tests.server.conftest import UNKNOWN

FOUND = [Passage("d1", "The capital of Babakoland is Babakostad.", "Towns")]
PART = {"type": "input_text", "text": UNKNOWN}


def post(address, path, **body):
    return httpx.post(f"{address}/v1/{path}", json={"model": "m", **body}, timeout=30)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": UNKNOWN}),
        ("responses", {"input": UNKNOWN}),
        ("responses", {"input": [{"role": "user", "content": UNKNOWN}]}),
        ("responses", {"input": [{"type": "message", "role": "user", "content": [PART]}]}),
    ],
)
def test_a_plain_question_is_decided_on_and_gets_passages(serve, stub, path, body):
    address, _ = serve(gate="always")
    told = post(address, path, **body).json()["knowgate"]
    assert (told["way"], told["retrieve"], [one["id"] for one in told["passages"]]) == ("question", True, ["d1"])
    assert "Babakostad" in str(stub.bodies[0])
    assert str(stub.bodies[0]).count("<passages>") == 1


def test_a_gate_that_reads_a_draft_gets_one_of_its_own(serve, stub):
    address, _ = serve(gate="logprob:mean")
    told = post(address, "completions", prompt=UNKNOWN, max_tokens=7).json()["knowgate"]
    assert (told["retrieve"], told["passages"]) == (False, [])
    assert stub.bodies[0]["messages"] == [{"role": "user", "content": UNKNOWN}]
    assert stub.bodies[1] == {"model": "m", "prompt": UNKNOWN, "max_tokens": 7}


def test_a_wish_is_heard_and_not_sent_on(serve, stub):
    address, _ = serve(gate="always")
    told = post(address, "responses", input=UNKNOWN, knowgate={"retrieve": "never"}).json()["knowgate"]
    assert told["retrieve"] is False
    assert stub.bodies[0] == {"model": "m", "input": UNKNOWN}


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("completions", {"prompt": ["one", "two"]}, "not one text"),
        ("completions", {"prompt": "def f(x):\n    return"}, "no plain question"),
        ("completions", {"prompt": "def f(", "suffix": ")"}, "after the gap"),
        ("responses", {"input": UNKNOWN, "previous_response_id": "r1"}, "kept by the upstream"),
        ("responses", {"input": [{"type": "function_call_output", "output": "3"}]}, "more than messages"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "more than text"),
        ("responses", {}, "more than messages"),
    ],
)
def test_what_is_no_plain_question_goes_through_and_says_why(serve, stub, path, body, why):
    address, _ = serve(gate="always")
    reply = post(address, path, **body)
    assert reply.json() == {"object": f"/v1/{path}", "got": {"model": "m", **body}}
    assert reply.headers["x-knowgate-way"] == "pass-through"
    assert why in reply.headers["x-knowgate-reason"]


def test_passages_go_into_the_instructions_where_they_belong_to_the_system():
    sent = REQUEST_FORMATS["/responses"].with_passages({"input": UNKNOWN, "instructions": "Be kind."}, FOUND, "system")
    assert sent["instructions"].startswith("Be kind.\n\n")
    assert (sent["input"], "Babakostad" in sent["instructions"]) == (UNKNOWN, True)


def test_passages_before_parts_are_a_part_of_the_same_kind():
    body = {"input": [{"role": "user", "content": [PART]}]}
    parts = REQUEST_FORMATS["/responses"].with_passages(body, FOUND, "user")["input"][0]["content"]
    assert [part["type"] for part in parts] == ["input_text", "input_text"]
    assert parts[1] == PART


def test_a_stream_of_responses_is_told_in_its_first_and_last_event():
    amending = StreamAnnotator(RequestTrace())
    kinds = ("response.created", "response.output_text.delta", "response.completed")
    told = [amending.amend(b'data: {"type": "%s"}\n' % kind.encode()) for kind in kinds]
    assert [b"knowgate" in line for line in told] == [True, False, True]
