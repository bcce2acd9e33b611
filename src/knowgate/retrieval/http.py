"""The user's own search engine behind an HTTP endpoint. What it must answer is written in `reply.py`.

POST sends {"query": ..., "k": ...} as JSON; a URL with {query} (and {k}) in it is fetched with GET instead:
`http:https://search.example/api?q={query}&n={k}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

import httpx

from knowgate.endpoint import Endpoint, sendable
from knowgate.errors import BadInput
from knowgate.files import sha256_text
from knowgate.retrieval.ranking import check_k
from knowgate.retrieval.reply import read_reply
from knowgate.servers import without_secrets
from knowgate.types import Passage


class HttpRetriever:
    """`deadline` is in seconds per query, all tries together; lost connections, 429 and 5xx are tried again."""

    name = "http"

    def __init__(
        self,
        url: str,
        *,
        deadline: float = 10.0,
        pause: float = 0.2,
        headers: Mapping[str, str] | None = None,
        transport: httpx.BaseTransport | None = None,
    ):
        self._url = url
        self._server = Endpoint(
            url,
            f"the search server {_shown(url)}",
            headers=headers,
            advice="Check its address, and the key if it wants one.",
            deadline=deadline,
            pause=pause,
            transport=transport,
        )

    @property
    def fingerprint(self) -> str:
        return sha256_text(self.name, self._url)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        return self._server.each(lambda query: read_reply(self._ask(query, k), self._server.what)[:k], queries)

    def _ask(self, query: str, k: int) -> bytes:
        query = sendable(query)
        if "{query}" not in self._url:
            return self._server.fetch("POST", self._url, body={"query": query, "k": k})
        try:
            return self._server.fetch("GET", self._url.replace("{k}", str(k)).replace("{query}", quote(query, safe="")))
        except httpx.InvalidURL:
            raise BadInput(
                f"a question of {len(query):,} characters is too long for a URL. Ask {self._server.what} by POST: "
                "leave {query} out of its URL."
            ) from None


def _shown(url: str) -> str:
    """The URL without user, password and parameters, which may hold keys."""
    return without_secrets(url.partition("?")[0]).replace("***@", "")
