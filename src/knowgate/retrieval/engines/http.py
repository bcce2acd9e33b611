"""The user's own search engine behind an HTTP endpoint. What it must answer is written in `reply.py`.

POST sends {"query": ..., "k": ...} as JSON; a URL with {query} (and {k}) in it is fetched with GET instead:
`http:https://search.example/api?q={query}&n={k}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from knowgate.core.files import sha256_text
from knowgate.core.http_client import JsonClient, parse_json_response, replace_surrogates
from knowgate.core.redaction import redact_message, redact_urls
from knowgate.errors import BadInput, ServerError
from knowgate.retrieval.passages import check_k
from knowgate.types import Passage

LIST_FIELDS = ("passages", "results", "documents", "hits")
TEXT_FIELDS = ("text", "content")
MAX_SCORE = 1e30  # no measure of likeness is beyond; a whole number may be beyond any float
_EXPECTED = (
    f"Expected: a JSON list, or an object with one of {', '.join(LIST_FIELDS)}, of objects with "
    f"{' or '.join(TEXT_FIELDS)} and, if there are, id, title and score."
)


def parse_search_response(body: bytes, server: str) -> list[Passage]:
    """The passages of a reply, in its order."""
    shown = redact_message(body[:80].decode(errors="replace"))
    try:
        value = parse_json_response(body, "it")
    except ServerError as error:
        raise _nonsense(server, f"{str(error).rstrip('.')}: '{shown}'") from None
    items = value
    if isinstance(value, dict):
        items = next((value[name] for name in LIST_FIELDS if name in value), None)
    if not isinstance(items, list):
        raise _nonsense(server, f"no list of passages: '{shown}'")
    return [_passage(item, number, server) for number, item in enumerate(items)]


def _passage(item: Any, number: int, server: str) -> Passage:
    if not isinstance(item, dict):
        raise _nonsense(server, f"passage {number} is not an object")
    text = next((item[name] for name in TEXT_FIELDS if name in item), None)
    if not isinstance(text, str) or not text.strip():
        raise _nonsense(server, f"passage {number} has no text")
    name, title = item.get("id"), item.get("title") or ""
    if not isinstance(title, str) or not isinstance(name, str | int | None):
        raise _nonsense(server, f"passage {number} has an id or title that is not a string")
    chosen = sha256_text(text)[:16] if name in (None, "") else str(name)
    return Passage(chosen, text, title, _score(item.get("score"), number, server))


def _score(value: Any, number: int, server: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MAX_SCORE:
        raise _nonsense(server, f"passage {number} has a score that is not a number: {redact_message(repr(value))}")
    return float(value)


def _nonsense(server: str, problem: str) -> ServerError:
    return ServerError(f"{server} gave a reply that cannot be used: {problem}. {_EXPECTED}")


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
        self._server = JsonClient(
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
        return self._server.map(
            lambda query: parse_search_response(self._ask(query, k), self._server.name)[:k], queries
        )

    def _ask(self, query: str, k: int) -> bytes:
        query = replace_surrogates(query)
        if "{query}" not in self._url:
            return self._server.request_bytes("POST", self._url, body={"query": query, "k": k})
        try:
            return self._server.request_bytes(
                "GET", self._url.replace("{k}", str(k)).replace("{query}", quote(query, safe=""))
            )
        except httpx.InvalidURL:
            raise BadInput(
                f"a question of {len(query):,} characters is too long for a URL. Ask {self._server.name} by POST: "
                "leave {query} out of its URL."
            ) from None


def _shown(url: str) -> str:
    """The URL without user, password and parameters, which may hold keys."""
    return redact_urls(url.partition("?")[0]).replace("***@", "")
