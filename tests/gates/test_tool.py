"""The LLM decides by calling a search tool: locally by probability, on a server by the fact."""

import json

import httpx
import pytest

from knowgate.errors import UnsupportedSignal
from knowgate.gates import load_gate
from knowgate.gates.scoring import bind_gate, read_questions, score_questions
from knowgate.models.fake import FakeModel
from knowgate.models.openai.model import OpenAIModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Prompt, Question, Signal

QUESTIONS = [Question("Who wrote Hamlet?"), Question("What is in our handbook?")]


def decide(model):
    gate = bind_gate(load_gate("tool"), model, AnswerPrompts())
    return score_questions(gate, QUESTIONS, read_questions(model, [gate], QUESTIONS, AnswerPrompts()))


def test_an_unknown_answer_calls_the_tool():
    known, unknown = decide(FakeModel({"Hamlet": {"known": True}, "handbook": {"known": False}}))
    assert known < 0.5 < unknown


def test_a_model_without_tools_is_rejected():
    with pytest.raises(UnsupportedSignal, match="needs tools"):
        decide(FakeModel(offers=frozenset(Signal) - {Signal.TOOLS}))


# --- servers --------------------------------------------------------------------------------------


def serve(reply, status=200):
    """A server that answers requests with tools by `reply(question)` and notes them in `requests`."""
    requests = []

    def handle(request):
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "test"}]})
        body = json.loads(request.content)
        if "tools" not in body:
            return httpx.Response(200, json={"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]})
        requests.append(body)
        message = reply(body["messages"][0]["content"])
        return httpx.Response(status, json={"choices": [{"message": message, "finish_reason": "stop"}]})

    return OpenAIModel("m", "http://server/v1", transport=httpx.MockTransport(handle)), requests


def answer_or_call(question):
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"query": "handbook"}'}}
    return {"content": None, "tool_calls": [call]} if "handbook" in question else {"content": "Shakespeare"}


def test_a_server_is_offered_the_search_tool_and_its_call_is_the_need():
    model, requests = serve(answer_or_call)
    assert decide(model) == [0.0, 1.0]
    assert [body["tools"][0]["function"]["name"] for body in requests] == ["search", "search"]
    assert {body["tool_choice"] for body in requests} == {"auto"}


def test_a_server_that_refuses_tools_is_an_error_with_advice():
    model, _ = serve(answer_or_call, status=400)
    with pytest.raises(UnsupportedSignal, match=r"refuses tools for 'm': .*another LLM"):
        model.tool_call_probabilities([Prompt("Who?")], {"type": "function"})
