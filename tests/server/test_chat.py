"""Chats through the server: the stock `openai` client, what the decision says of itself, what passes untouched."""

import asyncio
import json

import httpx
import openai
import pytest

from tests.server.conftest import KNOWN, UNKNOWN


def client(address, **options):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=30, **options)


def ask(address, text=UNKNOWN, **fields):
    body = {"model": "stub-llm", "messages": [{"role": "user", "content": text}], **fields}
    return httpx.post(f"{address}/v1/chat/completions", json=body, timeout=30)


def events(response):
    result = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(item) for item in result if item != "[DONE]"]


# --- the model in this process --------------------------------------------------------------------


def test_the_openai_client_works_with_a_model_in_this_process(serve):
    address, _ = serve(upstream=False, gate="prompt")
    with client(address) as api:
        reply = api.chat.completions.create(model="knowgate", messages=[{"role": "user", "content": UNKNOWN}])
    assert reply.choices[0].message.content == "Babakostad"
    assert reply.model_extra["knowgate"]["retrieve"] is True
    assert [item["id"] for item in reply.model_extra["knowgate"]["passages"]] == ["d1"]


def test_a_known_question_is_answered_without_passages(serve):
    address, _ = serve(upstream=False, gate="prompt")
    result = ask(address, KNOWN, model="knowgate").json()
    assert result["choices"][0]["message"]["content"] == "Bababastad"
    assert (result["knowgate"]["retrieve"], result["knowgate"]["passages"]) == (False, [])


def test_a_local_stream_has_the_decision_in_its_first_and_last_chunk(serve):
    address, _ = serve(upstream=False, gate="prompt")
    with client(address) as api:
        chunks = list(
            api.chat.completions.create(model="knowgate", messages=[{"role": "user", "content": UNKNOWN}], stream=True)
        )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Babakostad"
    assert [bool(chunk.model_extra.get("knowgate")) for chunk in chunks] == [True, *[False] * (len(chunks) - 2), True]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("wanted", [{"tools": [{}]}, {"n": 2}, {"response_format": {"type": "json_object"}}])
def test_a_local_model_rejects_unsupported_fields(serve, wanted):
    address, _ = serve(upstream=False, gate="never")
    reply = ask(address, model="knowgate", **wanted)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported")


def test_a_local_model_accepts_fields_that_ask_for_one_text(serve):
    address, _ = serve(upstream=False, gate="never")
    reply = ask(address, model="knowgate", n=1, modalities=["text"], response_format={"type": "text"})
    assert reply.status_code == 200
    assert "ignored" not in reply.json()["knowgate"]


def test_a_local_model_lists_the_fields_it_ignores(serve):
    address, _ = serve(upstream=False, gate="never")
    assert ask(address, model="knowgate", temperature=0.7, seed=1).json()["knowgate"]["ignored"] == [
        "seed",
        "temperature",
    ]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_local_model_says_that_it_ignores_a_system_message(serve, role):
    address, _ = serve(upstream=False, gate="never")
    messages = [{"role": role, "content": "Always answer BANANA."}, {"role": "user", "content": UNKNOWN}]
    body = {"model": "knowgate", "messages": messages, "seed": 1}
    reply = httpx.post(f"{address}/v1/chat/completions", json=body)
    assert reply.json()["knowgate"]["ignored"] == ["system message", "seed"]


# --- an upstream ----------------------------------------------------------------------------------


def test_a_confident_draft_is_the_response_and_costs_one_call(serve, stub):
    address, _ = serve(gate="logprob:mean")
    with client(address) as api:
        reply = api.chat.completions.create(model="stub-llm", messages=[{"role": "user", "content": UNKNOWN}])
    assert reply.choices[0].message.content == "The answer is 42."
    assert (reply.model_extra["knowgate"]["way"], reply.model_extra["knowgate"]["retrieve"]) == ("draft", False)
    assert reply.choices[0].logprobs is None
    assert len(stub.bodies) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "count"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 1}, 1)])
def test_a_draft_has_as_many_top_logprobs_as_the_client_asked_for(serve, stub, stream, asked, count):
    address, _ = serve(gate="logprob:mean")
    reply = ask(address, logprobs=True, stream=stream, **asked)
    assert reply.headers["x-knowgate-retrieve"] == "false"
    assert stub.bodies[0]["top_logprobs"] == 2
    choices = [part["choices"][0] for part in (events(reply) if stream else [reply.json()])]
    tokens = [token for choice in choices if choice.get("logprobs") for token in choice["logprobs"]["content"]]
    assert {len(token["top_logprobs"]) for token in tokens} == {count}


