import math
import re
import threading
import time

import httpx
import pytest

from knowgate.core.http_client import RetryPolicy
from knowgate.errors import BadSetting, ModelError, ServerError, UnsupportedSignal
from knowgate.models.openai.model import OpenAIModel, open_openai
from knowgate.models.openai.responses import compute_label_logprobs
from knowgate.types import LabelPrompt, Prompt, Sampling, Signal, SignalRequest
from tests.support.chat_server import ChatServer
from tests.support.processes import PATIENCE

URL = "http://server.test/v1"
PROMPTS = [Prompt(f"q{i}") for i in range(20)]
QUICK = RetryPolicy(timeout=120, total=360, retries=1, backoff=0.0)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("KNOWGATE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def connect(server, model="m", **settings):
    return OpenAIModel(model, URL, retry=QUICK, transport=httpx.MockTransport(server), **settings)


def yes_no(text="Is it?"):
    return LabelPrompt((text,), raw=False)


def test_all_signals_but_hidden_states_are_offered_if_the_server_returns_them():
    server = ChatServer()
    model = connect(server)
    assert model.offers == frozenset(Signal) - {Signal.HIDDEN}
    assert model.offers == model.offers
    assert len(server.bodies) == 1  # probed once
    body = server.bodies[0][1]
    assert (body["logprobs"], body["top_logprobs"], body["n"], body["top_k"]) == (True, 20, 2, -1)


@pytest.mark.parametrize("how", ["refuses", "ignores"])
@pytest.mark.parametrize(
    ("field", "lost"),
    [("logprobs", {Signal.LOGPROBS, Signal.LABELS}), ("top_logprobs", {Signal.LABELS}), ("n", set())],
)
def test_a_signal_is_not_offered_if_its_field_is_refused_or_ignored(how, field, lost):
    model = connect(ChatServer(**{how: frozenset({field})}))
    assert model.offers == frozenset(Signal) - {Signal.HIDDEN} - lost
    drafted = model.read([Prompt("q")], SignalRequest(draft_tokens=4))[0].draft
    assert (drafted.tokens is None) == (Signal.LOGPROBS in lost)
    drawn = model.generate(PROMPTS[:3], max_tokens=4, temperature=1.0, n=5)
    assert [len(row) for row in drawn] == [5, 5, 5]


def test_optional_fields_are_sent_only_to_servers_that_accept_them():
    plain, extra = ChatServer(refuses=frozenset({"top_k", "min_p"})), ChatServer()
    for server in (plain, extra):
        connect(server).generate(PROMPTS[:1], max_tokens=4, temperature=1.0, n=2, seed=3)
    common = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 4, "n": 2, "seed": 3}
    assert common.items() <= plain.after_probe()[0].items()
    assert not {"top_k", "min_p"} & set(plain.after_probe()[0])
    assert {**common, "top_k": -1, "min_p": 0.0}.items() <= extra.after_probe()[0].items()


def test_top_p_and_top_k_are_sent_with_truncated_sampling():
    server = ChatServer()
    connect(server).read(PROMPTS[:1], SignalRequest(samples=2, sampling=Sampling(0.6, 0.9, 50)))
    sent = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.0}
    assert sent.items() <= server.after_probe()[0].items()


def test_top_k_on_a_server_without_it_is_an_error():
    model = connect(ChatServer(refuses=frozenset({"top_k", "min_p"})))
    with pytest.raises(UnsupportedSignal, match="does not support top_k"):
        model.read(PROMPTS[:1], SignalRequest(samples=2, sampling=Sampling(top_k=50)))


def test_a_server_without_n_gets_n_requests_with_different_seeds():
    server = ChatServer(ignores=frozenset({"n"}))
    drawn = connect(server).generate(PROMPTS[:2], max_tokens=4, temperature=1.0, n=3, seed=5)
    assert [[x.text for x in row] for row in drawn] == [[f"answer to q{i} #0"] * 3 for i in range(2)]
    assert sorted(body["seed"] for body in server.after_probe()) == [5, 5, 6, 6, 7, 7]


def test_a_server_that_returns_too_few_choices_gets_another_request():
    server = ChatServer()
    server.change = lambda reply: {**reply, "choices": reply["choices"][:2]}
    drawn = connect(server).generate(PROMPTS[:1], max_tokens=4, temperature=1.0, n=5, seed=0)
    assert len(drawn[0]) == 5
    assert [(body.get("n"), body["seed"]) for body in server.after_probe()] == [(5, 0), (3, 2), (None, 4)]


def test_greedy_answers_are_requested_once_and_repeated():
    server = ChatServer()
    row = connect(server).generate([Prompt("q")], max_tokens=4, n=3)[0]
    assert [x.text for x in row] == ["answer to q"] * 3
    assert len(server.after_probe()) == 1
    assert server.after_probe()[0]["temperature"] == 0.0


