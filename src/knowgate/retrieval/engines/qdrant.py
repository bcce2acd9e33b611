"""Qdrant: `qdrant:URL_OR_FOLDER/COLLECTION?...` (extra `qdrant`). Options: see `engine.py`. The key comes from
KNOWGATE_QDRANT_KEY."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knowgate.core.frameworks import check_framework_version, wrap_errors
from knowgate.errors import BadInput
from knowgate.retrieval.engines.base import FINGERPRINT_RECORDS, EngineRetriever, SearchHit, parse_collection_spec


def open_qdrant(value: str) -> QdrantRetriever:
    """A server's URL, or a folder that Qdrant keeps by itself, and the collection."""
    spec = parse_collection_spec("qdrant", value)
    check_framework_version("qdrant-client", "qdrant", majors=("1",))
    from qdrant_client import QdrantClient

    with wrap_errors("Qdrant"):
        if spec.at.startswith(("http://", "https://")):
            client = QdrantClient(url=spec.at, api_key=os.environ.get("KNOWGATE_QDRANT_KEY") or None)
        elif not Path(spec.at).is_dir():
            raise BadInput(
                f"there is no folder '{spec.at}' with Qdrant collections. Check the path before the last '/'."
            )
        else:
            client = QdrantClient(path=spec.at)
    return QdrantRetriever(
        client,
        spec.collection,
        fields=spec.fields,
        embedder=spec.embedder,
        where=spec.where,
        version=spec.version,
    )


class QdrantRetriever(EngineRetriever):
    """Any `QdrantClient` and a collection of it; `fields.vector` names one of several vectors."""

    name = "qdrant"

    def __init__(self, client: Any, collection: str, **options: Any):
        check_framework_version("qdrant-client", "qdrant", majors=("1",))
        super().__init__(collection, **options)
        self._client = client

    def _search(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        from qdrant_client import models

        asked = [
            models.QueryRequest(
                query=vector.tolist(),
                using=self.fields.vector or None,
                filter=self._filter(),
                limit=k,
                with_payload=True,
            )
            for vector in self._vectors(queries)
        ]
        replies = self._client.query_batch_points(self.collection, requests=asked)
        return [
            [SearchHit(str(one.id), one.payload or {}, float(one.score)) for one in reply.points] for reply in replies
        ]

    def _filter(self) -> Any:
        from qdrant_client import models

        if not self.where:
            return None
        return models.Filter(
            must=[
                models.Filter(
                    should=[models.FieldCondition(key=name, match=models.MatchValue(value=one)) for one in values]
                )
                for name, values in self.where.items()
            ]
        )

    def _state(self) -> Sequence[object]:
        """Qdrant keeps no version: how many there are, and what the first ones say."""
        count = self._client.count(self.collection, exact=True).count
        points, _ = self._client.scroll(
            self.collection, limit=FINGERPRINT_RECORDS, with_payload=True, with_vectors=False
        )
        return [count, sorted((str(one.id), one.payload) for one in points)]