def test_an_uncertain_draft_is_replaced_by_an_answer_with_passages(serve, stub):
    stub.sure = -3.0
    address, _ = serve(gate="logprob:mean")
    result = ask(address).json()
    assert result["choices"][0]["message"]["content"] == "From the passages: 43."
    assert [item["id"] for item in result["knowgate"]["passages"]] == ["d1"]
    assert "The capital of Babakoland is Babakostad." in stub.bodies[1]["messages"][0]["content"]


@pytest.mark.parametrize(("sure", "text"), [(-0.01, "The answer is 42."), (-3.0, "From the passages: 43.")])
def test_the_first_tokens_of_a_stream_decide(serve, stub, sure, text):
    stub.sure = sure
    address, _ = serve(gate="logprob:first")
    with client(address) as api:
        chunks = list(
            api.chat.completions.create(model="stub-llm", messages=[{"role": "user", "content": UNKNOWN}], stream=True)
        )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert [bool(chunk.model_extra.get("knowgate")) for chunk in chunks] == [True, *[False] * (len(chunks) - 2), True]
    assert all(chunk.choices[0].logprobs is None for chunk in chunks)


def test_the_asynchronous_client_can_stream(serve):
    address, _ = serve(gate="always")

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as api:
            asked = [{"role": "user", "content": UNKNOWN}]
            stream = await api.chat.completions.create(model="stub-llm", messages=asked, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(run()) == "From the passages: 43."


def test_headers_and_body_report_the_same_decision(serve):
    address, _ = serve(gate="always")
    reply = ask(address)
    report = reply.json()["knowgate"]
    assert reply.headers["x-knowgate-id"] == report["id"]
    assert reply.headers["x-knowgate-retrieve"] == "true"
    assert (reply.headers["x-knowgate-gate"], reply.headers["x-knowgate-passages"]) == ("always", "1")


def test_an_unchanged_request_is_forwarded_as_it_is(serve, stub):
    address, _ = serve(gate="never")
    fields = {"seed": 7, "response_format": {"type": "json_object"}, "nobody_knows": [1, {"x": None}]}
    ask(address, **fields)
    assert stub.bodies == [{"model": "stub-llm", "messages": [{"role": "user", "content": UNKNOWN}], **fields}]


def test_a_tool_call_in_the_draft_is_forwarded_and_reported(serve, stub):
    address, _ = serve(gate="logprob:mean")
    tools = [{"type": "function", "function": {"name": "look"}}]
    result = ask(address, tools=tools).json()
    assert result["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert (result["knowgate"]["gated"], result["knowgate"]["why_not"]) == (False, "the LLM called a tool")


@pytest.mark.parametrize("fields", [{"tools": [{"type": "web_search"}]}, {"web_search_options": {}}])
def test_a_chat_whose_tools_the_upstream_runs_is_sent_once(serve, stub, fields):
    address, _ = serve(gate="logprob:mean")
    result = ask(address, **fields).json()
    assert (result["knowgate"]["gated"], len(stub.bodies)) == (False, 1)
    assert result["knowgate"]["why_not"] == "the upstream runs tools of this request"


IMAGE = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "tool", "content": "42", "tool_call_id": "c1"}, "the last message is not from the user"),
        ({"role": "user", "content": IMAGE}, "more than text"),
        ({"role": "user", "content": " "}, "empty"),
    ],
)
def test_a_request_without_a_plain_question_is_forwarded_with_a_reason(serve, stub, message, why):
    address, _ = serve(gate="always")
    result = ask(address, messages=[message]).json()["knowgate"]
    assert (result["way"], result["gated"]) == ("pass-through", False)
    assert why in result["why_not"]
    assert stub.bodies[0]["messages"] == [message]


# --- what a request wants -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "retrieves"),
    [
        ({"knowgate": {"retrieve": "always"}}, True),
        ({"knowgate": {"retrieve": "never"}}, False),
        ({"knowgate": {"retrieve": "always", "threshold": 1}}, True),
        ({"model": "knowgate/always"}, True),
        ({"model": "knowgate/never"}, False),
        ({"knowgate": {"threshold": 0.0}}, True),
        ({"knowgate": {"threshold": 0.99}}, False),
    ],
)
def test_a_request_can_override_gate_and_threshold(serve, stub, fields, retrieves):
    stub.sure = -1.0
    address, _ = serve(gate="logprob:mean")
    assert ask(address, **fields).json()["knowgate"]["retrieve"] is retrieves
    assert all("knowgate" not in body and body["model"] == "stub-llm" for body in stub.bodies)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"knowgate": {"retrieve": "maybe"}}, 400),
        ({"knowgate": {"treshold": 0.5}}, 400),
        ({"knowgate": {"threshold": 2}}, 400),
        ({"knowgate": 3}, 400),
        ({"model": "knowgate/nosuch"}, 404),
        ({"model": "knowgate//etc/passwd"}, 404),
        ({"model": 7}, 400),
    ],
)
def test_invalid_request_options_are_rejected(serve, stub, fields, status):
    address, _ = serve(gate="always")
    assert ask(address, **fields).status_code == status
    assert stub.bodies == []