def test_a_batch_keeps_its_order_when_responses_are_delayed():
    server = ChatServer()

    def slow_first(request):
        time.sleep(0.05 if b'"q0"' in request.content else 0)
        return server(request)

    rows = connect(slow_first).generate(PROMPTS, max_tokens=4)
    assert [row[0].text for row in rows] == [f"answer to q{i}" for i in range(20)]


def test_requests_of_a_batch_run_concurrently_up_to_the_limit():
    server, running, peak = ChatServer(), [], []
    three = threading.Barrier(3, timeout=PATIENCE)  # nine requests pass it by threes, or not at all

    def watched(request):
        running.append(1)
        peak.append(len(running))
        if any(f'"q{i}"'.encode() in request.content for i in range(9)):
            three.wait()
        running.pop()
        return server(request)

    connect(watched, concurrency=3).generate(PROMPTS[:9], max_tokens=4)
    assert max(peak) == 3


def test_a_draft_has_logprobs_and_the_margin_of_the_top_two():
    server = ChatServer()
    reading = connect(server).read([Prompt("q")], SignalRequest(draft_tokens=7, samples=2, sample_tokens=3))[0]
    token = reading.draft.tokens[0]
    assert (token.text, token.entropy) == ("Paris", None)
    assert token.logprob == pytest.approx(math.log(0.6))
    assert token.margin == pytest.approx(0.35)
    assert [x.text for x in reading.samples] == ["answer to q #0", "answer to q #1"]
    assert [body["max_tokens"] for body in server.after_probe()] == [7, 3]


def test_the_token_count_is_split_over_the_choices():
    row = connect(ChatServer()).generate([Prompt("q")], max_tokens=4, temperature=1.0, n=3)[0]
    assert sorted(x.n_tokens for x in row) == [3, 3, 4]


def test_a_finished_draft_needs_no_second_request():
    server = ChatServer()
    model = connect(server)
    handle = model.read([Prompt("q")], SignalRequest(draft_tokens=4))[0].resume
    before = len(server.bodies)
    assert model.generate([Prompt("q")], max_tokens=50, resume=[handle])[0][0].text == "answer to q"
    assert len(server.bodies) == before


def test_an_unfinished_draft_is_generated_again_on_other_servers():
    server = ChatServer()
    model = connect(server)
    server.finish = "length"
    cut = model.read([Prompt("a")], SignalRequest(draft_tokens=1))[0]
    server.finish = "stop"
    done = model.read([Prompt("b")], SignalRequest(draft_tokens=1))[0]
    prompts, handles = [Prompt("b"), Prompt("a"), Prompt("b")], [done.resume, cut.resume, done.resume]
    rows = model.generate(prompts, max_tokens=50, resume=handles)
    assert not cut.draft.finished
    assert [row[0].text for row in rows] == ["answer to b", "answer to a", "answer to b"]
    assert [body["max_tokens"] for body in server.after_probe()] == [1, 1, 50]


def test_resume_is_greedy_and_needs_a_handle_of_this_model():
    model = connect(ChatServer())
    with pytest.raises(BadSetting, match="greedy"):
        model.generate([Prompt("q")], max_tokens=4, n=2, resume=[None])
    with pytest.raises(BadSetting, match=r"Reading\.resume` of this model"):
        model.generate([Prompt("q")], max_tokens=4, resume=[None])


def test_raw_prompts_go_to_the_completions_endpoint():
    server = ChatServer()
    draft = connect(server).read([Prompt("Q: x A:", raw=True)], SignalRequest(draft_tokens=4))[0].draft
    assert draft.text == "Q: x A: goes on"
    assert draft.tokens[0].margin == pytest.approx(0.35)
    path, body = server.bodies[-1]
    assert (path, body["prompt"], body["logprobs"]) == ("/completions", "Q: x A:", 2)


def test_labels_are_read_from_the_top_tokens():
    logits = connect(ChatServer()).label_logits([yes_no(), yes_no()], ["Paris", "Lyon"])
    assert len(logits) == 2
    assert logits[0].shape == (1, 2)
    assert logits[0][0] == pytest.approx([math.log(0.7), math.log(0.25)])  # 'Paris' and ' Paris' add up


def test_an_unlisted_label_gets_the_smallest_listed_probability():
    top = [("Yes", math.log(0.9)), ("yes", math.log(0.08)), ("x", math.log(0.02))]
    assert compute_label_logprobs(top, ["Yes", "No"]) == pytest.approx([math.log(0.9), math.log(0.02)])


def test_an_unlisted_label_of_several_tokens_is_bounded_by_its_beginning():
    top = [("un", math.log(0.9)), ("known", math.log(0.05)), ("x", math.log(0.01))]
    assert compute_label_logprobs(top, ["known", "unknown"]) == pytest.approx([math.log(0.05), math.log(0.9)])


def test_unlisted_labels_get_the_same_bound():
    logits = connect(ChatServer()).label_logits([yes_no()], ["yes", "no"])
    assert logits[0][0] == pytest.approx([math.log(0.01)] * 2)


