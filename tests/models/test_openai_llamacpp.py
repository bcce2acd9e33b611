"""Gates on a real llama.cpp server agree with the same weights in this process; others are refused."""

import json
import math

import httpx
import numpy as np
import pytest

from knowgate.core.http_client import RetryPolicy
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LabelSource, LogEntry
from knowgate.data.history.sqlite_store import SqliteHistory
from knowgate.errors import UnsupportedSignal
from knowgate.gates import load_gate
from knowgate.gates.dhicl import DhiclGate
from knowgate.gates.scoring import bind_gate, read_questions, score_with_raw
from knowgate.models.openai.model import OpenAIModel
from knowgate.models.openai.responses import TokenLogprobs
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import LabelPrompt, Question
from tests.support.chat_server import ChatServer
from tests.support.hash_embedder import HashEmbedder
from tests.support.llama_server import NAME, running_llama

TEXTS = ("What is the capital of France?", "Is water wet?")
QUESTIONS = [Question(text, id=str(number)) for number, text in enumerate(TEXTS)]
PROMPTS = AnswerPrompts()
CLOSE = 0.08  # of a need: the server computes several requests together, and rounds otherwise
QUICK = RetryPolicy(timeout=120, total=360, retries=1, backoff=0.0)


@pytest.fixture(scope="module")
def served():
    pytest.importorskip("xllamacpp", reason="needs the extra 'llamacpp'")
    with running_llama() as url:
        yield OpenAIModel(NAME, url)


def needs(gate, model):
    bound = bind_gate(load_gate(gate) if isinstance(gate, str) else gate, model, PROMPTS)
    return score_with_raw(bound, QUESTIONS, read_questions(model, [bound], QUESTIONS, PROMPTS)).needs


@pytest.mark.model
@pytest.mark.parametrize("gate", ["prompt", "logprob:entropy,draft_tokens=1"])
def test_needs_equal_those_of_the_same_weights_in_process(served, smollm_llamacpp, gate):
    """Labels beyond the top 20 are requested, and entropies computed from a long list of tokens."""
    np.testing.assert_allclose(needs(gate, served), needs(gate, smollm_llamacpp), atol=CLOSE)


@pytest.mark.model
def test_labels_inside_a_prompt_equal_those_of_the_same_weights_in_process(served, smollm_llamacpp):
    parts = ("Is Paris in France? A:", " true\nIs Rome in Spain? A:", " false\nIs Bonn in Peru? A:")
    asked = [LabelPrompt(parts, prefix="Answer the questions with true or false and nothing else.\n")]
    mine, other = (model.label_logits(asked, (" true", " false"))[0] for model in (served, smollm_llamacpp))
    assert mine.shape == (3, 2)
    np.testing.assert_allclose(mine[:, 0] - mine[:, 1], other[:, 0] - other[:, 1], atol=0.3)


@pytest.mark.slow
@pytest.mark.model
def test_dhicl_decides_on_a_llama_cpp_server(served, smollm_llamacpp, tmp_path):
    found = []
    for model in (served, smollm_llamacpp):
        scope = HistoryScope(model.fingerprint, PROMPTS.fingerprint)
        log = SqliteHistory(tmp_path / f"{model.fingerprint}.db", HashEmbedder())
        labels = (KnowledgeLabel.KNOWN, KnowledgeLabel.UNKNOWN)
        log.add([LogEntry(f"{text} ({n})", labels[n % 2], scope, LabelSource.GOLD) for n, text in enumerate(TEXTS)])
        found.append(needs(DhiclGate(log, k=2), model))
    np.testing.assert_allclose(found[0], found[1], atol=CLOSE)


@pytest.mark.model
def test_gates_that_read_hidden_states_are_refused_at_the_start(served):
    with pytest.raises(UnsupportedSignal, match="hidden"):
        bind_gate(load_gate("seakr"), served, PROMPTS)


# --- servers with a cap ---------------------------------------------------------------------------


def test_a_gate_that_reads_entropies_is_refused_if_few_tokens_are_listed():
    model = OpenAIModel("m", "http://server.test/v1", retry=QUICK, transport=httpx.MockTransport(ChatServer()))
    with pytest.raises(UnsupportedSignal, match=r"returns too few log-probabilities.*logprob:mean"):
        bind_gate(load_gate("logprob:entropy"), model, PROMPTS)
    bind_gate(load_gate("logprob:mean"), model, PROMPTS)


def test_a_gate_that_reads_inner_labels_is_refused_on_other_servers(tmp_path):
    server = ChatServer()
    server.cards = [{"id": "m", "owned_by": "library"}]
    model = OpenAIModel("m", "http://server.test/v1", retry=QUICK, transport=httpx.MockTransport(server))
    with pytest.raises(
        UnsupportedSignal, match=r"'dhicl' reads token probabilities inside a prompt. The server of openai:m"
    ):
        bind_gate(DhiclGate(SqliteHistory(tmp_path / "log.db", HashEmbedder())), model, PROMPTS)


TOKENS = {"yes": 9, " yes": 19, "no": 8, " no": 18}


class VllmServer(ChatServer):
    """Lists the tokens in `logprob_token_ids`, in the format of vLLM 0.32."""

    def __call__(self, request):
        body = json.loads(request.content) if request.content else {}
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [TOKENS[body["prompt"]]], "count": 1, "max_model_len": 2048})
        if "logprob_token_ids" in body:
            values = {9: 0.02, 19: 0.01, 8: 0.004, 18: 0.001}
            top = [{"token": f"token_id:{i}", "logprob": math.log(values[i])} for i in body["logprob_token_ids"]]
            first = {"token": "token_id:5", "logprob": -0.1, "top_logprobs": top}
            choice = {"message": {"content": "x"}, "finish_reason": "length", "logprobs": {"content": [first]}}
            return httpx.Response(200, json={"choices": [choice]})
        return super().__call__(request)


def test_labels_beyond_the_limit_of_vllm_are_requested_by_token_id():
    model = OpenAIModel("m", "http://server.test/v1", retry=QUICK, transport=httpx.MockTransport(VllmServer()))
    row = model.label_logits([LabelPrompt(("Can you?",), raw=False)], ("yes", "no"))[0]
    np.testing.assert_allclose(np.exp(row), [[0.03, 0.005]], rtol=1e-5)


def test_the_entropy_of_a_long_list_approximates_that_of_the_distribution():
    even = TokenLogprobs("a", math.log(1 / 1_000), tuple((str(i), math.log(1 / 1_000)) for i in range(1_000)))
    assert even.entropy == pytest.approx(math.log(1_000), abs=1e-6)
    assert TokenLogprobs("a", -0.1, (("a", -0.1), ("b", -3.0))).entropy is None
