"""A reranker behind an HTTP endpoint of the form Cohere, Jina and many servers share: `api:MODEL@URL`.

The form is that of `api.py`, from the other side. The key comes from KNOWGATE_RERANK_KEY, where the server wants one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from knowgate.errors import BadInput, BadSetting, ServerError
from knowgate.files import sha256_text
from knowgate.rerank.cross_encoder import shown
from knowgate.types import Passage

KEY = "KNOWGATE_RERANK_KEY"
AT_ONCE = 8
RETRIES = 3
PAUSE = 0.5  # seconds before the second try; twice as long before each further one


class RemoteReranker:
    """Scores are the server's `relevance_score`. Lost connections, 429 and 5xx are tried again."""

    def __init__(
        self, spec: str, *, deadline: float = 60.0, pause: float = PAUSE, transport: httpx.BaseTransport | None = None
    ):
        self.model, _, self._url = spec.partition("@")
        if not self.model or not self._url.startswith(("http://", "https://")):
            raise BadSetting(f"'{spec}' names no rerank server: write api:MODEL@URL, the URL with http:// or https://.")
        if httpx.URL(self._url).userinfo:
            raise BadSetting(f"the URL of the reranker '{self.model}' has a login in it. Put the key into {KEY}.")
        self._deadline, self._pause, self._transport = deadline, pause, transport

    @property
    def name(self) -> str:
        return f"api:{self.model}@{self._url}"

    @property
    def fingerprint(self) -> str:
        """Of model and address: what weights a server holds cannot be seen from here."""
        return sha256_text(self.name)[:16]

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        if len(questions) != len(passages):
            raise BadInput(f"{len(questions)} questions came with {len(passages)} lists of passages.")
        with self._client() as client, ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda question, found: self._score(client, question, found), questions, passages))

    def _client(self) -> httpx.Client:
        key = os.environ.get(KEY, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(headers=headers, transport=self._transport, timeout=self._deadline)

    def _score(self, client: httpx.Client, question: str, passages: Sequence[Passage]) -> list[float]:
        if not passages:
            return []
        body = {"model": self.model, "query": question, "documents": [shown(passage) for passage in passages]}
        return self._read(self._post(client, body), len(passages))

    def _post(self, client: httpx.Client, body: dict[str, Any]) -> httpx.Response:
        problem = ""
        for attempt in range(RETRIES):
            if attempt:
                time.sleep(self._pause * 2 ** (attempt - 1))
            try:
                response = client.post(self._url, json=body)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return response
            problem = f"status {response.status_code}: {response.text[:200]}"
            if response.status_code != 429 and response.status_code < 500:
                break
        raise ServerError(f"the rerank server of '{self.model}' failed: {problem}. Check the URL, the model and {KEY}.")

    def _read(self, response: httpx.Response, n: int) -> list[float]:
        try:
            found = {int(item["index"]): float(item["relevance_score"]) for item in response.json()["results"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"the rerank server of '{self.model}' gave no list of results ({error!r}).") from None
        if sorted(found) != list(range(n)) or not all(math.isfinite(score) for score in found.values()):
            raise ServerError(
                f"the rerank server of '{self.model}' scored {len(found)} of {n} documents, or one of them with no "
                "number; each needs one."
            )
        return [found[place] for place in range(n)]
