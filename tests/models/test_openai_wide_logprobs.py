"""Servers that list few tokens: other labels are requested by token id, or get a bound."""

import json
import math

import httpx
import numpy as np
import pytest

from knowgate.core.http_client import RetryPolicy
from knowgate.errors import BadSetting
from knowgate.gates import load_gate
from knowgate.gates.scoring import bind_gate
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import Labeler
from knowgate.labels.options import LabelOptions
from knowgate.models.openai.model import OpenAIModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import DecisionNote, LabelPrompt, Question
from tests.support.chat_server import ChatServer

QUICK = RetryPolicy(timeout=120, total=360, retries=1, backoff=0.0)
SPELLED = {"true": [9], " true": [19], "false": [8], " false": [18]}
EXACT = {9: 0.02, 19: 0.01, 8: 0.004, 18: 0.001}
HALF_LISTED = "listed"


class CappedServer(ChatServer):
    """Lists five tokens, with 'true' among them only if the question asks for it. `maker` is the kind of server."""

    def __init__(self, maker="library"):
        super().__init__()
        self.cards = [{"id": "m", "owned_by": maker}]

    def _reply(self, path, body):
        reply = super()._reply(path, body)
        if HALF_LISTED in json.dumps(body):
            for choice in reply["choices"]:
                for place in (choice.get("logprobs") or {}).get("content", []):
                    place["top_logprobs"] = [{"token": "true", "logprob": math.log(0.9)}, *place["top_logprobs"]]
        return reply

    def __call__(self, request):
        body = json.loads(request.content) if request.content else {}
        if request.url.path.endswith("/tokenize"):
            tokens = [1, 2, 3] if "messages" in body else SPELLED.get(body["prompt"], [4, 5])
            return httpx.Response(200, json={"tokens": tokens})
        if request.url.path == "/generate":
            assert (body["input_ids"], body["logprob_start_len"]) == ([1, 2, 3], 2)
            row = [[math.log(EXACT[token]), token, None] for token in body["token_ids_logprob"]]
            return httpx.Response(200, json={"meta_info": {"output_token_ids_logprobs": [row]}})
        return super().__call__(request)


def connect(server):
    return OpenAIModel("m", "http://server.test/v1", retry=QUICK, transport=httpx.MockTransport(server))


def test_labels_are_requested_from_sglang_by_token_id():
    row = connect(CappedServer("sglang")).label_logits([LabelPrompt(("Can you?",), raw=False)], ("true", "false"))[0]
    np.testing.assert_allclose(np.exp(row), [[0.03, 0.005]], rtol=1e-5)


def test_a_question_with_unlisted_labels_gets_a_note_and_does_not_affect_others():
    rag = AdaptiveRAG(connect(CappedServer()), load_gate("prompt"))
    none, one = rag.answer_many([Question("Who?"), Question(f"Who is {HALF_LISTED}?")])
    assert (none.decision.need, none.decision.notes) == (0.5, (DecisionNote.LABELS_UNLISTED,))
    assert "none of the gate's labels among its top tokens" in none.decision.reason
    assert one.decision.need == pytest.approx(0.01 / 0.91)  # 'false' has at most what the least listed has
    assert one.decision.notes == ()
    assert (none.text, one.text) != ("", "")


def test_a_label_run_omits_unlisted_labels():
    labeller = Labeler(connect(CappedServer()), StringGrader(), LabelOptions(samples=0))
    asked = [Question("Who?", id="1", answers=("x",)), Question(f"Who is {HALF_LISTED}?", id="2", answers=("x",))]
    rows = labeller.label(asked).rows
    assert ["self_assessment" in row.signals for row in rows] == [False, True]


def test_a_gate_whose_labels_are_not_single_tokens_is_refused():
    with pytest.raises(BadSetting, match=r"'selfrag' needs an LLM with .* is not a single token"):
        bind_gate(load_gate("selfrag"), connect(CappedServer("vllm")), AnswerPrompts())
    bind_gate(load_gate("selfrag"), connect(CappedServer("library")), AnswerPrompts())  # nobody can tell
