"""A reranker behind an HTTP endpoint: of the form Cohere, Jina and many servers share, `api:MODEL@URL`, or of that of
Hugging Face's text-embeddings-inference, `tei:URL`.

The first form is that of `api.py`, from the other side. The key comes from KNOWGATE_RERANK_KEY, where one is wanted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from knowgate.errors import BadInput, BadSetting, ServerError
from knowgate.files import sha256_text
from knowgate.rerank.cross_encoder import shown
from knowgate.servers import Whole, one_line, open_client, parse_reply, read_whole, secrets_of, until, without_secrets
from knowgate.typed import AtLeastZero, read_record
from knowgate.types import Passage

KEY = "KNOWGATE_RERANK_KEY"
AT_ONCE = 8
RETRIES = 2
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
        client = self._client
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda question, found: self._score(client, question, found), questions, passages))

    @functools.cached_property
    def _client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        client = open_client(headers, transport=self._transport)
        weakref.finalize(self, client.close)
        return client

    @functools.cached_property
    def _key(self) -> str:
        return os.environ.get(KEY, "").strip()

    def _score(self, client: httpx.Client, question: str, passages: Sequence[Passage]) -> list[float]:
        if not passages:
            return []
        texts = [_sendable(text) for text in (question, *map(shown, passages))]
        return self._read(self._post(client, self._body(texts[0], texts[1:])), len(passages))

    def _body(self, question: str, texts: list[str]) -> dict[str, Any]:
        return {"model": self.model, "query": question, "documents": texts}

    def _post(self, client: httpx.Client, body: dict[str, Any]) -> Whole:
        end = time.monotonic() + self._deadline
        for attempt in range(RETRIES + 1):
            wait = self._pause * 2**attempt
            try:
                reply = self._send(client, body, end)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {self._told(str(error))}"
            else:
                if reply.status == 200:
                    return reply
                problem = f"status {reply.status}: {self._told(reply.content[:2000].decode(errors='replace'))}"
                if reply.status != 429 and reply.status < 500:
                    break
                wait = max(wait, reply.retry_after or 0.0)
            if attempt == RETRIES or time.monotonic() + wait >= end:
                break
            time.sleep(wait)
        raise ServerError(f"{self._server} failed: {problem}. Check the URL, the model and {KEY}.")

    def _send(self, client: httpx.Client, body: dict[str, Any], end: float) -> Whole:
        """One try."""
        request = client.build_request("POST", self._url, json=body)
        request.extensions["timeout"] = httpx.Timeout(max(0.001, end - time.monotonic())).as_dict()
        with until(end), contextlib.closing(client.send(request, stream=True)) as response:
            return read_whole(response, self._server)

    def _read(self, reply: Whole, n: int) -> list[float]:
        given = parse_reply(reply.content, f"the reply of {self._server}")
        results = self._results(given)
        if not isinstance(results, list):
            raise ServerError(f"{self._server} gave no list of results.")
        try:
            items = [read_record(Result, item, f"{self._server} gave a result", others=True) for item in results]
        except BadInput as error:
            raise ServerError(str(error)) from None
        found = {item.index: item.relevance_score for item in items}
        if sorted(found) != list(range(n)):
            raise ServerError(f"{self._server} scored {len(found)} of {n} documents; each needs a score.")
        return [found[place] for place in range(n)]

    def _results(self, given: Any) -> Any:
        return given.get("results") if isinstance(given, dict) else None

    @property
    def _server(self) -> str:
        return f"the rerank server of '{self.model}'"

    def _told(self, words: str) -> str:
        """A server's words without keys that are in its URL or in the headers."""
        return one_line(words, [*secrets_of(self._url), *([self._key] if self._key else [])])


class TeiReranker(RemoteReranker):
    """A server of text-embeddings-inference, which holds one model: `tei:URL`, the URL up to /rerank."""

    BATCH = 32  # texts of one request, as it allows by default

    def __init__(self, spec: str, **options: Any):
        super().__init__(f"tei@{spec}", **options)

    @property
    def name(self) -> str:
        return f"tei:{without_secrets(self._url)}"

    def _score(self, client: httpx.Client, question: str, passages: Sequence[Passage]) -> list[float]:
        parts = [passages[place : place + self.BATCH] for place in range(0, len(passages), self.BATCH)]
        return [score for part in parts for score in super(TeiReranker, self)._score(client, question, part)]

    def _body(self, question: str, texts: list[str]) -> dict[str, Any]:
        return {"query": question, "texts": texts, "truncate": True}

    def _results(self, given: Any) -> Any:
        if not isinstance(given, list):
            return None
        return [{**one, "relevance_score": one.get("score")} if isinstance(one, dict) else one for one in given]


def _sendable(text: str) -> str:
    """Half a character (a lone surrogate) cannot be sent."""
    return text.encode("utf-8", "replace").decode()
