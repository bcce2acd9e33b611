"""Rerankers that run on an HTTP server.

`api:MODEL@URL` is a server with the rerank API of Cohere, Jina and others. `tei:URL` is a server of Hugging Face's
text-embeddings-inference. The API key is read from the environment variable KNOWGATE_RERANK_KEY.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from knowgate.core.files import sha256_text
from knowgate.core.http_client import JsonClient
from knowgate.core.redaction import redact_urls
from knowgate.core.schema import NonNegativeInt, read_record
from knowgate.core.text import replace_surrogates
from knowgate.errors import BadInput, BadSetting, RejectionError
from knowgate.retrieval.passages import check_passage_lists, cut_query, format_passage
from knowgate.types import Passage

RERANK_KEY_VARIABLE = "KNOWGATE_RERANK_KEY"
RETRY_PAUSE = 0.5  # seconds before the first retry; the pause doubles with each further retry


@dataclass(frozen=True)
class RerankResult:
    """The score of one document in a response; `index` is its position in the request."""

    index: NonNegativeInt
    relevance_score: float


class RemoteReranker:
    """A reranker on a server with the rerank API of Cohere and Jina.

    Its scores are the `relevance_score` of the response. Requests are retried after a lost connection and after the
    statuses 429 and 5xx.

    Args:
        spec: `MODEL@URL`.
        deadline: The time limit for a question in seconds, including retries.
        pause: The time before the first retry in seconds.
        transport: An httpx transport that replaces the network in tests.

    Raises:
        BadSetting: The spec has another form, or its URL contains a login.
    """

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
                f"'{redact_urls(spec)}' is not the address of a rerank server. Write api:MODEL@URL with a URL that starts "
                "with http:// or https://."
            )
        if url.userinfo:
            raise BadSetting(
                f"the URL of the reranker '{self.model}' contains a login. Remove it and put the API key into the "
                f"environment variable {RERANK_KEY_VARIABLE}."
            )
        self._deadline, self._pause, self._transport = deadline, pause, transport

    @property
    def name(self) -> str:
        return f"api:{self.model}@{redact_urls(self._url)}"

    @property
    def fingerprint(self) -> str:
        """A hash of the model name and the address, because a client cannot see which weights a server runs."""
        return sha256_text(f"api:{self.model}@{self._url}")[:16]

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """Return one score for each passage of each question.

        Args:
            questions: The questions.
            passages: A list of passages for each question.
        """
        check_passage_lists(questions, passages)
        return self._server.map(lambda i: self._score_passages(questions[i], passages[i]), range(len(questions)))

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

    def _score_passages(self, question: str, passages: Sequence[Passage]) -> list[float]:
        """Return the scores of the passages of one question, in order."""
        if not passages:
            return []
        query = replace_surrogates(cut_query(question))
        texts = [replace_surrogates(format_passage(passage)) for passage in passages]
        response = self._server.request_json("POST", self._url, body=self._make_body(query, texts))
        return self._parse_scores(response, len(passages))

    def _make_body(self, query: str, texts: list[str]) -> dict[str, Any]:
        """Return the JSON body of a request."""
        return {"model": self.model, "query": query, "documents": texts}

    def _parse_scores(self, response: Any, n: int) -> list[float]:
        """Return the n scores of a response in the order of the request; raise RejectionError if one is missing."""
        results, server = self._get_results(response), self._server.name
        if not isinstance(results, list):
            raise RejectionError(f"{server} returned no list of results. Check the URL.")
        try:
            parsed = [
                read_record(RerankResult, item, f"{server} returned a result", ignore_unknown=True) for item in results
            ]
        except BadInput as error:
            raise RejectionError(str(error)) from None
        scores = {result.index: result.relevance_score for result in parsed}
        if sorted(scores) != list(range(n)):
            raise RejectionError(
                f"{server} did not return one score for each of {n} documents: it scored {len(scores)}."
            )
        return [scores[index] for index in range(n)]

    def _get_results(self, response: Any) -> Any:
        """Return the list of results in a response; the caller checks that it is a list."""
        return response.get("results") if isinstance(response, dict) else None


class TeiReranker(RemoteReranker):
    """A reranker on a server of Hugging Face's text-embeddings-inference, which runs a single model.

    Args:
        spec: The URL, which ends in `/rerank`.
        options: Keyword arguments of `RemoteReranker`, such as `deadline`.
    """

    MAX_BATCH_SIZE = 32  # maximum texts per request, the default limit of the server

    def __init__(self, spec: str, **options: Any):
        super().__init__(f"tei@{spec}", **options)

    @property
    def name(self) -> str:
        return f"tei:{redact_urls(self._url)}"

    def _score_passages(self, question: str, passages: Sequence[Passage]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(passages), self.MAX_BATCH_SIZE):
            scores += super()._score_passages(question, passages[start : start + self.MAX_BATCH_SIZE])
        return scores

    def _make_body(self, query: str, texts: list[str]) -> dict[str, Any]:
        return {"query": query, "texts": texts, "truncate": True}

    def _get_results(self, response: Any) -> Any:
        if not isinstance(response, list):
            return None
        return [{**item, "relevance_score": item.get("score")} if isinstance(item, dict) else item for item in response]
