"""What a request costs: no call is made twice for nothing, and `usage` counts every call."""

import json
import math

import pytest
from aiohttp import web

from knowgate.server.chat.request_formats import REQUEST_FORMATS
from knowgate.types import Passage
from tests.server.conftest import KNOWN, UNKNOWN
from tests.server.test_arbitration import FixedArbiter, use_arbiter
from tests.server.test_chat import ask, events

PASSAGES = [Passage("p", "some text")]


@pytest.mark.parametrize("way", ["draft", "race"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_draft_is_the_answer_if_the_search_finds_nothing(serve, stub, stream, way):
    stub.sure = -9.0
    address, _ = serve(gate="logprob:first", options={"way": way})
    reply = ask(address, "Zyzzyva?", stream=stream)
    report = events(reply)[0]["knowgate"] if stream else reply.json()["knowgate"]
    assert (report["retrieve"], report["passages"], report["notes"]) == (True, [], ["nothing found"])
    assert len(stub.bodies) == 1
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(reply) if chunk["choices"])
    assert (text if stream else reply.json()["choices"][0]["message"]["content"]) == "The answer is 42."


def test_the_notes_say_if_the_search_finds_nothing_without_a_draft(serve, stub):
    address, _ = serve(gate="always")
    assert ask(address, "Zyzzyva?").json()["knowgate"]["notes"] == ["nothing found"]
    assert len(stub.bodies) == 1


@pytest.mark.parametrize("chosen", [0.1, 0.9])
def test_usage_is_the_sum_of_draft_and_answer(serve, stub, chosen):
    stub.sure = -9.0
    address, _ = serve(gate="logprob:first", change=use_arbiter(FixedArbiter(chosen)))
    reply = ask(address, UNKNOWN).json()
    assert len(stub.bodies) == 2
    assert reply["usage"] == {"prompt_tokens": 10, "completion_tokens": 8, "total_tokens": 18}


@pytest.mark.parametrize("draft", ["The answer is 42.", " "])
def test_usage_of_a_streamed_draft_is_what_the_upstream_reports_after_it(serve, stub, monkeypatch, draft):
    stub.sure = -9.0
    answer = stub.answer
    monkeypatch.setattr(stub, "answer", lambda body: answer(body) if "<passages>" in str(body) else draft)
    address, _ = serve(gate="logprob:mean")
    reply = ask(address, UNKNOWN, stream=True, stream_options={"include_usage": True})
    assert len(stub.bodies) == 2
    usage = [chunk["usage"] for chunk in events(reply) if chunk.get("usage")]
    assert [(item["prompt_tokens"], item["completion_tokens"]) for item in usage] == [(10, 8)]


def test_the_tokens_of_a_canceled_draft_are_estimated_from_texts_without_images(serve, stub):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000}}
    earlier = [
        {"role": "user", "content": [{"type": "text", "text": "Что это?"}, image]},  # 8 characters: two tokens
        {"role": "assistant", "content": "A map."},
    ]
    stub.sure = -9.0
    address, _ = serve(gate="logprob:first")
    body = {"messages": [*earlier, {"role": "user", "content": UNKNOWN}], "stream_options": {"include_usage": True}}
    usage = [chunk["usage"] for chunk in events(ask(address, stream=True, **body)) if chunk.get("usage")]
    texts = "Что это?\nA map.\n" + UNKNOWN
    assert usage[0]["prompt_tokens"] == 5 + math.ceil(len(texts) / 4)  # the upstream reports 5 for the answer