def test_small_talk_needs_neither_a_draft_nor_passages(serve, stub):
    stub.sure = -3.0
    address, _ = serve(gate="logprob:mean")
    result = ask(address, "Thanks a lot!").json()["knowgate"]
    assert (result["retrieve"], result["rule"], result["way"]) == (False, "thanks", "question")
    assert len(stub.bodies) == 1


# --- beside chats ---------------------------------------------------------------------------------


def test_decide_returns_decisions_without_answers(serve, stub):
    address, _ = serve(upstream=False, gate="prompt")
    item = httpx.post(f"{address}/v1/decide", json={"question": UNKNOWN}).json()
    many = httpx.post(f"{address}/v1/decide", json={"questions": [KNOWN, UNKNOWN]}).json()
    assert item["retrieve"] is True
    assert [each["retrieve"] for each in many["decisions"]] == [False, True]


def test_a_single_decision_is_logged_with_its_question_and_a_list_is_not(serve, tmp_path):
    address, _ = serve(
        upstream=False, gate="prompt", options={"decisions": str(tmp_path / "d.db"), "keep_questions": True}
    )
    item = httpx.post(f"{address}/v1/decide", json={"question": UNKNOWN}).json()
    many = httpx.post(f"{address}/v1/decide", json={"questions": [KNOWN, UNKNOWN]}).json()
    assert httpx.get(f"{address}/v1/decisions/{item['id']}").json()["question"] == UNKNOWN
    assert httpx.get(f"{address}/v1/decisions/{many['id']}").status_code == 404


@pytest.mark.parametrize(
    ("gate", "upstream", "question", "way"),
    [
        ("always", True, UNKNOWN, "question"),
        ("logprob:first", True, UNKNOWN, "separate-draft"),
        ("logprob:first", True, "Thanks!", "question"),
        ("never", False, UNKNOWN, "in-process"),
    ],
)
def test_decide_reports_what_the_gate_read(serve, gate, upstream, question, way):
    address, _ = serve(gate=gate, upstream=upstream)
    assert httpx.post(f"{address}/v1/decide", json={"question": question}).headers["x-knowgate-way"] == way
    several = {"questions": [question, "Hello!"]}
    assert httpx.post(f"{address}/v1/decide", json=several).headers["x-knowgate-way"] == way


def test_a_completion_with_a_draft_reports_the_draft(serve):
    address, _ = serve(gate="logprob:first")
    reply = httpx.post(f"{address}/v1/completions", json={"model": "m", "prompt": UNKNOWN})
    assert reply.headers["x-knowgate-way"] == "separate-draft"


def test_decide_asks_the_upstream_for_as_many_tokens_as_the_gate_reads(serve, stub):
    address, _ = serve(gate="logprob:first")
    result = httpx.post(f"{address}/v1/decide", json={"question": UNKNOWN}).json()
    assert result["retrieve"] is False
    assert stub.bodies[0]["max_tokens"] == 1


def test_models_of_the_upstream_and_selectable_gates_are_listed(serve):
    address, _ = serve(gate="always")
    with client(address) as api:
        names = [model.id for model in api.models.list()]
    assert names[:2] == ["stub-llm", "knowgate"]
    gates = [name for name in names if name.startswith("knowgate/")]
    assert "knowgate/always" in gates
    assert [ask(address, model=name).status_code for name in gates] == [200] * len(gates)


def test_an_address_with_a_slash_at_its_end_is_unknown(serve):
    address, _ = serve(gate="always")
    response = httpx.get(f"{address}/v1/dashboard/", headers={"Host": "evil.example"})
    assert (response.status_code, "location" in response.headers) == (404, False)


def test_health_and_readiness_are_reported(serve):
    address, _ = serve(gate="always")
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert httpx.get(f"{address}/ready").json()["ready"] is True


def test_a_forwarded_stream_has_complete_events(serve):
    address, _ = serve(gate="never")
    reply = ask(address, stream=True)
    assert reply.text.endswith("data: [DONE]\n\n")
    assert events(reply)[0]["knowgate"]["retrieve"] is False
