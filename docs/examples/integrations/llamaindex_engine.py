"""LlamaIndex: a query engine around yours; what the LLM knows it answers from memory."""

import sys

from knowgate.core.frameworks import require_for_script
from knowgate.integrations.decider import open_decider

require_for_script("llama_index", extra="llamaindex")

from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.schema import Document

from knowgate.integrations.llamaindex import KnowgateQueryEngine

index = VectorStoreIndex.from_documents(
    [Document(text="Mira runs the canteen of Balaland.")], embed_model=MockEmbedding(8)
)
engine = KnowgateQueryEngine(wrapped=index.as_query_engine(llm=MockLLM()), decider=open_decider())
for question in sys.argv[1:]:
    response = engine.query(question)
    print(question, response.metadata["knowgate"]["retrieve"], str(response).replace("\n", " "), sep=" | ")
