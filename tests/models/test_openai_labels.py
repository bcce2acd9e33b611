"""Labels inside prompts, on simulated servers that respond in the documented formats."""

import json
import math
import threading
import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from knowgate.core.http_client import RetryPolicy
from knowgate.errors import BadSetting, ModelError, ServerError, UnsupportedSignal
from knowgate.models.openai.labels import MAX_CACHED_CHARS, ServerLabelReader
from knowgate.models.openai.model import OpenAIModel
from knowgate.types import LabelPrompt
from tests.support.chat_server import ChatServer

# One character is one token, but for the labels; a beginning has the special token 1 before it.
WORDS = {"true": 900, "false": 901, "truth": 900}
TRUE, FALSE = 900, 901
LABELS = ["true", "false"]
# "ab" | label 'true' + "c" | label 'false' + "de": ids below, labels predicted from 'b', 'c' and 'e'.
PROMPT = LabelPrompt(("ab", "truec", "falsede"))
IDS = [1, ord("a"), ord("b"), TRUE, ord("c"), FALSE, ord("d"), ord("e")]
FIRST, SECOND, END = 3, 5, 8  # places of the three labels; the last is where the answer begins
TOP = 5  # what ChatServer lists, hence what is asked for


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("KNOWGATE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def tokenize(text, special):
    ids = [1] if special else []
    while text:
        word = next((word for word in sorted(WORDS, key=len) if text.startswith(word)), text[0])
        ids.append(WORDS.get(word, ord(word[0])))
        text = text[len(word) :]
    return ids


class LabelServer:
    """A simulated vLLM or SGLang server. `at[position]` holds the log-probabilities {token: value} that are not -9."""

    def __init__(self, maker, *, exact=True, status=None, cards=None):
        self.chat = ChatServer()
        self.chat.cards = [{"id": "m", "owned_by": maker}] if cards is None else cards
        self.exact = exact
        self.status = status or {}
        self.at = {}
        self.asked = []
        self.change = lambda reply: reply
        self._lock = threading.Lock()

    def __call__(self, request):
        path = request.url.path
        if request.method == "GET" or path == "/v1/chat/completions":
            with self._lock:
                self.asked.append((path, None))
            return self.chat(request)
        body = json.loads(request.content)
        with self._lock:
            self.asked.append((path, body))
        status = self.status.get(path) or (400 if self.exact == "refuses" and "logprob_token_ids" in body else None)
        if status:
            return httpx.Response(status, json={"error": {"message": "no"}})
        replies = {
            "/tokenize": tokens,
            "/v1/tokenize": tokens,
            "/v1/completions": self._vllm,
            "/generate": self._sglang,
        }
        reply = replies[path](body)
        return httpx.Response(200, content=json.dumps(reply if "tokenize" in path else self.change(reply)))

    def bodies(self, path):
        return [body for asked, body in self.asked if asked == path]

    def _logprob(self, place, token):
        return self.at.get(place, {}).get(token, -9.0)

    def _best(self, place, k):
        known = sorted(self.at.get(place, {}).items(), key=lambda pair: -pair[1])
        return dict((known + [(5000 + i, -9.0) for i in range(k)])[:k])

    def _vllm(self, body):
        ids, k = body["prompt"], body["prompt_logprobs"]
        inside = [None]
        for place, token in list(enumerate(ids))[1:]:
            listed = {token: self._logprob(place, token)} | self._best(place, k)
            inside.append({str(t): {"logprob": x, "rank": 1, "decoded_token": "?"} for t, x in listed.items()})
        end = self._best(len(ids), body["logprobs"])
        if self.exact is True and "logprob_token_ids" in body:
            end = dict(list(end.items())[:1]) | {t: self._logprob(len(ids), t) for t in body["logprob_token_ids"]}
        top = {f"token_id:{t}": x for t, x in end.items()}
        first = next(iter(top))
        logprobs = {"text_offset": [0], "token_logprobs": [top[first]], "tokens": [first], "top_logprobs": [top]}
        choice = {"index": 0, "text": "?", "logprobs": logprobs, "finish_reason": "length", "prompt_logprobs": inside}
        return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]}

    def _sglang(self, body):
        ids, start, wanted = body["input_ids"], body["logprob_start_len"], body["token_ids_logprob"]
        places = range(start + 1, len(ids))
        meta = {
            "prompt_tokens": len(ids),
            "input_token_logprobs": [
                [None, ids[start], None],
                *([self._logprob(p, ids[p]), ids[p], None] for p in places),
            ],
            "input_token_ids_logprobs": [None, *([[self._logprob(p, t), t, None] for t in wanted] for p in places)],
            "output_token_logprobs": [[-0.1, 7, None]],
            "output_token_ids_logprobs": [[[self._logprob(len(ids), t), t, None] for t in wanted]],
        }
        return {"text": "?", "output_ids": [7], "meta_info": meta}


