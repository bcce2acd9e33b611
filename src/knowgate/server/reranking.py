"""`POST /v1/rerank`, in the form that Cohere and Jina have: a query and documents in, indices and scores out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knowgate.rerank import rerank
from knowgate.server.problems import Problem
from knowgate.types import Passage, Reranker

MOST = 1000  # documents of one request


@dataclass(frozen=True)
class RerankRequest:
    query: str
    texts: list[str]
    top: int
    shows_documents: bool


def read_request(body: Mapping[str, Any]) -> RerankRequest:
    query, documents = body.get("query"), body.get("documents")
    if not isinstance(query, str) or not query.strip():
        raise Problem(400, "'query' must be a text that says something.", "invalid_query")
    if not isinstance(documents, list) or not 1 <= len(documents) <= MOST:
        raise Problem(400, f"'documents' must be a list of 1 to {MOST} documents.", "invalid_documents")
    given = [one.get("text") if isinstance(one, dict) else one for one in documents]
    texts = [text for text in given if isinstance(text, str)]
    if len(texts) < len(given):
        raise Problem(400, "a document must be a text, or an object with a 'text'.", "invalid_documents")
    top = body.get("top_n", len(texts))
    if not isinstance(top, int) or isinstance(top, bool) or top < 1:
        raise Problem(400, "'top_n' must be a whole number of at least 1.", "invalid_type")
    return RerankRequest(query, texts, top, bool(body.get("return_documents")))


def rank(reranker: Reranker, request: RerankRequest, id: str) -> dict[str, Any]:
    passages = [Passage(str(number), text) for number, text in enumerate(request.texts)]
    (best,) = rerank(reranker, [request.query], [passages], request.top)
    return {"id": id, "model": reranker.name, "results": [_result(one, request.shows_documents) for one in best]}


def _result(passage: Passage, shows_document: bool) -> dict[str, Any]:
    found = {"index": int(passage.id), "relevance_score": passage.score}
    return {**found, "document": {"text": passage.text}} if shows_document else found
