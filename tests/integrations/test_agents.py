"""Pydantic AI and OpenAI Agents as installed, each with a scripted model."""

import asyncio

import pytest

from knowgate.errors import BadSetting, KnowgateError
from tests.integrations.conftest import KNOWN, UNKNOWN


@pytest.fixture
def heard():
    return []


@pytest.fixture
def told(heard):
    return lambda question, decision: heard.append((question, decision.retrieve))


# --- Pydantic AI ----------------------------------------------------------------------------------


def pydantic_agent(decider, told=None):
    ai = pytest.importorskip("pydantic_ai", reason="needs the extra pydantic-ai")
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel

    from knowgate.integrations.pydantic_ai import prepare_tool

    searched = []

    def search(query: str) -> str:
        """Search the handbook."""
        searched.append(query)
        return "Mira runs it."

    def scripted(messages, info):
        asked_before = any(part.part_kind == "tool-return" for message in messages for part in message.parts)
        if info.function_tools and not asked_before:
            return ModelResponse([ToolCallPart(info.function_tools[0].name, {"query": "canteen"})])
        return ModelResponse([TextPart("done")])

    agent = ai.Agent(FunctionModel(scripted), tools=[ai.Tool(search, prepare=prepare_tool(decider, on_decision=told))])
    return agent, searched


def test_a_pydantic_agent_searches_only_if_needed(decider, told, heard):
    agent, searched = pydantic_agent(decider, told)
    assert asyncio.run(agent.run(KNOWN)).output == "done"
    assert asyncio.run(agent.run("thanks")).output == "done"
    assert searched == []
    assert asyncio.run(agent.run(UNKNOWN)).output == "done"
    assert searched == ["canteen"]
    assert heard == [(KNOWN, False), ("thanks", False), (UNKNOWN, True)]


def test_a_pydantic_agent_raises_or_falls_open(broken):
    agent, searched = pydantic_agent(broken(True))
    asyncio.run(agent.run(KNOWN))
    assert searched == ["canteen"]
    with pytest.raises(KnowgateError):
        asyncio.run(pydantic_agent(broken(False))[0].run(KNOWN))


# --- OpenAI Agents --------------------------------------------------------------------------------


def openai_agent(decider, told=None):
    agents = pytest.importorskip("agents", reason="needs the extra openai-agents")
    from agents.items import ModelResponse
    from agents.models.interface import Model
    from agents.usage import Usage
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

    from knowgate.integrations.openai_agents import enable_tool

    searched, shown = [], []

    class Scripted(Model):
        async def get_response(self, system_instructions, input, model_settings, tools, *rest, **more):
            shown.append([item.name for item in tools])
            done = not isinstance(input, str) and any(item.get("type") == "function_call_output" for item in input)
            if tools and not done:
                made = ResponseFunctionToolCall(
                    arguments='{"query": "canteen"}', call_id="1", name="search", type="function_call"
                )
            else:
                text = ResponseOutputText(annotations=[], text="done", type="output_text")
                made = ResponseOutputMessage(
                    id="1", content=[text], role="assistant", status="completed", type="message"
                )
            return ModelResponse(output=[made], usage=Usage(), response_id=None)

        def stream_response(self, *_, **__):
            raise NotImplementedError

    @agents.function_tool(is_enabled=enable_tool(decider, on_decision=told))
    def search(query: str) -> str:
        """Search the handbook."""
        searched.append(query)
        return "Mira runs it."

    agent = agents.Agent(name="helper", tools=[search], model=Scripted())
    config = agents.RunConfig(tracing_disabled=True)

    def run(text, **context):
        made = agents.Runner.run(agent, text, context=context or {"question": text}, run_config=config)
        return asyncio.run(made).final_output

    return run, searched, shown


def test_an_openai_agent_searches_only_if_needed(decider, told, heard):
    run, searched, shown = openai_agent(decider, told)
    assert (run(KNOWN), run("thanks"), searched) == ("done", "done", [])
    assert shown == [[], []]
    assert run(UNKNOWN) == "done"
    assert searched == ["canteen"]
    assert heard == [(KNOWN, False), ("thanks", False), (UNKNOWN, True)]


def test_an_openai_agent_falls_open(broken):
    run, searched, _ = openai_agent(broken(True))
    assert (run(KNOWN), searched) == ("done", ["canteen"])


def test_an_openai_agent_without_a_question_explains_how_to_pass_it(decider):
    with pytest.raises(BadSetting, match=r"context={'question': question}"):
        openai_agent(decider)[0](UNKNOWN, other="thing")
