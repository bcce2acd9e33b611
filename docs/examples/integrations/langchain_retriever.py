"""LangChain: a retriever that finds nothing where the LLM knows the answer. knowgate.toml names model and gate."""

import sys

from knowgate.core.frameworks import require_for_script
from knowgate.integrations.decider import open_decider

require_for_script("langchain_core", extra="langchain")

from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda

from knowgate.integrations.langchain import DecisionRecorder, KnowgateRetriever

mine = RunnableLambda(lambda question: [Document("Mira runs the canteen of Balaland.")])  # any retriever of yours
retriever = KnowgateRetriever(wrapped=mine, decider=open_decider())

for question in sys.argv[1:]:
    seen = DecisionRecorder()
    found = retriever.invoke(question, config={"callbacks": [seen]})
    print(question, [one.page_content for one in found], seen.records[0]["reason"], sep=" | ")
