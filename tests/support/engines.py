"""Every search engine with the same three documents."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from knowgate.retrieval import load_retriever
from knowgate.retrieval.engines.base import FieldNames
from knowgate.retrieval.index import build_index
from tests.support.elastic_stub import ElasticStub
from tests.support.hash_embedder import HashEmbedder
from tests.support.retrieval_fakes import write_records

DOCUMENTS = {
    "canteen": {"text": "Mira runs the canteen of Balaland.", "title": "Canteen", "team": "office", "year": 2023},
    "stove": {"text": "The stove in the hut is new.", "title": "Hut", "team": "mountain", "year": 2024},
    "glossary": {"text": "Ada wrote the glossary of terms.", "title": "Words", "team": "office", "year": 2024},
}
ADDED = {"text": "The ferry leaves at noon.", "title": "Ferry", "team": "mountain", "year": 2025}
EMBEDDER = HashEmbedder(32)


@dataclass
class Engine:
    """A collection of three documents.

    Args:
        retriever: Searches the collection.
        add: Adds a fourth document.
        reopen: Opens the collection again, as a new process would.
    """

    retriever: Any
    add: Callable[[], None]
    reopen: Callable[[], Any]


def vector(text: str) -> list[float]:
    return [float(value) for value in EMBEDDER.embed([text])[0]]


def import_or_skip(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        pytest.skip(f"needs the extra {extra}")


def qdrant(folder: Path) -> Engine:
    qdrant_client = import_or_skip("qdrant_client", "qdrant")
    from knowgate.retrieval.engines.qdrant import QdrantRetriever

    client = qdrant_client.QdrantClient(":memory:")
    size = qdrant_client.models.VectorParams(size=EMBEDDER.width, distance=qdrant_client.models.Distance.COSINE)
    client.create_collection("handbook", vectors_config=size)

    def put(number: int, name: str, record: dict[str, Any]) -> None:
        point = qdrant_client.models.PointStruct(
            id=number, vector=vector(record["text"]), payload={**record, "key": name}
        )
        client.upsert("handbook", [point])

    for number, (name, record) in enumerate(DOCUMENTS.items()):
        put(number, name, record)
    reopen = lambda: QdrantRetriever(client, "handbook", embedder=EMBEDDER, fields=FieldNames(id="key"))  # noqa: E731
    return Engine(reopen(), lambda: put(9, "ferry", ADDED), reopen)


def chroma(folder: Path) -> Engine:
    chromadb = import_or_skip("chromadb", "chroma")
    from knowgate.retrieval.engines.chroma import ChromaRetriever

    client = chromadb.PersistentClient(str(folder), settings=chromadb.config.Settings(anonymized_telemetry=False))
    collection = client.create_collection(
        "handbook", embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
    )

    def put(name: str, record: dict[str, Any]) -> None:
        metadata = {key: value for key, value in record.items() if key != "text"}
        collection.add(
            ids=[name], documents=[record["text"]], embeddings=[vector(record["text"])], metadatas=[metadata]
        )

    for name, record in DOCUMENTS.items():
        put(name, record)
    reopen = lambda: ChromaRetriever(collection, embedder=EMBEDDER)  # noqa: E731
    return Engine(reopen(), lambda: put("ferry", ADDED), reopen)


def lancedb(folder: Path) -> Engine:
    lance = import_or_skip("lancedb", "lancedb")
    from knowgate.retrieval.engines.lancedb import LanceDBRetriever

    rows = [{"key": name, "vector": vector(record["text"]), **record} for name, record in DOCUMENTS.items()]
    table = lance.connect(str(folder)).create_table("handbook", rows)
    reopen = lambda: LanceDBRetriever(  # noqa: E731
        lance.connect(str(folder)).open_table("handbook"), embedder=EMBEDDER, fields=FieldNames(id="key")
    )
    added = [{"key": "ferry", "vector": vector(ADDED["text"]), **ADDED}]
    return Engine(reopen(), lambda: table.add(added), reopen)


def elastic(dialect: str, mode: str) -> Callable[[Path], Engine]:
    def create(folder: Path) -> Engine:
        from knowgate.retrieval.engines.elastic import ElasticRetriever, OpenSearchRetriever

        kind = ElasticRetriever if dialect == "elastic" else OpenSearchRetriever
        records = {name: {**record, "embedding": vector(record["text"])} for name, record in DOCUMENTS.items()}
        stub = ElasticStub(dialect, "handbook", records)
        fields = FieldNames(vector="embedding" if mode == "knn" else "")
        transport = httpx.MockTransport(stub)
        reopen = lambda: kind(  # noqa: E731
            "http://search.test", "handbook", mode=mode, fields=fields, embedder=EMBEDDER, transport=transport
        )
        return Engine(reopen(), lambda: stub.put("ferry", {**ADDED, "embedding": vector(ADDED["text"])}), reopen)

    return create


def folder_index(kind: str) -> Callable[[Path], Engine]:
    """Return a function that creates an index folder, which must behave like the other engines."""

    def create(folder: Path) -> Engine:
        from knowgate.retrieval.index_folder import open_dense, open_hybrid

        texts = {name: str(record["text"]) for name, record in DOCUMENTS.items()}
        source, out = folder / "records.jsonl", folder / "index"
        embedder = None if kind == "bm25" else EMBEDDER

        def build(records: dict[str, str]) -> None:
            build_index(write_records(source, records), out, kind=kind, embedder=embedder)

        build(texts)
        openers = {"dense": open_dense, "hybrid": open_hybrid}
        reopen = lambda: openers[kind](out, EMBEDDER) if kind in openers else load_retriever(str(out))  # noqa: E731
        return Engine(reopen(), lambda: build({**texts, "ferry": ADDED["text"]}), reopen)

    return create


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "bm25": folder_index("bm25"),
    "dense": folder_index("dense"),
    "hybrid": folder_index("hybrid"),
    "qdrant": qdrant,
    "chroma": chroma,
    "lancedb": lancedb,
    "elastic-bm25": elastic("elastic", "bm25"),
    "elastic-knn": elastic("elastic", "knn"),
    "opensearch-bm25": elastic("opensearch", "bm25"),
    "opensearch-knn": elastic("opensearch", "knn"),
}
