"""LangGraph: one conditional edge goes past retrieval."""

import sys
from typing import TypedDict

from knowgate.core.frameworks import require_for_script
from knowgate.integrations.decider import open_decider

require_for_script("langgraph", extra="langchain")

from langgraph.graph import END, START, StateGraph

from knowgate.integrations.langchain import route


class State(TypedDict, total=False):
    question: str
    context: str


graph = StateGraph(State)
graph.add_node("retrieve", lambda state: {"context": "Mira runs the canteen of Balaland."})
graph.add_node("answer", lambda state: {})
graph.add_conditional_edges(START, route(open_decider()), ["retrieve", "answer"])
graph.add_edge("retrieve", "answer")
graph.add_edge("answer", END)
for question in sys.argv[1:]:
    print(question, graph.compile().invoke({"question": question}).get("context"), sep=" | ")
