"""A reranker behind an HTTP endpoint: of the form Cohere, Jina and many servers share, `api:MODEL@URL`, or of that of
Hugging Face's text-embeddings-inference, `tei:URL`.

The first form is that of `api.py`, from the other side. The key comes from KNOWGATE_RERANK_KEY, where one is wanted.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from knowgate.core.files import sha256_text
from knowgate.core.http_client import JsonClient, replace_surrogates
from knowgate.core.redaction import redact_urls
from knowgate.core.schema import NonNegativeInt, read_record
from knowgate.errors import BadInput, BadSetting, ModelError, ServerError
from knowgate.retrieval.rerankers.cross_encoder import format_passage
from knowgate.stats.logistic import sigmoid
from knowgate.types import Passage, Reranker

RERANK_KEY_VARIABLE = "KNOWGATE_RERANK_KEY"
RETRY_PAUSE = 0.5  # seconds before the second try; twice as long before each further one


@dataclass(frozen=True)
class RerankResult:
    """One document of a reply; other fields are let be."""

    index: NonNegativeInt
    relevance_score: float


class RemoteReranker:
    """Scores are the server's `relevance_score`. `deadline` is in seconds per question, all tries together; lost
    connections, 429 and 5xx are tried again."""

    def __init__(
        self,
        spec: str,
        *,
        deadline: float = 60.0,
        pause: float = RETRY_PAUSE,
        transport: httpx.BaseTransport | None = None,
    ):
        self.model, _, self._url = spec.partition("@")
        try:
            url = httpx.URL(self._url)
        except httpx.InvalidURL:
            url = httpx.URL("")
        if not self.model or url.scheme not in ("http", "https") or not url.host:
            raise BadSetting(
                f"'{redact_urls(spec)}' names no rerank server: write api:MODEL@URL, the URL with http:// or https://."
            )
        if url.userinfo:
            raise BadSetting(
                f"the URL of the reranker '{self.model}' has a login in it. Put the key into {RERANK_KEY_VARIABLE}."
            )
        self._deadline, self._pause, self._transport = deadline, pause, transport

    @property
    def name(self) -> str:
        return f"api:{self.model}@{redact_urls(self._url)}"

    @property
    def fingerprint(self) -> str:
        """Of model and address: what weights a server holds cannot be seen from here."""
        return sha256_text(f"api:{self.model}@{self._url}")[:16]

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        if len(questions) != len(passages):
            raise BadInput(f"{len(questions)} questions came with {len(passages)} lists of passages.")
        return self._server.map(lambda pair: self._score(*pair), list(zip(questions, passages, strict=True)))

    @functools.cached_property
    def _server(self) -> JsonClient:
        key = os.environ.get(RERANK_KEY_VARIABLE, "").strip()
        return JsonClient(
            self._url,
            f"the rerank server of '{self.model}'",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            advice=f"Check the URL, the model and {RERANK_KEY_VARIABLE}.",
            deadline=self._deadline,
            pause=self._pause,
            transport=self._transport,
        )

    def _score(self, question: str, passages: Sequence[Passage]) -> list[float]:
        if not passages:
            return []
        texts = [replace_surrogates(text) for text in (question, *map(format_passage, passages))]
        return self._read(
            self._server.request_json("POST", self._url, body=self._body(texts[0], texts[1:])), len(passages)
        )

    def _body(self, question: str, texts: list[str]) -> dict[str, Any]:
        return {"model": self.model, "query": question, "documents": texts}

    def _read(self, given: Any, n: int) -> list[float]:
        results, server = self._results(given), self._server.name
        if not isinstance(results, list):
            raise ServerError(f"{server} gave no list of results.")
        try:
            items = [
                read_record(RerankResult, item, f"{server} gave a result", ignore_unknown=True) for item in results
            ]
        except BadInput as error:
            raise ServerError(str(error)) from None
        found = {item.index: item.relevance_score for item in items}
        if sorted(found) != list(range(n)):
            raise ServerError(f"{server} scored {len(found)} of {n} documents; each needs a score.")
        return [found[place] for place in range(n)]

    def _results(self, given: Any) -> Any:
        return given.get("results") if isinstance(given, dict) else None


class TeiReranker(RemoteReranker):
    """A server of text-embeddings-inference, which holds one model: `tei:URL`, the URL up to /rerank."""

    BATCH = 32  # texts of one request, as it allows by default

    def __init__(self, spec: str, **options: Any):
        super().__init__(f"tei@{spec}", **options)

    @property
    def name(self) -> str:
        return f"tei:{redact_urls(self._url)}"

    def _score(self, question: str, passages: Sequence[Passage]) -> list[float]:
        parts = [passages[place : place + self.BATCH] for place in range(0, len(passages), self.BATCH)]
        return [score for part in parts for score in super(TeiReranker, self)._score(question, part)]

    def _body(self, question: str, texts: list[str]) -> dict[str, Any]:
        return {"query": question, "texts": texts, "truncate": True}

    def _results(self, given: Any) -> Any:
        if not isinstance(given, list):
            return None
        return [{**one, "relevance_score": one.get("score")} if isinstance(one, dict) else one for one in given]


MAX_DOCUMENTS = 1000  # documents of one request, as at Cohere
MAX_VALUE_CHARACTERS = 60  # characters of a value in an error


def build_rerank_response(request: Mapping[str, Any], reranker: Reranker) -> dict[str, Any]:
    """The documents' places in the order of their relevance, which lies between 0 and 1."""
    query, passages = _query(request), _documents(request)
    top = _top(request, len(passages))
    wants_documents = _flag(request, "return_documents")
    scores = reranker.score([query], [passages])[0]
    if not all(math.isfinite(score) for score in scores):
        raise ModelError("the reranker gave a score that is not a number (NaN or infinite).")
    order = sorted(range(len(passages)), key=lambda place: -scores[place])[:top]
    results: list[dict[str, Any]] = [
        {"index": place, "relevance_score": score_to_relevance(scores[place])} for place in order
    ]
    if wants_documents:
        for result in results:
            result["document"] = {"text": passages[result["index"]].text}
    return {
        "id": "rerank-" + sha256_text(reranker.name, query, *map(format_passage, passages))[:24],
        "model": str(request.get("model") or reranker.name),
        "results": results,
        "meta": {"billed_units": {"search_units": 1}},
    }


def score_to_relevance(score: float) -> float:
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
    if len(documents) > MAX_DOCUMENTS:
        raise BadInput(f"'documents' has {len(documents)} entries; {MAX_DOCUMENTS} are allowed in a request.")
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
        raise BadInput(f"'top_n' is {repr(top)[:MAX_VALUE_CHARACTERS]}; it must be a whole number of at least 1.")
    return min(top, n)


def _flag(request: Mapping[str, Any], name: str) -> bool:
    value = request.get(name, False)
    if value is not None and not isinstance(value, bool):
        raise BadInput(f"'{name}' is {repr(value)[:MAX_VALUE_CHARACTERS]}; it must be true or false.")
    return bool(value)
