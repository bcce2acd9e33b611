"""Drafts are continued on servers that support it, and generated again elsewhere."""

import dataclasses
import json

import httpx
import pytest

from knowgate.core.http_client import RetryPolicy
from knowgate.models.backend import RemoteDraft
from knowgate.models.openai.model import OpenAIModel
from knowgate.types import Completion, Prompt, SignalRequest, Token
from tests.support.chat_server import ChatServer
from tests.support.llama_server import NAME, running_llama
from tests.support.vllm_recording import PROMPT, RecordedServer, draft_and_continue, read_labels

URL = "http://server.test/v1"
QUICK = RetryPolicy(timeout=120, total=360, retries=1, backoff=0.0)
BEGUN = Completion(
    "Faust is by", tokens=tuple(Token(text, -0.5) for text in ("Faust", " is", " by")), finished=False, n_tokens=3
)
MORE = " Goethe."
CONTINUED = {
    "vllm": {"continue_final_message": True, "add_generation_prompt": False},
    "sglang": {"continue_final_message": True},
}


class GoingServer(ChatServer):
    """Continues an assistant message like the given kind of server."""

    def __init__(self, maker, **habits):
        super().__init__(**habits)
        self.cards = [{"id": "m", "owned_by": maker}]

    def _reply(self, path, body):
        reply, turns = super()._reply(path, body), body.get("messages", [])
        if turns and turns[-1]["role"] == "assistant":
            repeats = self.cards[0]["owned_by"] == "llamacpp" and not body.get("stream")
            text = (turns[-1]["content"] if repeats else "") + MORE
            tokens = [{"token": piece, "logprob": -0.25, "top_logprobs": []} for piece in (" Goethe", ".")]
            choice = {"message": {"content": text}, "finish_reason": "stop", "logprobs": {"content": tokens}}
            return {**reply, "choices": [choice]}
        return reply

    @property
    def last(self):
        return self.bodies[-1][1]


def connect(server):
    return OpenAIModel("m", URL, retry=QUICK, transport=httpx.MockTransport(server))


def finish(model, begun=BEGUN, prompt=PROMPT, max_tokens=10):
    return model.generate([prompt], max_tokens=max_tokens, resume=[RemoteDraft(prompt, begun)])[0][0]


def streamed(model, begun=BEGUN, max_tokens=10):
    pieces, stream = [], model.stream(PROMPT, max_tokens=max_tokens, resume=RemoteDraft(PROMPT, begun))
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


@pytest.mark.parametrize("maker", ["vllm", "sglang", "llamacpp"])
def test_a_draft_is_continued_and_part_of_the_answer(maker):
    server = GoingServer(maker)
    answer = finish(connect(server))
    assert (answer.text, answer.finished, answer.n_tokens) == ("Faust is by Goethe.", True, 5)
    assert [token.text for token in answer.tokens] == ["Faust", " is", " by", " Goethe", "."]
    assert server.last["max_tokens"] == 7  # what is left of ten
    assert [turn["role"] for turn in server.last["messages"]] == ["user", "assistant"]
    asked = {key: value for key, value in server.last.items() if key in CONTINUED["vllm"]}
    assert asked == CONTINUED.get(maker, {})


@pytest.mark.parametrize("maker", ["vllm", "sglang", "llamacpp"])
def test_a_stream_begins_with_the_draft(maker):
    pieces, answer = streamed(connect(GoingServer(maker)))
    assert pieces == ["Faust is by", *pieces[1:]]
    assert "".join(pieces) == answer.text == "Faust is by Goethe."


def test_raw_text_is_continued_on_every_server():
    server = GoingServer("library")
    answer = finish(connect(server), prompt=Prompt("Q: Who?\nA:", raw=True))
    assert server.last["prompt"] == "Q: Who?\nA:Faust is by"
    assert answer.text.startswith("Faust is by")


def test_an_unknown_server_generates_the_answer_again():
    server = GoingServer("library")
    assert finish(connect(server)).text == f"answer to {PROMPT.text}"
    assert (server.last["max_tokens"], len(server.last["messages"])) == (10, 1)


@pytest.mark.parametrize(
    "begun",
    [
        dataclasses.replace(BEGUN, text=""),
        Completion("half a \ufffd", finished=False, n_tokens=3),
        Completion("a space ", finished=False, n_tokens=3),
        dataclasses.replace(BEGUN, text="by"),  # the other tokens were thoughts
    ],
)
def test_a_draft_that_is_not_reproducible_is_generated_again(begun):
    server = GoingServer("vllm")
    assert finish(connect(server), begun).text == f"answer to {PROMPT.text}"
    assert len(server.last["messages"]) == 1


def test_a_server_that_refuses_drafts_is_tried_only_once():
    server = GoingServer("vllm", refuses=frozenset({"continue_final_message"}))
    model = connect(server)
    assert [finish(model).text for _ in range(2)] == [f"answer to {PROMPT.text}"] * 2
    assert streamed(model)[1].text == f"answer to {PROMPT.text}"
    assert sum("continue_final_message" in body for _, body in server.bodies) == 1


# --- real servers ---------------------------------------------------------------------------------


def test_a_recorded_vllm_continues_a_draft_to_the_same_answer():
    server = RecordedServer()
    model = OpenAIModel("smollm", URL, transport=httpx.MockTransport(server))
    draft, answer = draft_and_continue(model)
    at_once = model.generate([PROMPT], max_tokens=24)[0][0]
    assert (draft.n_tokens, draft.finished) == (8, False)
    assert answer.text == at_once.text
    assert answer.n_tokens == at_once.n_tokens
    assert [token.text for token in answer.tokens] == [token.text for token in at_once.tokens]
    assert sum(token.logprob for token in answer.tokens) == pytest.approx(
        sum(t.logprob for t in at_once.tokens), abs=1e-3
    )


def test_a_recorded_vllm_lists_requested_labels_beyond_its_limit():
    server = RecordedServer()
    row = read_labels(OpenAIModel("smollm", URL, transport=httpx.MockTransport(server)))[0]
    (listed,) = (each["reply"] for each in server.exchanges if "logprob_token_ids" in each["body"])
    values = {one["token"]: one["logprob"] for one in listed["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    assert row.max() < -10
    assert row[0] != row[1]
    assert all(value >= min(values.values()) for value in row)


class Counting(httpx.BaseTransport):
    def __init__(self):
        self.way, self.bodies = httpx.HTTPTransport(), []

    def handle_request(self, request):
        if request.content:
            self.bodies.append(json.loads(request.content))
        return self.way.handle_request(request)

    def close(self):
        self.way.close()


@pytest.mark.model
def test_a_real_llama_cpp_server_continues_its_draft():
    pytest.importorskip("xllamacpp", reason="needs the extra 'llamacpp'")
    turn = Prompt("What is the capital of France? Answer in one sentence.")
    with running_llama() as url:
        notebook = Counting()
        model = OpenAIModel(NAME, url, transport=notebook)
        reading = model.read([turn], SignalRequest(draft_tokens=3))[0]
        answer = model.generate([turn], max_tokens=12, resume=[reading.resume])[0][0]
        last = notebook.bodies[-1]
        stream = model.stream(turn, max_tokens=12, resume=reading.resume)
        pieces = list(stream)
        at_once = model.generate([turn], max_tokens=12)[0][0]
        model.close()
    assert (reading.draft.n_tokens, reading.draft.finished) == (3, False)
    assert (last["max_tokens"], last["messages"][-1]) == (9, {"role": "assistant", "content": reading.draft.text})
    assert answer.text == at_once.text == "".join(pieces)
    assert answer.n_tokens == at_once.n_tokens
