"""Qdrant: your collection behind a pipeline of knowgate's. On the command line: --index qdrant:URL/COLLECTION"""

import sys

from knowgate.core.frameworks import require_for_script

require_for_script("qdrant_client", extra="qdrant")

from qdrant_client import QdrantClient, models

from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.settings import load_settings
from knowgate.retrieval.embeddings import load_embedder
from knowgate.retrieval.engines.qdrant import QdrantRetriever

client, embedder, text = QdrantClient(":memory:"), load_embedder(), "Mira runs the canteen of Balaland."
vector = embedder.embed([text])[0].tolist()
size = models.VectorParams(size=len(vector), distance=models.Distance.COSINE)
client.create_collection("handbook", vectors_config=size)
client.upsert("handbook", [models.PointStruct(id=1, vector=vector, payload={"text": text, "team": "office"})])

retriever = QdrantRetriever(client, "handbook", embedder=embedder).filtered({"team": "office"})
rag = build_pipeline(load_settings(), retrieves=False).replace(retriever=retriever)
for question in sys.argv[1:]:
    answer = rag.answer(question)
    print(question, [one.text for one in answer.passages], answer.text, sep=" | ")
