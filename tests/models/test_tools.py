"""How chat templates offer a tool and write its call."""

import math

import pytest

from knowgate.errors import UnsupportedSignal
from knowgate.models.hf.model import HFModel
from knowgate.models.tools import SEARCH_TOOL, find_call_token, render_with_tool
from knowgate.types import Prompt
from tests.support.tiny_models import save_tiny_llama

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}!{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}:{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return HFModel(str(save_tiny_llama(tmp_path_factory.mktemp("llama"), window=2048)))


@pytest.fixture
def with_tools(model):
    before = model.tokenizer.chat_template
    model.tokenizer.chat_template = TEMPLATE
    yield model
    model.tokenizer.chat_template = before


def test_the_message_is_rendered_with_the_tool(with_tools):
    rendered = render_with_tool(with_tools.tokenizer, "Who?", SEARCH_TOOL, "m")
    assert rendered.endswith("Who?:")
    assert "Search the documents" in rendered


def test_the_first_token_of_a_call_is_found_by_the_template(with_tools):
    tokenizer = with_tools.tokenizer
    assert find_call_token(tokenizer, SEARCH_TOOL, "m") == tokenizer.encode("!search", add_special_tokens=False)[0]


def test_the_probability_is_that_of_the_first_token_of_a_call(with_tools):
    rendered = render_with_tool(with_tools.tokenizer, "Who?", SEARCH_TOOL, "m")
    token = with_tools.tokenizer.decode([find_call_token(with_tools.tokenizer, SEARCH_TOOL, "m")])
    by_hand = math.exp(with_tools.answer_logprobs([Prompt(rendered, raw=True)], [token])[0])
    assert with_tools.tool_call_probabilities([Prompt("Who?")], SEARCH_TOOL) == [pytest.approx(by_hand, rel=1e-3)]


def test_a_template_without_tools_is_rejected(model):
    with pytest.raises(UnsupportedSignal, match="does not support tools"):
        model.tool_call_probabilities([Prompt("Who?")], SEARCH_TOOL)
