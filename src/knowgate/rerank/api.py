"""Reranking as Cohere and Jina offer it: a request as a dictionary, the response as another. Knows no HTTP.

| request | |
|---|---|
| query | the question |
| documents | texts, or objects with `text` and perhaps `title`; at most 1000 |
| top_n | how many come back, best first; all by default |
| return_documents | whether each result holds its document; false by default |

`model` and fields of other servers are let through unread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from knowgate.errors import BadInput, ModelError
from knowgate.files import sha256_text
from knowgate.rerank.cross_encoder import shown
from knowgate.statistics import sigmoid
from knowgate.types import Passage, Reranker

MOST = 1000  # documents of one request, as at Cohere
SHOWN = 60  # characters of a value in an error


def rerank_response(request: Mapping[str, Any], reranker: Reranker) -> dict[str, Any]:
    """The documents' places in the order of their relevance, which lies between 0 and 1."""
    query, passages = _query(request), _documents(request)
    top = _top(request, len(passages))
    wants_documents = _flag(request, "return_documents")
    scores = reranker.score([query], [passages])[0]
    if not all(math.isfinite(score) for score in scores):
        raise ModelError("the reranker gave a score that is not a number (NaN or infinite).")
    order = sorted(range(len(passages)), key=lambda place: -scores[place])[:top]
    results: list[dict[str, Any]] = [{"index": place, "relevance_score": relevance(scores[place])} for place in order]
    if wants_documents:
        for result in results:
            result["document"] = {"text": passages[result["index"]].text}
    return {
        "id": "rerank-" + sha256_text(reranker.name, query, *map(shown, passages))[:24],
        "model": str(request.get("model") or reranker.name),
        "results": results,
        "meta": {"billed_units": {"search_units": 1}},
    }


def relevance(score: float) -> float:
    """The logistic function of a logit; the order stays."""
    return sigmoid(score)


def _query(request: Mapping[str, Any]) -> str:
    query = request.get("query")
    if not isinstance(query, str) or not query.strip():
        raise BadInput("'query' is missing or empty: it is the question, as text.")
    return query


def _documents(request: Mapping[str, Any]) -> list[Passage]:
    documents = request.get("documents")
    if not isinstance(documents, Sequence) or isinstance(documents, str) or not documents:
        raise BadInput("'documents' is missing or empty: it is a list of texts.")
    if len(documents) > MOST:
        raise BadInput(f"'documents' has {len(documents)} entries; {MOST} are allowed in a request.")
    return [_passage(place, document) for place, document in enumerate(documents)]


def _passage(place: int, document: Any) -> Passage:
    if isinstance(document, str):
        return Passage(str(place), document)
    if isinstance(document, Mapping) and isinstance(document.get("text"), str):
        return Passage(str(place), document["text"], str(document.get("title") or ""))
    raise BadInput(f"'documents' entry {place} is neither a text nor an object with a 'text'.")


def _top(request: Mapping[str, Any], n: int) -> int:
    top = request.get("top_n")
    if top is None:
        return n
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise BadInput(f"'top_n' is {repr(top)[:SHOWN]}; it must be a whole number of at least 1.")
    return min(top, n)


def _flag(request: Mapping[str, Any], name: str) -> bool:
    value = request.get(name, False)
    if value is not None and not isinstance(value, bool):
        raise BadInput(f"'{name}' is {repr(value)[:SHOWN]}; it must be true or false.")
    return bool(value)