def tokens(body):
    ids = tokenize(body["prompt"], body["add_special_tokens"])
    return {"count": len(ids), "max_model_len": 4096, "tokens": ids}


def connect(server, **settings):
    quick = RetryPolicy(timeout=120, total=360, retries=0, backoff=0.0)
    transport = httpx.MockTransport(server)
    return OpenAIModel("m", "http://server.test/v1", retry=quick, transport=transport, **settings)


def aligned(maker, **settings):
    """A server with distinct values at three positions."""
    server = LabelServer(maker, **settings)
    server.at = {FIRST: {TRUE: -0.5, FALSE: -1.5}, SECOND: {TRUE: -0.25, FALSE: -2.0}, END: {TRUE: -3.0, FALSE: -0.125}}
    return server


@pytest.mark.parametrize("maker", ["vllm", "sglang"])
def test_each_label_is_read_from_the_tokens_before_it(maker):
    server = aligned(maker)
    logits = connect(server).label_logits([PROMPT], LABELS)
    assert logits[0].dtype == np.float32
    assert logits[0].tolist() == [[-0.5, -1.5], [-0.25, -2.0], [-3.0, -0.125]]


def test_columns_are_in_the_order_of_the_labels():
    logits = connect(aligned("sglang")).label_logits([PROMPT], ["false", "true"])
    assert logits[0].tolist() == [[-1.5, -0.5], [-2.0, -0.25], [-0.125, -3.0]]


def test_vllm_gets_one_request_with_token_ids():
    server = aligned("vllm")
    connect(server).label_logits([PROMPT], LABELS)
    (body,) = server.bodies("/v1/completions")
    assert (body["prompt"], body["max_tokens"], body["model"]) == (IDS, 1, "m")
    assert (body["prompt_logprobs"], body["logprobs"], body["logprob_token_ids"]) == (TOP, TOP, [TRUE, FALSE])
    assert (body["temperature"], body["top_p"], body["repetition_penalty"]) == (0.0, 1.0, 1.0)


def test_sglang_gets_one_request_for_positions_from_the_first_label_on():
    server = aligned("sglang")
    connect(server).label_logits([PROMPT], LABELS)
    (body,) = server.bodies("/generate")
    assert (body["input_ids"], body["logprob_start_len"]) == (IDS, FIRST - 1)
    assert (body["token_ids_logprob"], body["return_logprob"]) == ([TRUE, FALSE], True)
    assert body["sampling_params"]["max_new_tokens"] == 1
    assert "lora_path" not in body


@pytest.mark.parametrize("maker", ["vllm", "sglang"])
def test_a_prefix_is_tokenized_separately_and_has_no_label(maker):
    server = LabelServer(maker)
    server.at = {5: {TRUE: -0.5, FALSE: -1.5}, 7: {TRUE: -3.0, FALSE: -0.125}}
    logits = connect(server).label_logits([LabelPrompt(("ab", "truec"), prefix="xy")], LABELS)
    assert logits[0].tolist() == [[-0.5, -1.5], [-3.0, -0.125]]
    asked = server.bodies("/v1/tokenize" if maker == "sglang" else "/tokenize")
    assert {(body["prompt"], body["add_special_tokens"]) for body in asked} == {
        ("true", False), ("false", False), ("xy", True), ("ab", False), ("truec", False),
    }  # fmt: skip


def test_a_prefix_stands_before_a_single_part_too():
    server = ChatServer()
    connect(server).label_logits([LabelPrompt(("q?",), raw=False, prefix="Say yes. ")], ["Paris", "Lyon"])
    assert server.after_probe()[0]["messages"][0]["content"] == "Say yes. q?"


def test_long_texts_are_not_kept_in_the_cache(monkeypatch):
    calls = []
    endpoint = SimpleNamespace(tokenize_text=lambda text, special: calls.append(text) or (1,))
    reader = ServerLabelReader(endpoint)
    for text in ("x" * MAX_CACHED_CHARS, "x" * (MAX_CACHED_CHARS + 1)) * 2:
        reader._tokenize(text, False)
    assert [len(text) - MAX_CACHED_CHARS for text in calls] == [0, 1, 1]


def test_a_text_is_tokenized_only_once():
    server = aligned("vllm")
    connect(server, concurrency=1).label_logits([PROMPT, PROMPT, PROMPT], LABELS)
    assert len(server.bodies("/tokenize")) == 5


