"""Haystack: one component before the retriever. What need not be looked up leaves by `skip`."""

import sys

from knowgate.core.frameworks import require_for_script

require_for_script("haystack", extra="haystack")

from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from knowgate.integrations.haystack import KnowgateGate

store = InMemoryDocumentStore()
store.write_documents([Document(content="Mira runs the canteen of Balaland.")])
pipeline = Pipeline()
pipeline.add_component("gate", KnowgateGate())
pipeline.add_component("retriever", InMemoryBM25Retriever(store))
pipeline.connect("gate.retrieve", "retriever.query")
for question in sys.argv[1:]:
    done = pipeline.run({"gate": {"query": question}})
    documents = done.get("retriever", {}).get("documents", [])
    print(question, [one.content for one in documents], round(done["gate"]["need"], 2), sep=" | ")