@pytest.mark.parametrize("stream", [True, False])
def test_the_price_that_an_upstream_reports_is_summed(serve, stub, monkeypatch, stream):
    monkeypatch.setattr("tools.stub_upstream.USAGE", {"prompt_tokens": 5, "completion_tokens": 4, "cost": 0.25})
    stub.sure = -9.0
    stub.answer = lambda body: "It is Lyon." if "<passages>" in str(body) else " "
    address, _ = serve(gate="logprob:mean")
    reply = ask(address, UNKNOWN, stream=stream, stream_options={"include_usage": True})
    (usage,) = [part["usage"] for part in (events(reply) if stream else [reply.json()]) if part.get("usage")]
    assert (len(stub.bodies), usage["prompt_tokens"], usage["cost"]) == (2, 10, 0.5)


def test_usage_counts_a_draft_without_choices_if_the_search_finds_nothing(serve, stub, monkeypatch):
    plain = stub._plain

    async def answer(body):
        response = await plain(body)
        changed = {"choices": []} if len(stub.bodies) == 1 else {}
        return web.json_response({**json.loads(response.body), **changed})

    monkeypatch.setattr(stub, "_plain", answer)
    address, _ = serve(gate="logprob:mean")
    usage = ask(address, "Zyzzyva?").json()["usage"]
    assert (len(stub.bodies), usage["prompt_tokens"], usage["completion_tokens"]) == (2, 10, 8)


def test_usage_is_unchanged_if_there_is_one_call(serve, stub):
    address, _ = serve(gate="always")
    assert ask(address, UNKNOWN).json()["usage"]["total_tokens"] == 9


@pytest.mark.parametrize("batch", [1, 16])
def test_a_model_in_this_process_reports_prompt_tokens(serve, batch):
    address, _ = serve(upstream=False, gate="always", options={"batch": batch})
    usage = ask(address, KNOWN, model="knowgate").json()["usage"]
    assert usage["prompt_tokens"] > 10
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_usage_and_times_include_the_rewriting_of_a_follow_up(serve):
    address, _ = serve(upstream=False, gate="never", options={"batch": 1})
    earlier = [{"role": "user", "content": KNOWN}, {"role": "assistant", "content": "Paris."}]
    plain = ask(address, "And Peru?", model="knowgate").json()
    messages = [*earlier, {"role": "user", "content": "And Peru?"}]
    follow_up = ask(address, model="knowgate", messages=messages).json()
    assert follow_up["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 100  # the prompt has examples
    assert follow_up["knowgate"]["milliseconds"]["rewrite"] > 0
    assert "rewrite" not in plain["knowgate"]["milliseconds"]


def test_a_stream_of_a_model_in_this_process_ends_with_usage_on_request(serve):
    address, _ = serve(upstream=False, gate="never")
    whole = ask(address, KNOWN, model="knowgate").json()["usage"]
    reply = ask(address, KNOWN, model="knowgate", stream=True, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in events(reply) if "usage" in chunk] == [whole]
    assert events(reply)[-1]["choices"] == []


# --- the instruction to cite ----------------------------------------------------------------------


@pytest.mark.parametrize(("cite", "fields", "asked"), [
    (True, {}, True),
    (True, {"response_format": {"type": "text"}}, True),
    (True, {"response_format": {"type": "json_object"}}, False),
    (False, {}, False),
])  # fmt: skip
def test_the_llm_is_asked_to_cite_unless_that_is_off_or_json_is_wanted(serve, stub, cite, fields, asked):
    address, _ = serve(gate="always", options={"cite": cite})
    ask(address, UNKNOWN, **fields)
    assert "<passages>" in str(stub.bodies[0])
    assert ("Cite those you use as [id]" in str(stub.bodies[0])) is asked


@pytest.mark.parametrize(("path", "body"), [
    ("/responses", {"input": "Who?", "text": {"format": {"type": "json_schema"}}}),
    ("/completions", {"prompt": "Who?", "response_format": {"type": "json_object"}}),
])  # fmt: skip
def test_other_formats_do_not_ask_for_citations_in_json(path, body):
    changed = REQUEST_FORMATS[path].insert_passages(body, PASSAGES, "user")
    assert "<passages>" in str(changed)
    assert "Cite" not in str(changed)
