"""Elasticsearch and OpenSearch over HTTP, without their clients: `elastic:URL/INDEX?...`, `opensearch:URL/INDEX?...`.

Besides the options of `base.py` there is `mode`: `bm25` (search by words, the default) or `knn` (search by vector, which
needs `vector=FIELD`). Credentials are read from the environment variable KNOWGATE_SEARCH_KEY (an API key) or
KNOWGATE_SEARCH_LOGIN (`user:password`).

References: the search APIs of Elasticsearch 8 and 9 (`knn` beside `query`) and of OpenSearch 2 and 3 (`knn` inside it).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from knowgate.core.http_client import JsonClient, parse_json_response
from knowgate.core.text import replace_surrogates
from knowgate.errors import BadSetting, RejectionError, ServerError
from knowgate.retrieval.engines.base import EngineRetriever, SearchHit, parse_collection_spec
from knowgate.retrieval.engines.http import MAX_PASSAGES, MAX_VALUES
from knowgate.types import Vector

SEARCH_MODES = ("bm25", "knn")
# A kNN search compares this many candidates per shard and requested result. More candidates find more of the true
# neighbors and take longer.
CANDIDATES_PER_RESULT = 10
MIN_CANDIDATES = 100


class ElasticRetriever(EngineRetriever):
    """Searches an Elasticsearch index.

    Args:
        url: The address of the server.
        index: The name of the index.
        mode: `bm25` searches the words of text and title. `knn` searches the vectors in `fields.vector`.
        transport: An httpx transport that replaces the network in tests.
        options: Keyword arguments of `EngineRetriever`, such as `fields`, `embedder` and `where` (a filter).
    """

    name = "elastic"

    def __init__(
        self, url: str, index: str, *, mode: str = "bm25", transport: httpx.BaseTransport | None = None, **options: Any
    ):
        super().__init__(index, **options)
        if mode not in SEARCH_MODES:
            raise BadSetting(f"mode={mode!r} is not allowed for {self.name}: it must be {' or '.join(SEARCH_MODES)}.")
        if mode == "knn" and not self.fields.vector:
            raise BadSetting(
                f"mode='knn' of {self.name} needs the name of the field with the vectors. Add vector=FIELD."
            )
        self.mode = mode
        self._server = JsonClient(url, f"the {self.name} server", headers=_make_auth_headers(), transport=transport)
        self._path = f"/{quote(index, safe='*,')}"

    @property
    def is_dense(self) -> bool:
        return self.mode == "knn"

    def _find_hits(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        """Return up to k hits for each query, best first. Each query is a request of its own."""
        if self.is_dense:
            bodies = [self._make_knn_body(vector, k) for vector in self._embed(queries)]
        else:
            bodies = [self._make_match_body(query) for query in queries]
        settings = {"size": k, "_source": self.fields.get_source_fields()}
        return self._server.map(lambda body: self._request({**settings, **body}), bodies)

    def _make_match_body(self, query: str) -> dict[str, Any]:
        fields = [name for name in (self.fields.text, self.fields.title) if name]
        match = {"multi_match": {"query": replace_surrogates(query), "fields": fields}}
        return {"query": {"bool": {"must": [match], "filter": self._make_filters()}}}

    def _make_knn_body(self, vector: Vector, k: int) -> dict[str, Any]:
        """Return the part of a request that searches the vectors nearest to a vector."""
        candidates = max(MIN_CANDIDATES, CANDIDATES_PER_RESULT * k)
        knn = {"field": self.fields.vector, "query_vector": vector.tolist(), "k": k, "num_candidates": candidates}
        if self.where:
            knn["filter"] = self._make_filters()
        return {"knn": knn}

    def _make_filters(self) -> list[dict[str, Any]]:
        return [{"terms": {name: values}} for name, values in self.where.items()]

    def _request(self, body: Mapping[str, Any]) -> list[SearchHit]:
        """Send one search and return its hits."""
        content = self._server.request_bytes("POST", f"{self._path}/_search", body=body)
        response = parse_json_response(content, f"the response of {self._server.name}", MAX_VALUES)
        try:
            if response.get("timed_out"):
                raise ServerError(
                    f"the {self.name} server ran out of time and returned only some results. Try again, or search a "
                    "smaller index."
                )
            return [_parse_hit(item) for item in response["hits"]["hits"][:MAX_PASSAGES]]
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            raise RejectionError(
                f"the {self.name} server returned a response without a list of hits. Check that the URL is the "
                f"address of an {self.name} server."
            ) from None

    def _get_state(self) -> Sequence[object]:
        """Return the number of documents and the last sequence number of each primary shard.

        Every write raises a sequence number.
        """
        count = self._server.request_json("GET", f"{self._path}/_count")
        stats = self._server.request_json("GET", f"{self._path}/_stats/docs", params={"level": "shards"})
        sequence_numbers = []
        for index, index_stats in (stats.get("indices") or {}).items():
            for shard, copies in (index_stats.get("shards") or {}).items():
                primaries = [item for item in copies if item.get("routing", {}).get("primary") and "seq_no" in item]
                sequence_numbers += [f"{index}/{shard}:{primary['seq_no']['max_seq_no']}" for primary in primaries]
        return [count.get("count"), sorted(sequence_numbers)]


class OpenSearchRetriever(ElasticRetriever):
    """Searches an OpenSearch index, with the arguments of `ElasticRetriever`.

    Only kNN search differs from Elasticsearch.
    """

    name = "opensearch"

    def _make_knn_body(self, vector: Vector, k: int) -> dict[str, Any]:
        knn: dict[str, Any] = {"vector": vector.tolist(), "k": k}
        if self.where:
            knn["filter"] = {"bool": {"filter": self._make_filters()}}
        return {"query": {"knn": {self.fields.vector: knn}}}


def open_elastic(value: str) -> ElasticRetriever:
    """Open an index of an Elasticsearch server, given as `URL/INDEX?options`."""
    spec = parse_collection_spec("elastic", value, extra_options=("mode",))
    return ElasticRetriever(spec.address, spec.collection, **spec.options)


def open_opensearch(value: str) -> OpenSearchRetriever:
    """Open an index of an OpenSearch server, given as `URL/INDEX?options`."""
    spec = parse_collection_spec("opensearch", value, extra_options=("mode",))
    return OpenSearchRetriever(spec.address, spec.collection, **spec.options)


def _parse_hit(item: Mapping[str, Any]) -> SearchHit:
    score = item.get("_score")
    return SearchHit(str(item["_id"]), dict(item.get("_source") or {}), None if score is None else float(score))


def _make_auth_headers() -> dict[str, str]:
    """Return the Authorization header from the environment variables, or {}."""
    key = os.environ.get("KNOWGATE_SEARCH_KEY", "").strip()
    login = os.environ.get("KNOWGATE_SEARCH_LOGIN", "").strip()
    if key:
        return {"Authorization": key if " " in key else f"ApiKey {key}"}  # a space: it is a whole header
    if login:
        return {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
    return {}
