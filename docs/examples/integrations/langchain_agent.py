"""LangChain: an agent that is not shown its search tool where nothing need be looked up."""

import sys

from knowgate.core.frameworks import require_for_script
from knowgate.integrations.decider import open_decider

require_for_script("langchain", extra="langchain")

from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda

from knowgate.integrations.langchain import middleware


class Scripted(GenericFakeChatModel):  # stands for your chat model: it searches once where it can
    def bind_tools(self, tools, **_):
        call = {"name": tools[0].name, "args": {"query": "it"}, "id": "1"}
        return RunnableLambda(lambda said: AIMessage("", tool_calls=[call] if said[-1].type == "human" else []))


def search(query: str) -> str:
    """Search the handbook."""
    return print("searched") or "Mira runs the canteen."


agent = create_agent(
    Scripted(messages=iter([AIMessage("done")] * 9)), [search], middleware=[middleware(open_decider(), hide=["search"])]
)
for question in sys.argv[1:]:
    print(question, agent.invoke({"messages": [("user", question)]})["knowgate"]["retrieve"], sep=" | ")
