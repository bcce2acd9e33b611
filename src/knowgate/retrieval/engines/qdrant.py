"""Qdrant: `qdrant:URL_OR_FOLDER/COLLECTION?...` (extra `qdrant`).

See `base.py` for the options. The API key is read from the environment variable KNOWGATE_QDRANT_KEY.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import httpx

from knowgate.core.frameworks import check_framework_version, wrap_errors
from knowgate.core.http_client import open_client, send_request
from knowgate.core.validation import count_json_values
from knowgate.errors import BadInput, ServerError
from knowgate.retrieval.engines.base import FINGERPRINT_RECORDS, EngineRetriever, SearchHit, parse_collection_spec
from knowgate.retrieval.engines.http import MAX_VALUES

MAX_SECONDS = 30.0  # per request


def open_qdrant(value: str) -> QdrantRetriever:
    """Open a collection of a Qdrant server or of a local Qdrant folder, given as `URL_OR_FOLDER/COLLECTION`."""
    spec = parse_collection_spec("qdrant", value)
    check_framework_version("qdrant-client", "qdrant", majors=("1",))
    from qdrant_client import QdrantClient

    if not spec.is_url and not Path(spec.address).is_dir():
        raise BadInput(f"there is no Qdrant folder '{spec.address}'. Check the path before the last '/'.")
    with wrap_errors("Qdrant"):
        if spec.is_url:
            key = os.environ.get("KNOWGATE_QDRANT_KEY") or None
            # Otherwise the client asks for the server's version with another HTTP client, which has no limits.
            no_check = (
                {"check_compatibility": False} if "check_compatibility" in signature(QdrantClient).parameters else {}
            )
            client = QdrantClient(url=spec.address, api_key=key, transport=LimitedTransport(), **no_check)
        else:
            client = QdrantClient(path=spec.address)
    return QdrantRetriever(client, spec.collection, **spec.options)


class LimitedTransport(httpx.BaseTransport):
    """Transport for the HTTP client of `QdrantClient`, which limits neither the duration nor the size of a response."""

    def __init__(self) -> None:
        self._client = open_client({})

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read its response, until the deadline of `request_deadline` at the latest."""
        request.headers["Accept-Encoding"] = "gzip"
        try:
            response = send_request(self._client, request, time.monotonic() + MAX_SECONDS, "the server")
        except ServerError as error:
            raise httpx.ReadError(str(error).rstrip(".")) from None
        if count_json_values(response.content, MAX_VALUES) > MAX_VALUES:
            raise httpx.ReadError(f"the response has more than {MAX_VALUES:,} JSON values")
        return httpx.Response(response.status, content=response.content)

    def close(self) -> None:
        self._client.close()


class QdrantRetriever(EngineRetriever):
    """Searches a collection through a `QdrantClient`.

    Args:
        client: A `QdrantClient`.
        collection: The name of the collection.
        options: Keyword arguments of `EngineRetriever`, such as `embedder` and `where` (a filter). If a record has
            several vectors, `fields.vector` names the one to search.
    """

    name = "qdrant"

    def __init__(self, client: Any, collection: str, **options: Any):
        check_framework_version("qdrant-client", "qdrant", majors=("1",))
        super().__init__(collection, **options)
        self._client = client

    def _find_hits(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        """Return up to k hits for each query, best first. All queries are sent in one request."""
        from qdrant_client import models

        settings = {"using": self.fields.vector or None, "filter": self._make_filter(), "limit": k}
        requests = [
            models.QueryRequest(query=vector.tolist(), with_payload=True, **settings) for vector in self._embed(queries)
        ]
        responses = self._client.query_batch_points(self.collection, requests=requests)
        return [[_make_hit(point) for point in response.points] for response in responses]

    def _make_filter(self) -> Any:
        """Return the filter for Qdrant: every filtered field must have one of its allowed values. None without a filter."""
        from qdrant_client import models

        if not self.where:
            return None
        conditions = []
        for name, values in self.where.items():
            matches = [models.FieldCondition(key=name, match=models.MatchValue(value=value)) for value in values]
            conditions.append(models.Filter(should=matches))  # at least one must match
        return models.Filter(must=conditions)  # all must match

    def _get_state(self) -> Sequence[object]:
        """Return the number of records and the first records, to detect changes.

        Qdrant keeps no version number.
        """
        count = self._client.count(self.collection, exact=True).count
        points, _ = self._client.scroll(
            self.collection, limit=FINGERPRINT_RECORDS, with_payload=True, with_vectors=False
        )
        return [count, sorted((str(point.id), point.payload) for point in points)]


def _make_hit(point: Any) -> SearchHit:
    return SearchHit(str(point.id), point.payload or {}, float(point.score))
