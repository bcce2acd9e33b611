"""Chroma: `chroma:URL_OR_FOLDER/COLLECTION?...` (extra `chroma`). Options: see `engine.py`; the text is the record's
document unless `text` names a field of its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from knowgate.core.frameworks import check_framework_version, wrap_errors
from knowgate.retrieval.engines.base import FINGERPRINT_RECORDS, EngineRetriever, SearchHit, parse_collection_spec

DOCUMENT_FIELD = "text"  # where a record's document is put, unless its metadata has such a field


def open_chroma(value: str) -> ChromaRetriever:
    """A server's URL, or a folder that Chroma keeps by itself, and the collection."""
    spec = parse_collection_spec("chroma", value)
    check_framework_version("chromadb", "chroma", majors=("1",))
    import chromadb
    from chromadb.config import Settings

    quiet = Settings(anonymized_telemetry=False)
    with wrap_errors("Chroma"):
        if spec.at.startswith(("http://", "https://")):
            parts = urlsplit(spec.at)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            client = chromadb.HttpClient(str(parts.hostname), port, ssl=parts.scheme == "https", settings=quiet)
        else:
            client = chromadb.PersistentClient(spec.at, settings=quiet)
        collection = client.get_collection(spec.collection, embedding_function=None)
    return ChromaRetriever(
        collection, fields=spec.fields, embedder=spec.embedder, where=spec.where, version=spec.version
    )


class ChromaRetriever(EngineRetriever):
    """Any collection of Chroma's. Queries are embedded by `embedder`, never by the collection's own function."""

    name = "chroma"

    def __init__(self, collection: Any, **options: Any):
        check_framework_version("chromadb", "chroma", majors=("1",))
        super().__init__(str(collection.name), **options)
        self._collection = collection

    def _search(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        found = self._collection.query(
            query_embeddings=self._vectors(queries),
            n_results=k,
            where=self._filter(),
            include=["documents", "metadatas", "distances"],
        )
        rows = zip(found["ids"], found["documents"], found["metadatas"], found["distances"], strict=True)
        return [[_hit(*one) for one in zip(*row, strict=True)] for row in rows]

    def _filter(self) -> dict[str, Any] | None:
        parts = [{name: {"$in": values}} for name, values in self.where.items()]
        return {"$and": parts} if len(parts) > 1 else parts[0] if parts else None

    def _state(self) -> Sequence[object]:
        """Chroma keeps no version: how many there are, and what the first ones say."""
        first = self._collection.get(limit=FINGERPRINT_RECORDS, include=["documents", "metadatas"])
        return [self._collection.count(), sorted(zip(first["ids"], first["documents"], strict=True))]


def _hit(id: str, document: str | None, metadata: Mapping[str, Any] | None, distance: float) -> SearchHit:
    record = {DOCUMENT_FIELD: document, **(metadata or {})}
    return SearchHit(
        id, record, 1.0 - float(distance)
    )  # of cosine and inner product; of squared lengths the order is right
