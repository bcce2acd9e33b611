"""A reranker behind an HTTP endpoint: of the form Cohere, Jina and many servers share, `api:MODEL@URL`, or of that of
Hugging Face's text-embeddings-inference, `tei:URL`.

The first form is that of `api.py`, from the other side. The key comes from KNOWGATE_RERANK_KEY, where one is wanted.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from knowgate.endpoint import Endpoint, sendable
from knowgate.errors import BadInput, BadSetting, ServerError
from knowgate.files import sha256_text
from knowgate.rerank.cross_encoder import shown
from knowgate.servers import without_secrets
from knowgate.typed import AtLeastZero, read_record
from knowgate.types import Passage

KEY = "KNOWGATE_RERANK_KEY"
PAUSE = 0.5  # seconds before the second try; twice as long before each further one


@dataclass(frozen=True)
class Result:
    """One document of a reply; other fields are let be."""

    index: AtLeastZero
    relevance_score: float


class RemoteReranker:
    """Scores are the server's `relevance_score`. `deadline` is in seconds per question, all tries together; lost
    connections, 429 and 5xx are tried again."""

    def __init__(
        self, spec: str, *, deadline: float = 60.0, pause: float = PAUSE, transport: httpx.BaseTransport | None = None
    ):
        self.model, _, self._url = spec.partition("@")
        try:
            url = httpx.URL(self._url)
        except httpx.InvalidURL:
            url = httpx.URL("")
        if not self.model or url.scheme not in ("http", "https") or not url.host:
            raise BadSetting(
                f"'{without_secrets(spec)}' names no rerank server: write api:MODEL@URL, the URL with http:// or "
                "https://."
            )
        if url.userinfo:
            raise BadSetting(f"the URL of the reranker '{self.model}' has a login in it. Put the key into {KEY}.")
        self._deadline, self._pause, self._transport = deadline, pause, transport

    @property
    def name(self) -> str:
        return f"api:{self.model}@{without_secrets(self._url)}"

    @property
    def fingerprint(self) -> str:
        """Of model and address: what weights a server holds cannot be seen from here."""
        return sha256_text(f"api:{self.model}@{self._url}")[:16]

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        if len(questions) != len(passages):
            raise BadInput(f"{len(questions)} questions came with {len(passages)} lists of passages.")
        return self._server.each(lambda pair: self._score(*pair), list(zip(questions, passages, strict=True)))

    @functools.cached_property
    def _server(self) -> Endpoint:
        key = os.environ.get(KEY, "").strip()
        return Endpoint(
            self._url,
            f"the rerank server of '{self.model}'",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            advice=f"Check the URL, the model and {KEY}.",
            deadline=self._deadline,
            pause=self._pause,
            transport=self._transport,
        )

    def _score(self, question: str, passages: Sequence[Passage]) -> list[float]:
        if not passages:
            return []
        texts = [sendable(text) for text in (question, *map(shown, passages))]
        return self._read(self._server.ask("POST", self._url, body=self._body(texts[0], texts[1:])), len(passages))

    def _body(self, question: str, texts: list[str]) -> dict[str, Any]:
        return {"model": self.model, "query": question, "documents": texts}

    def _read(self, given: Any, n: int) -> list[float]:
        results, server = self._results(given), self._server.what
        if not isinstance(results, list):
            raise ServerError(f"{server} gave no list of results.")
        try:
            items = [read_record(Result, item, f"{server} gave a result", others=True) for item in results]
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
        return f"tei:{without_secrets(self._url)}"

    def _score(self, question: str, passages: Sequence[Passage]) -> list[float]:
        parts = [passages[place : place + self.BATCH] for place in range(0, len(passages), self.BATCH)]
        return [score for part in parts for score in super(TeiReranker, self)._score(question, part)]

    def _body(self, question: str, texts: list[str]) -> dict[str, Any]:
        return {"query": question, "texts": texts, "truncate": True}

    def _results(self, given: Any) -> Any:
        if not isinstance(given, list):
            return None
        return [{**one, "relevance_score": one.get("score")} if isinstance(one, dict) else one for one in given]