def test_an_unlisted_label_gets_the_smallest_of_the_top_tokens():
    server = LabelServer("vllm")
    best = {50: -0.5, 51: -2.0, 52: -3.0, 53: -4.0}
    server.at = {FIRST: best | {TRUE: -1.0, FALSE: -6.0}, SECOND: best | {TRUE: -1.0, FALSE: -1.5}}
    logits = connect(server).label_logits([PROMPT], LABELS)[0]
    assert logits[0].tolist() == [-1.0, -4.0]


def test_an_improbable_token_of_the_prompt_does_not_bound_the_others():
    server = LabelServer("vllm")
    best = {50: -0.5, 51: -1.0, 52: -2.0, 53: -3.0, 54: -4.0}
    server.at = {FIRST: best | {TRUE: -20.0, FALSE: -5.0}}
    assert connect(server).label_logits([PROMPT], LABELS)[0][0].tolist() == [-20.0, -4.0]


@pytest.mark.parametrize("exact", ["ignores", "refuses"])
def test_the_last_position_falls_back_to_the_top_tokens(exact):
    server = aligned("vllm", exact=exact)
    server.at[END] = {50: -0.5, 51: -1.0, TRUE: -2.0, 53: -3.0, 54: -4.0, FALSE: -6.0}
    assert connect(server).label_logits([PROMPT], LABELS)[0][2].tolist() == [-2.0, -4.0]
    assert len(server.bodies("/v1/completions")) == (2 if exact == "refuses" else 1)


def test_labels_missing_at_the_last_position_get_the_same_bound():
    server = aligned("vllm", exact="ignores")
    server.at[END] = {50: -0.5, 51: -1.0, 52: -2.0, 53: -3.0, 54: -4.0}
    assert connect(server).label_logits([PROMPT], LABELS)[0][2].tolist() == [-4.0, -4.0]


def test_the_kind_of_server_is_requested_only_once():
    server = aligned("sglang")
    model = connect(server)
    for _ in range(2):
        model.label_logits([PROMPT, PROMPT], LABELS)
    assert [path for path, _ in server.asked].count("/v1/models") == 1


def test_a_server_that_accepts_any_model_name_is_recognized_by_its_list():
    server = aligned("?", cards=[{"id": "/weights/m", "owned_by": "sglang"}])
    assert connect(server).label_logits([PROMPT], LABELS)[0][0].tolist() == [-0.5, -1.5]


def test_the_adapter_is_sent_to_sglang():
    server = aligned(
        "?", cards=[{"id": "base", "owned_by": "sglang"}, {"id": "m", "owned_by": "sglang", "parent": "b"}]
    )
    connect(server).label_logits([PROMPT], LABELS)
    assert server.bodies("/generate")[0]["lora_path"] == "m"


@pytest.mark.parametrize("cards", [[{"id": "m", "owned_by": "library"}], []])
def test_other_servers_are_refused_with_a_list_of_supported_ones(cards):
    server = LabelServer("?", cards=cards)
    with pytest.raises(
        UnsupportedSignal,
        match=r"cannot compute the probabilities of answers such as yes and no at several places of a prompt\. "
        r"Use a server of vLLM, SGLang, llama\.cpp",
    ):
        connect(server).label_logits([PROMPT], LABELS)
    assert server.bodies("/tokenize") == server.bodies("/v1/completions") == []


@pytest.mark.parametrize(
    ("maker", "path"), [("vllm", "/tokenize"), ("sglang", "/v1/tokenize"), ("sglang", "/generate")]
)
def test_a_hidden_endpoint_is_explained(maker, path):
    with pytest.raises(
        UnsupportedSignal, match=rf"{path} answered 404: no\. Hidden states and the probabilities of answers"
    ):
        connect(aligned(maker, status={path: 404})).label_logits([PROMPT], LABELS)


@pytest.mark.parametrize(("maker", "path"), [("vllm", "/v1/completions"), ("sglang", "/generate")])
def test_a_refusal_contains_the_message_of_the_server(maker, path):
    with pytest.raises(ServerError, match=rf"{path} answered 400: no"):
        connect(aligned(maker, status={path: 400})).label_logits([PROMPT], LABELS)


@pytest.mark.parametrize(
    ("prompt", "labels", "message"),
    [
        (PROMPT, ["true", "truth"], "'true', 'truth' begin alike"),
        (PROMPT, ["true", ""], "begin alike"),
        (
            LabelPrompt(("ab", "truec", " false")),
            LABELS,
            "part 3 of the prompt does not start with one of the labels",
        ),
        (LabelPrompt(("ab", "")), LABELS, "part 2 of the prompt"),
        (LabelPrompt(("ab", "truec"), raw=False), LABELS, "several parts is not supported"),
        (LabelPrompt(()), LABELS, "has no text before its first answer label"),
    ],
)
def test_invalid_label_prompts_are_refused(prompt, labels, message):
    server = aligned("vllm")
    with pytest.raises(BadSetting, match=message):
        connect(server).label_logits([prompt], labels)
    assert server.bodies("/v1/completions") == []


