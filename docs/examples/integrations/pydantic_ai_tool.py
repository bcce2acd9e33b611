"""Pydantic AI: a tool that is offered only where something must be looked up."""

import asyncio
import sys

from knowgate.core.frameworks import require_for_script
from knowgate.integrations.decider import open_decider

require_for_script("pydantic_ai", extra="pydantic-ai")

from pydantic_ai import Agent, Tool
from pydantic_ai.models.test import TestModel

from knowgate.integrations.pydantic_ai import prepare_tool


def search(query: str) -> str:
    """Search the handbook."""
    return "Mira runs the canteen of Balaland."


agent = Agent(
    TestModel(), tools=[Tool(search, prepare=prepare_tool(open_decider()))]
)  # TestModel calls what it is offered
for question in sys.argv[1:]:
    print(question, asyncio.run(agent.run(question)).output, sep=" | ")
