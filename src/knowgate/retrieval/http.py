"""The user's own search engine behind an HTTP endpoint. What it must answer is written in `reply.py`.

POST sends {"query": ..., "k": ...} as JSON; a URL with {query} (and {k}) in it is fetched with GET instead:
`http:https://search.example/api?q={query}&n={k}`.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx

from knowgate.errors import BadInput, BadSetting, ServerError
from knowgate.files import sha256_text
from knowgate.retrieval.ranking import check_k
from knowgate.retrieval.reply import read_reply
from knowgate.servers import Whole, one_line, open_client, read_whole, secrets_of, until, without_secrets
from knowgate.types import Passage

_AT_ONCE = 8


class HttpRetriever:
    """`deadline` is in seconds per query, all tries together; lost connections, 429 and 5xx are tried again."""

    name = "http"

    def __init__(
        self,
        url: str,
        *,
        deadline: float = 10.0,
        retries: int = 2,
        pause: float = 0.2,
        headers: Mapping[str, str] | None = None,
        transport: httpx.BaseTransport | None = None,
    ):
        if not url.startswith(("http://", "https://")):
            raise BadSetting(f"'{without_secrets(url)}' is not a search URL: it must begin with http:// or https://.")
        try:
            host = httpx.URL(url).host
        except httpx.InvalidURL as error:
            words = one_line(str(error), secrets_of(url))
            raise BadSetting(f"'{without_secrets(url)}' is not a search URL: {words}.") from None
        if not host:
            raise BadSetting(f"'{without_secrets(url)}' is not a search URL: it names no server.")
        self._url = url
        self._deadline = deadline
        self._retries = retries
        self._pause = pause
        self._headers = dict(headers or {})
        self._transport = transport

    @property
    def fingerprint(self) -> str:
        return sha256_text(self.name, self._url)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        client = self._client
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda query: self._search(client, query, k), queries))

    @functools.cached_property
    def _client(self) -> httpx.Client:
        client = open_client(self._headers, transport=self._transport)
        weakref.finalize(self, client.close)
        return client

    def _search(self, client: httpx.Client, query: str, k: int) -> list[Passage]:
        end = time.monotonic() + self._deadline
        for attempt in range(self._retries + 1):
            problem, wait = "", self._pause * 2**attempt
            try:
                reply = self._send(client, query, k, end)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {self._told(str(error))}"
            else:
                if reply.status != 429 and reply.status < 500:
                    return self._read(reply, k)
                problem = f"status {reply.status}"
                wait = max(wait, reply.retry_after or 0.0)
            if attempt == self._retries or time.monotonic() + wait >= end:
                break
            time.sleep(wait)
        raise ServerError(
            f"the search server {self._shown} failed: {problem}, after {attempt + 1} tries "
            f"within {self._deadline:g} s. Check that it runs."
        )

    def _send(self, client: httpx.Client, query: str, k: int, end: float) -> Whole:
        """One try."""
        request = self._request(client, query, k)
        request.extensions["timeout"] = httpx.Timeout(max(0.001, end - time.monotonic())).as_dict()
        with until(end), contextlib.closing(client.send(request, stream=True)) as response:
            return read_whole(response, f"the search server {self._shown}")

    def _request(self, client: httpx.Client, query: str, k: int) -> httpx.Request:
        query = query.encode("utf-8", "replace").decode()  # half a character (a lone surrogate) cannot be sent
        if "{query}" not in self._url:
            return client.build_request("POST", self._url, json={"query": query, "k": k})
        url = self._url.replace("{k}", str(k)).replace("{query}", quote(query, safe=""))
        try:
            return client.build_request("GET", url)
        except httpx.InvalidURL:
            raise BadInput(
                f"a question of {len(query):,} characters is too long for a URL. Ask the search server {self._shown} "
                "by POST: leave {query} out of its URL."
            ) from None

    def _read(self, reply: Whole, k: int) -> list[Passage]:
        if reply.status != 200:
            words = self._told(reply.content[:2000].decode(errors="replace")) or "no reason given"
            raise ServerError(f"the search server {self._shown} answered with status {reply.status}: {words}")
        return read_reply(reply.content, f"the search server {self._shown}")[:k]

    def _told(self, words: str) -> str:
        """What is said about the server, without keys that are in its URL or in the headers."""
        return one_line(words, [*secrets_of(self._url), *(value for value in self._headers.values() if value)])

    @property
    def _shown(self) -> str:
        """The URL without user, password and parameters, which may hold keys."""
        url = httpx.URL(self._url.partition("?")[0])
        return str(url.copy_with(username=None, password=None))