def test_an_error_does_not_contain_the_prompt():
    with pytest.raises(BadSetting) as caught:
        connect(aligned("vllm")).label_logits([LabelPrompt(("secret", "secret"))], LABELS)
    assert "secret" not in str(caught.value)


def edit(*path, value):
    """Return a function that changes one item of a response."""

    def change(reply):
        item = reply
        for key in path[:-1]:
            item = item[key]
        item[path[-1]] = value
        return reply

    return change


CHOICE, META = ("choices", 0), ("meta_info",)


@pytest.mark.parametrize(
    ("maker", "change", "message"),
    [
        ("vllm", lambda reply: {"object": "error"}, "no field 'choices'"),
        ("vllm", edit(*CHOICE, "prompt_logprobs", value=None), "unknown format"),
        ("vllm", edit(*CHOICE, "prompt_logprobs", value=[None]), "of tokens that are not in the prompt"),
        (
            "vllm",
            edit(*CHOICE, "prompt_logprobs", FIRST, value={"50": {"logprob": -1.0}}),
            "of tokens that are not in the prompt",
        ),
        ("vllm", edit(*CHOICE, "prompt_logprobs", FIRST, value=None), "unknown format"),
        ("vllm", edit(*CHOICE, "prompt_logprobs", FIRST, value={"900": {"logprob": math.nan}}), "NaN"),
        (
            "vllm",
            edit(*CHOICE, "prompt_logprobs", FIRST, value={"900": {"logprob": -1.0}}),
            "only 1 of 5 requested token probabilities",
        ),
        ("vllm", edit(*CHOICE, "logprobs", value=None), "unknown format"),
        ("vllm", edit(*CHOICE, "logprobs", "top_logprobs", value=[{"true": -1.0}]), "unknown format"),
        ("vllm", edit(*CHOICE, "logprobs", "top_logprobs", value=[{"token_id:900": -math.inf}]), "-Infinity"),
        ("sglang", lambda reply: [], "unknown format"),
        ("sglang", edit("meta_info", value={"id": "x"}), "unknown format"),
        (
            "sglang",
            edit(*META, "input_token_logprobs", 0, value=[None, 5, None]),
            "of tokens that are not in the prompt",
        ),
        ("sglang", edit(*META, "input_token_ids_logprobs", value=[None]), "of tokens that are not in the prompt"),
        ("sglang", edit(*META, "input_token_ids_logprobs", 1, value=[[-1.0, TRUE, None]]), "unknown format"),
        ("sglang", edit(*META, "input_token_ids_logprobs", 1, 0, value=[math.nan, TRUE, None]), "NaN"),
        ("sglang", edit(*META, "output_token_ids_logprobs", 0, 0, value=[None, TRUE, None]), "unknown format"),
        ("sglang", edit(*META, "output_token_ids_logprobs", value=[]), "unknown format"),
    ],
)
def test_a_malformed_response_is_a_model_error(maker, change, message):
    server = aligned(maker)
    server.change = change
    with pytest.raises(ModelError, match=message):
        connect(server).label_logits([PROMPT], LABELS)


@pytest.mark.parametrize("reply", [{"tokens": None}, {"tokens": ["a"]}, []])
def test_a_malformed_response_of_the_tokenizer_is_a_model_error(reply):
    server = aligned("vllm")

    def broken(request):
        return httpx.Response(200, json=reply) if request.url.path == "/tokenize" else server(request)

    with pytest.raises(ModelError, match="did not return a list of token ids"):
        connect(broken).label_logits([PROMPT], LABELS)


@pytest.mark.parametrize("maker", ["vllm", "sglang"])
def test_a_batch_keeps_its_order_when_responses_are_delayed(maker):
    server = LabelServer(maker)
    prompts = [LabelPrompt(("a" * n, "truec")) for n in range(1, 10)]  # the label stands at place n + 1
    server.at = {place: {TRUE: -place / 8, FALSE: -8.0} for place in range(20)}

    def slow_first(request):
        body = json.loads(request.content or b"{}")
        time.sleep(0.05 if len(body.get("input_ids", body.get("prompt", ""))) == 4 else 0)
        return server(request)

    logits = connect(slow_first).label_logits(prompts, LABELS)
    assert [rows[:, 0].tolist() for rows in logits] == [[-(n + 1) / 8, -(n + 3) / 8] for n in range(1, 10)]
