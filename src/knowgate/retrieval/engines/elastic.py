"""Elasticsearch and OpenSearch over HTTP, without their clients: `elastic:URL/INDEX?...`, `opensearch:URL/INDEX?...`.

Beside the options of `engine.py`: `mode=bm25` (the default) or `mode=knn`, which needs `vector=FIELD`. The key comes
from KNOWGATE_SEARCH_KEY (`ApiKey ...`), or from KNOWGATE_SEARCH_LOGIN (`user:password`).

References: the search APIs of Elasticsearch 8 and 9 (`knn` beside `query`) and of OpenSearch 2 and 3 (`knn` inside it).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from knowgate.core.http_client import JsonClient, replace_surrogates
from knowgate.errors import BadSetting, ServerError
from knowgate.retrieval.engines.base import EngineRetriever, SearchHit, parse_collection_spec
from knowgate.types import Vector

SEARCH_MODES = ("bm25", "knn")
CANDIDATES_PER_RESULT = 10  # times k, of every shard; more find more and take longer
MIN_CANDIDATES = 100


def open_elastic(value: str) -> ElasticRetriever:
    made: ElasticRetriever = _open("elastic", value, ElasticRetriever)
    return made


def open_opensearch(value: str) -> OpenSearchRetriever:
    made: OpenSearchRetriever = _open("opensearch", value, OpenSearchRetriever)
    return made


class ElasticRetriever(EngineRetriever):
    """An index of Elasticsearch's. mode: bm25 over text and title, or knn over `fields.vector`."""

    name = "elastic"

    def __init__(
        self, url: str, index: str, *, mode: str = "bm25", transport: httpx.BaseTransport | None = None, **options: Any
    ):
        super().__init__(index, **options)
        if mode not in SEARCH_MODES:
            raise BadSetting(f"the mode of {self.name} is '{mode}'; allowed: {', '.join(SEARCH_MODES)}.")
        if mode == "knn" and not self.fields.vector:
            raise BadSetting(f"mode=knn of {self.name} needs the field of the vectors: give vector=FIELD.")
        self.mode = mode
        self._server = JsonClient(url, f"the {self.name} server", headers=_key(), transport=transport)
        self._path = f"/{quote(index, safe='*,')}"

    @property
    def is_dense(self) -> bool:
        return self.mode == "knn"

    def _search(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        if self.is_dense:
            bodies = [self._nearest(vector, k) for vector in self._vectors(queries)]
        else:
            bodies = [self._matching(query) for query in queries]
        shown = {"size": k, "_source": self.fields.shown}
        return self._server.map(lambda body: self._ask({**shown, **body}), bodies)

    def _matching(self, query: str) -> dict[str, Any]:
        fields = [name for name in (self.fields.text, self.fields.title) if name]
        match = {"multi_match": {"query": replace_surrogates(query), "fields": fields}}
        return {"query": {"bool": {"must": [match], "filter": self._filters()}}}

    def _nearest(self, vector: Vector, k: int) -> dict[str, Any]:
        knn = {"field": self.fields.vector, "query_vector": vector.tolist(), "k": k}
        knn |= {"num_candidates": max(MIN_CANDIDATES, CANDIDATES_PER_RESULT * k)}
        return {"knn": {**knn, **({"filter": self._filters()} if self.where else {})}}

    def _filters(self) -> list[dict[str, Any]]:
        return [{"terms": {name: values}} for name, values in self.where.items()]

    def _ask(self, body: Mapping[str, Any]) -> list[SearchHit]:
        reply = self._server.request_json("POST", f"{self._path}/_search", body=body)
        try:
            if reply.get("timed_out"):
                raise ServerError(f"the {self.name} server ran out of time and gave only some results.")
            return [
                SearchHit(str(one["_id"]), dict(one.get("_source") or {}), _score(one)) for one in reply["hits"]["hits"]
            ]
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            raise ServerError(
                f"the {self.name} server gave no hits: check that its address is {self.name}'s."
            ) from None

    def _state(self) -> Sequence[object]:
        """How many documents, and the number of the last write of every shard."""
        count = self._server.request_json("GET", f"{self._path}/_count")
        stats = self._server.request_json("GET", f"{self._path}/_stats/docs", params={"level": "shards"})
        return [count.get("count"), sorted(_writes(stats))]


class OpenSearchRetriever(ElasticRetriever):
    """An index of OpenSearch's; its kNN stands inside the query."""

    name = "opensearch"

    def _nearest(self, vector: Vector, k: int) -> dict[str, Any]:
        wanted: dict[str, Any] = {"vector": vector.tolist(), "k": k}
        wanted |= {"filter": {"bool": {"filter": self._filters()}}} if self.where else {}
        return {"query": {"knn": {self.fields.vector: wanted}}}


def _open(engine: str, value: str, kind: Any) -> Any:
    spec = parse_collection_spec(engine, value, others=("mode",))
    return kind(
        spec.at,
        spec.collection,
        mode=spec.others.get("mode", "bm25"),
        fields=spec.fields,
        embedder=spec.embedder,
        where=spec.where,
        version=spec.version,
    )


def _score(hit: Mapping[str, Any]) -> float | None:
    return None if hit.get("_score") is None else float(hit["_score"])


def _writes(stats: Any) -> list[str]:
    """index/shard:last sequence number, of every primary shard."""
    found = []
    for index, about in (stats.get("indices") or {}).items():
        for shard, copies in (about.get("shards") or {}).items():
            found += [
                f"{index}/{shard}:{one['seq_no']['max_seq_no']}"
                for one in copies
                if one.get("routing", {}).get("primary") and "seq_no" in one
            ]
    return found


def _key() -> dict[str, str]:
    key, login = (os.environ.get(name, "").strip() for name in ("KNOWGATE_SEARCH_KEY", "KNOWGATE_SEARCH_LOGIN"))
    if key:
        return {"Authorization": key if " " in key else f"ApiKey {key}"}
    return {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"} if login else {}
