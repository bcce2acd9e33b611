"""OpenAI Agents: a tool that is there only where something must be looked up. The question comes in the context."""

import asyncio
import sys

from knowgate.core.frameworks import require_for_script
from knowgate.integrations.decider import open_decider

require_for_script("agents", extra="openai-agents")

from agents import Agent, RunContextWrapper, function_tool

from knowgate.integrations.openai_agents import enable_tool


@function_tool(is_enabled=enable_tool(open_decider()))
def search(query: str) -> str:
    """Search the handbook."""
    return "Mira runs the canteen of Balaland."


agent = Agent(name="helper", tools=[search])
for question in sys.argv[1:]:  # as Runner.run(agent, question, context={"question": question}) does
    tools = asyncio.run(agent.get_all_tools(RunContextWrapper({"question": question})))
    print(question, [tool.name for tool in tools], sep=" | ")
