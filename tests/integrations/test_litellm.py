"""LiteLLM as installed, without a provider: its own mock replies."""

import asyncio
import json

import pytest

litellm = pytest.importorskip("litellm", reason="needs the extra litellm")

from knowgate.errors import AdapterError, BadSetting, ServerError
from knowgate.gates import load_gate
from knowgate.integrations import litellm as adapter
from knowgate.integrations.litellm import KnowgateHook, LiteLLMModel
from knowgate.models import load_model
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Prompt, Signal
from tests.integrations.conftest import KNOWN, TABLE, UNKNOWN

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of its own models


def call(hook, messages, kind="acompletion"):
    data = {"model": "m", "messages": messages, "metadata": {"team": "hr"}}
    return asyncio.run(hook.async_pre_call_hook(None, None, data, kind))


def user(text):
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]


def test_the_callback_adds_passages_only_if_needed(rag):
    hook = KnowgateHook(rag)
    known, unknown = call(hook, user(KNOWN)), call(hook, user(UNKNOWN))
    assert known["messages"] == user(KNOWN)
    assert known["metadata"]["knowgate"]["retrieve"] is False
    assert known["metadata"]["team"] == "hr"
    assert "Mira runs the canteen" in unknown["messages"][-1]["content"]
    assert unknown["messages"][-1]["content"].endswith(UNKNOWN)
    assert unknown["metadata"]["knowgate"]["passages"] == ["canteen"]


def test_passages_can_go_to_the_system_message(rag):
    done = call(KnowgateHook(rag, place="system"), user(UNKNOWN))
    assert "Mira runs the canteen" in done["messages"][0]["content"]
    assert done["messages"][1] == user(UNKNOWN)[1]


def test_requests_without_a_question_are_forwarded(rag):
    hook = KnowgateHook(rag)
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert call(hook, picture)["metadata"]["knowgate"] == {"ungated": "the user's message contains more than text"}
    assert "knowgate" not in call(hook, user(UNKNOWN), "embeddings")["metadata"]
    assert "knowgate" not in call(hook, ["odd"])["metadata"]


def test_clients_see_the_decision_in_headers(rag):
    hook = KnowgateHook(rag)
    data = call(hook, user(UNKNOWN))
    headers = asyncio.run(hook.async_post_call_response_headers_hook(data, None, None))
    assert headers == {"x-knowgate-decision": "retrieve", "x-knowgate-gate": "logprob"}


class Broken:
    name = fingerprint = "broken"

    def search(self, queries, k):
        raise ServerError("the index is gone.")


def test_failures_fall_open_with_a_note(broken):
    hook = KnowgateHook(AdaptiveRAG(FakeModel(TABLE), load_gate("always"), Broken()))
    done = call(hook, user(UNKNOWN))
    assert done["messages"] == user(UNKNOWN)
    assert done["metadata"]["knowgate"] == {"failed": "the index is gone."}


def test_a_callback_without_documents_is_an_error():
    with pytest.raises(BadSetting, match="Set `docs` or `index`"):
        KnowgateHook(AdaptiveRAG(FakeModel(TABLE), load_gate("never")))


def test_the_proxy_finds_the_handler_by_name(tmp_path, monkeypatch):
    """As LiteLLM's proxy loads `callbacks: knowgate.integrations.litellm.handler`."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Mira runs the canteen of Balaland.", encoding="utf-8")
    (tmp_path / "table.json").write_text(json.dumps(TABLE), encoding="utf-8")
    config = tmp_path / "my.toml"
    config.write_text(f"model = 'fake:{tmp_path}/table.json'\ngate = 'logprob:mean'\ndocs = '{tmp_path}/docs'\n")
    monkeypatch.setenv("KNOWGATE_CONFIG", str(config))
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(vars(adapter), "handler", raising=False)
    from litellm.proxy.types_utils.utils import get_instance_fn

    hook = get_instance_fn("knowgate.integrations.litellm.handler")
    assert "Mira runs" in call(hook, user(UNKNOWN))["messages"][-1]["content"]
    monkeypatch.delitem(vars(adapter), "handler", raising=False)


def test_a_litellm_model_is_a_knowgate_model():
    model = LiteLLMModel("gpt-4o-mini", logprobs=False, mock_response="Paris is big")
    assert model.generate([Prompt("?")], max_tokens=9)[0][0].text == "Paris is big"
    assert "".join(model.stream(Prompt("?"), max_tokens=9)) == "Paris is big"
    assert AdaptiveRAG(model, load_gate("never")).answer("Where?").text == "Paris is big"


def test_log_probabilities_are_offered_if_the_provider_returns_them():
    assert Signal.LOGPROBS in LiteLLMModel("gpt-4o-mini").offers
    assert Signal.LOGPROBS not in load_model("litellm:anthropic/claude-3-5-sonnet-20240620").offers


def test_a_failing_provider_is_an_error():
    model = LiteLLMModel("gpt-4o-mini", logprobs=False, mock_response=litellm.RateLimitError("slow down", "p", "m"))
    with pytest.raises(AdapterError, match="litellm:gpt-4o-mini failed: RateLimitError"):
        model.generate([Prompt("?")], max_tokens=3)
