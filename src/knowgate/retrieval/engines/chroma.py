"""Chroma: `chroma:URL_OR_FOLDER/COLLECTION?...` (extra `chroma`).

See `base.py` for the options. The text of a passage is the document of a Chroma record. To use a field of the metadata
instead, name it with the option `text`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from knowgate.core.frameworks import check_framework_version, wrap_errors
from knowgate.retrieval.engines.base import (
    FINGERPRINT_RECORDS,
    CollectionSpec,
    EngineRetriever,
    SearchHit,
    parse_collection_spec,
)

DOCUMENT_FIELD = "text"  # field of a hit that holds the Chroma document; metadata of the same name replaces it


def open_chroma(value: str) -> ChromaRetriever:
    """Open a collection of a Chroma server or of a local Chroma folder, given as `URL_OR_FOLDER/COLLECTION`."""
    spec = parse_collection_spec("chroma", value)
    check_framework_version("chromadb", "chroma", majors=("1",))
    with wrap_errors("Chroma"):
        client = _open_client(spec)
        collection = client.get_collection(spec.collection, embedding_function=None)
    return ChromaRetriever(collection, **spec.options)


def _open_client(spec: CollectionSpec) -> Any:
    """Connect to a Chroma server if the address is a URL; otherwise open a local folder."""
    import chromadb
    from chromadb.config import Settings

    settings = Settings(anonymized_telemetry=False)
    if not spec.is_url:
        return chromadb.PersistentClient(spec.address, settings=settings)
    url = urlsplit(spec.address)
    is_https = url.scheme == "https"
    port = url.port or (443 if is_https else 80)
    return chromadb.HttpClient(str(url.hostname), port, ssl=is_https, settings=settings)


class ChromaRetriever(EngineRetriever):
    """Searches a Chroma collection.

    The queries are embedded by `embedder`. The embedding function of the collection is never used.

    Args:
        collection: A collection of a Chroma client.
        options: Keyword arguments of `EngineRetriever`, such as `fields`, `embedder` and `where` (a filter).
    """

    name = "chroma"

    def __init__(self, collection: Any, **options: Any):
        check_framework_version("chromadb", "chroma", majors=("1",))
        super().__init__(str(collection.name), **options)
        self._collection = collection

    def _find_hits(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        """Return up to k hits for each query, best first."""
        response = self._collection.query(
            query_embeddings=self._embed(queries),
            n_results=k,
            where=self._make_filter(),
            include=["documents", "metadatas", "distances"],
        )
        hits = []
        for i in range(len(queries)):  # each column of the response has one list per query
            columns = [response[name][i] for name in ("ids", "documents", "metadatas", "distances")]
            hits.append([_make_hit(*row) for row in zip(*columns, strict=True)])
        return hits

    def _make_filter(self) -> dict[str, Any] | None:
        """Return the filter in Chroma's format: one condition, or several joined by `$and`. None without a filter."""
        conditions = [{name: {"$in": values}} for name, values in self.where.items()]
        if len(conditions) > 1:
            return {"$and": conditions}
        return conditions[0] if conditions else None

    def _get_state(self) -> Sequence[object]:
        """Return the number of records and the first records, to detect changes.

        Chroma keeps no version number.
        """
        first = self._collection.get(limit=FINGERPRINT_RECORDS, include=["documents"])
        return [self._collection.count(), sorted(zip(first["ids"], first["documents"], strict=True))]


def _make_hit(id: str, document: str | None, metadata: Mapping[str, Any] | None, distance: float) -> SearchHit:
    """Make a search hit with the score 1 - distance.

    For cosine distances, this is the similarity.
    """
    return SearchHit(id, {DOCUMENT_FIELD: document, **(metadata or {})}, 1.0 - float(distance))
