"""Qdrant: your collection behind a pipeline of knowgate's. On the command line: --index qdrant:URL/COLLECTION"""

import sys

from knowgate.integrations import script_needs

script_needs("qdrant_client", extra="qdrant")

from qdrant_client import QdrantClient, models

from knowgate import build_pipeline, load_settings
from knowgate.embedding import open_embedder
from knowgate.integrations.qdrant import QdrantRetriever

client, embedder, text = QdrantClient(":memory:"), open_embedder(), "Mira runs the canteen of Balaland."
vector = embedder.embed([text])[0].tolist()
size = models.VectorParams(size=len(vector), distance=models.Distance.COSINE)
client.create_collection("handbook", vectors_config=size)
client.upsert("handbook", [models.PointStruct(id=1, vector=vector, payload={"text": text, "team": "office"})])

retriever = QdrantRetriever(client, "handbook", embedder=embedder).filtered({"team": "office"})
rag = build_pipeline(load_settings(), retrieves=False).altered(retriever=retriever)
for question in sys.argv[1:]:
    answer = rag.answer(question)
    print(question, [one.text for one in answer.passages], answer.text, sep=" | ")