def test_signals_that_the_server_does_not_give_are_refused():
    server = ChatServer(ignores=frozenset({"top_logprobs"}))
    server.cards = [{"id": "m", "owned_by": "library"}]
    model = connect(server)
    with pytest.raises(UnsupportedSignal, match="hidden states"):
        model.read(PROMPTS, SignalRequest(layers=(1,)))
    with pytest.raises(UnsupportedSignal, match="cannot compute the probabilities of answers such as yes and no"):
        model.label_logits([LabelPrompt(("a", "b"))], ["x", "y"])
    with pytest.raises(UnsupportedSignal, match="most probable tokens"):
        model.label_logits([yes_no()], ["x", "y"])


def test_an_empty_batch_sends_no_request():
    server = ChatServer()
    model = connect(server)
    assert model.read([], SignalRequest(draft_tokens=3, samples=2)) == model.generate([], max_tokens=3) == []
    assert model.label_logits([], ["a", "b"]) == []
    assert server.bodies == []


def test_the_fingerprint_ignores_the_creation_time():
    server = ChatServer()
    first = connect(server).fingerprint
    server.cards[0]["created"] = 2
    assert connect(server).fingerprint == first
    server.cards[0]["root"] = "/other"
    assert connect(server).fingerprint != first
    server.cards = None
    assert connect(server).fingerprint != connect(server, "m2").fingerprint


def test_an_unknown_model_is_an_error_that_lists_the_known_ones():
    server = ChatServer()
    server.cards = [{"id": "m"}, {"id": "large"}]
    with pytest.raises(ServerError, match=re.escape(f"{URL} has no model 'n'. Use one of its models: m, large.")):
        _ = connect(server, "n").offers


def test_a_404_without_a_model_list_suggests_checking_the_url():
    with pytest.raises(ServerError, match=r"answered 404: nothing here\. Check the URL"):
        _ = connect(lambda request: httpx.Response(404, text="nothing here.")).offers


def test_a_400_contains_the_message_of_the_server():
    server = ChatServer(refuses=frozenset({"max_tokens"}))
    with pytest.raises(ServerError, match="answered 400: Unrecognized argument: max_tokens"):
        _ = connect(server).offers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda reply: [], "no field 'choices'"),
        (lambda reply: {"object": "error"}, "no field 'choices'"),
        (lambda reply: {"choices": []}, "no field 'choices'"),
        (lambda reply: {"choices": [{"message": {"content": 3}}]}, "no answer text"),
        (lambda reply: {"choices": [{"finish_reason": "stop"}]}, "no answer text"),
        (lambda reply: {"choices": [with_logprob(math.nan)]}, "NaN"),
        (lambda reply: {"choices": [with_logprob(-math.inf)]}, "-Infinity"),
        (lambda reply: {"choices": [with_logprob(0.5)]}, r"0\.5"),
        (lambda reply: {"choices": [with_logprob(None)]}, "unknown format"),
    ],
)
def test_a_malformed_response_is_a_model_error(change, message):
    server = ChatServer()
    model = connect(server)
    assert model.offers
    server.change = change
    with pytest.raises(ModelError, match=message):
        model.read([Prompt("q")], SignalRequest(draft_tokens=2))


def with_logprob(value):
    content = [{"token": "a", "logprob": value, "top_logprobs": []}]
    return {"message": {"content": "a"}, "logprobs": {"content": content}}


def test_missing_logprobs_after_the_probe_are_an_error():
    server = ChatServer()
    model = connect(server)
    assert model.offers
    server.change = lambda reply: {"choices": [{"message": {"content": "a"}}]}
    with pytest.raises(ModelError, match="answer without log-probabilities"):
        model.read([Prompt("q")], SignalRequest(draft_tokens=2))


def test_no_content_is_an_empty_answer():
    server = ChatServer()
    server.change = lambda reply: {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}
    completion = connect(server).generate([Prompt("q")], max_tokens=2)[0][0]
    assert (completion.text, completion.finished) == ("", False)


def test_a_spec_names_model_and_url():
    model = open_openai("@cf/meta/llama@https://host/v1/")
    assert model.name == "openai:@cf/meta/llama"


@pytest.mark.parametrize("value", ["m", "m@", "@http://host", "m@host/v1", "m@ftp://host", "m@http://", "a b@http://x"])
def test_an_invalid_spec_is_an_error_with_a_valid_example(value):
    with pytest.raises(BadSetting, match=r"http://127\.0\.0\.1:8000/v1"):
        open_openai(value)


@pytest.mark.parametrize("value", ["m@http://me:secret@host/v1", "m@ftp://me:secret@host", "me@http://secret@host"])
def test_a_login_in_a_spec_is_refused_and_not_repeated(value):
    with pytest.raises(BadSetting) as caught:
        open_openai(value)
    assert "secret" not in str(caught.value)
