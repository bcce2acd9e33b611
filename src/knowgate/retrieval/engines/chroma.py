"""Chroma: `chroma:URL_OR_FOLDER/COLLECTION?...` (extra `chroma`).

See `base.py` for the options. The text is the document of a record unless `text` names a field of its metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from knowgate.core.frameworks import check_framework_version, wrap_errors
from knowgate.retrieval.engines.base import FINGERPRINT_RECORDS, EngineRetriever, SearchHit, parse_collection_spec

DOCUMENT_FIELD = "text"  # holds the document of a record, unless its metadata has a field of this name


def open_chroma(value: str) -> ChromaRetriever:
    """Open a collection of a Chroma server or of a local Chroma folder."""
    spec = parse_collection_spec("chroma", value)
    check_framework_version("chromadb", "chroma", majors=("1",))
    import chromadb
    from chromadb.config import Settings

    settings = Settings(anonymized_telemetry=False)
    with wrap_errors("Chroma"):
        if spec.is_url:
            url = urlsplit(spec.address)
            is_https = url.scheme == "https"
            port = url.port or (443 if is_https else 80)
            client = chromadb.HttpClient(str(url.hostname), port, ssl=is_https, settings=settings)
        else:
            client = chromadb.PersistentClient(spec.address, settings=settings)
        collection = client.get_collection(spec.collection, embedding_function=None)
    return ChromaRetriever(collection, **spec.options)


class ChromaRetriever(EngineRetriever):
    """Searches a Chroma collection; `embedder` embeds the queries, never the collection's own function.

    Args:
        collection: A collection of a Chroma client.
        options: See `EngineRetriever`.
    """

    name = "chroma"

    def __init__(self, collection: Any, **options: Any):
        check_framework_version("chromadb", "chroma", majors=("1",))
        super().__init__(str(collection.name), **options)
        self._collection = collection

    def _find_hits(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        columns = ["documents", "metadatas", "distances"]
        response = self._collection.query(
            query_embeddings=self._embed(queries), n_results=k, where=self._make_filter(), include=columns
        )
        rows = zip(*(response[column] for column in ("ids", *columns)), strict=True)
        return [[_make_hit(*values) for values in zip(*row, strict=True)] for row in rows]

    def _make_filter(self) -> dict[str, Any] | None:
        conditions = [{name: {"$in": values}} for name, values in self.where.items()]
        return {"$and": conditions} if len(conditions) > 1 else conditions[0] if conditions else None

    def _get_state(self) -> Sequence[object]:
        """Return the number of records and the first ones, because Chroma keeps no version."""
        first = self._collection.get(limit=FINGERPRINT_RECORDS, include=["documents", "metadatas"])
        return [self._collection.count(), sorted(zip(first["ids"], first["documents"], strict=True))]


def _make_hit(id: str, document: str | None, metadata: Mapping[str, Any] | None, distance: float) -> SearchHit:
    """Make a hit; 1 - distance is the similarity for cosine and inner product, and keeps the order for others."""
    return SearchHit(id, {DOCUMENT_FIELD: document, **(metadata or {})}, 1.0 - float(distance))
