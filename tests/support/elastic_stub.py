"""Fakes of Elasticsearch and OpenSearch in memory: search, count and shard statistics.

They follow the documentation of search, count, index stats and errors in Elasticsearch 8/9 and OpenSearch 2/3.
Instead of BM25, the score is the number of matching words; for vectors it is (1 + cosine) / 2, as in both. Like the
real servers they reject unknown keys, the kNN syntax of the other one, k above num_candidates, and vectors of another
width.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np

from knowgate.core.text import tokenize

SEARCH_KEYS = {"size", "_source", "query", "knn"}


class ElasticStub:
    """A handler for httpx.MockTransport; `dialect` is elastic or opensearch."""

    def __init__(self, dialect: str, index: str, documents: dict[str, dict[str, Any]]):
        self.dialect, self.index = dialect, index
        self.documents = dict(documents)
        self.writes = len(documents)
        self.requests: list[httpx.Request] = []

    def put(self, id: str, document: dict[str, Any]) -> None:
        self.documents[id] = document
        self.writes += 1

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        index, _, what = request.url.path.strip("/").partition("/")
        if index != self.index:
            return _error(404, "index_not_found_exception", f"no such index [{index}]")
        if what == "_count":
            return httpx.Response(200, json={"count": len(self.documents), "_shards": _shards()})
        if what == "_stats/docs" and request.url.params.get("level") == "shards":
            return httpx.Response(200, json=self._stats())
        if what == "_search" and request.method == "POST":
            return self._search(json.loads(request.content))
        return _error(405, "method_not_allowed", f"Incorrect HTTP method for uri [{request.url.path}]")

    def _stats(self) -> dict[str, Any]:
        place = {"state": "STARTED", "primary": True, "node": "n1", "relocating_node": None}
        last = self.writes - 1
        numbers = {"max_seq_no": last, "local_checkpoint": last, "global_checkpoint": last}
        docs = {"count": len(self.documents), "deleted": 0}
        shard = {"routing": place, "docs": docs, "seq_no": numbers}
        copy = {**shard, "routing": {**place, "primary": False, "node": "n2"}}
        indices = {self.index: {"uuid": "u", "primaries": {"docs": docs}, "shards": {"0": [shard, copy]}}}
        return {"_shards": _shards(), "_all": {"primaries": {"docs": docs}}, "indices": indices}

    def _search(self, body: dict[str, Any]) -> httpx.Response:
        if unknown := set(body) - SEARCH_KEYS:
            return _error(400, "parsing_exception", f"unknown key [{min(unknown)}]")
        try:
            scores = self._scores(body)
        except (KeyError, TypeError) as error:
            return _error(400, "parsing_exception", f"cannot parse: {error!r}")
        except ValueError as error:
            return _error(400, "illegal_argument_exception", str(error))
        best = sorted(scores, key=lambda id: (-scores[id], id))[: body.get("size", 10)]
        hits = [self._hit(id, scores[id], body.get("_source")) for id in best]
        total = {"value": len(scores), "relation": "eq"}
        top = scores[best[0]] if best else None
        results = {"total": total, "max_score": top, "hits": hits}
        return httpx.Response(200, json={"took": 1, "timed_out": False, "_shards": _shards(), "hits": results})

    def _hit(self, id: str, score: float, wanted: list[str] | None) -> dict[str, Any]:
        source = {name: value for name, value in self.documents[id].items() if wanted is None or name in wanted}
        return {"_index": self.index, "_id": id, "_score": score, "_source": source}

    def _scores(self, body: dict[str, Any]) -> dict[str, float]:
        if "knn" in body:
            if self.dialect != "elastic":
                raise ValueError("unknown key [knn] for a START_OBJECT")
            knn = body["knn"]
            if knn["k"] > knn["num_candidates"]:
                raise ValueError("[num_candidates] cannot be less than [k]")
            return self._find_nearest(knn["field"], knn["query_vector"], knn["k"], knn.get("filter", []))
        ((kind, query),) = body["query"].items()
        if kind == "knn":
            if self.dialect != "opensearch":
                raise ValueError("[knn] query malformed, no field [field]")
            ((name, wanted),) = query.items()
            inside = wanted.get("filter", {}).get("bool", {}).get("filter", [])
            return self._find_nearest(name, wanted["vector"], wanted["k"], inside)
        return self._find_matching(query["must"][0]["multi_match"], query.get("filter", []))

    def _find_matching(self, match: dict[str, Any], filters: list[Any]) -> dict[str, float]:
        query_words = set(tokenize(match["query"]))
        texts = {
            id: " ".join(str(document.get(name, "")) for name in match["fields"])
            for id, document in self._filter(filters)
        }
        shared = {id: float(len(query_words & set(tokenize(text)))) for id, text in texts.items()}
        return {id: score for id, score in shared.items() if score}

    def _find_nearest(self, name: str, vector: list[float], k: int, filters: list[Any]) -> dict[str, float]:
        scores = {}
        for id, document in self._filter(filters):
            if len(document[name]) != len(vector):
                raise ValueError(f"the query vector has a different dimension [{len(vector)}] than the index vectors")
            scores[id] = float(1 + np.dot(document[name], vector)) / 2
        return {id: scores[id] for id in sorted(scores, key=lambda id: (-scores[id], id))[:k]}

    def _filter(self, filters: list[Any]) -> list[tuple[str, dict[str, Any]]]:
        terms = [next(iter(condition["terms"].items())) for condition in filters]
        return [
            (id, document)
            for id, document in self.documents.items()
            if all(document.get(name) in values for name, values in terms)
        ]


def _shards() -> dict[str, int]:
    return {"total": 1, "successful": 1, "skipped": 0, "failed": 0}


def _error(status: int, kind: str, reason: str) -> httpx.Response:
    cause = {"type": kind, "reason": reason}
    return httpx.Response(status, json={"error": {"root_cause": [cause], **cause}, "status": status})
