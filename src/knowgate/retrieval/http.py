"""The user's own search engine behind an HTTP endpoint. What it must answer is written in `reply.py`.

POST sends {"query": ..., "k": ...} as JSON; a URL with {query} (and {k}) in it is fetched with GET instead:
`http:https://search.example/api?q={query}&n={k}`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx

from knowgate.errors import BadSetting, ServerError
from knowgate.files import sha256_text
from knowgate.proxies import open_client
from knowgate.retrieval.ranking import check_k
from knowgate.retrieval.reply import read_reply
from knowgate.types import Passage

_AT_ONCE = 8
_LARGEST_REPLY = 50_000_000  # bytes; a search reply beyond this is a mistake


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
            raise BadSetting(f"'{url}' is not a search URL: it must begin with http:// or https://.")
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise BadSetting(f"'{url}' is not a search URL: {error}.") from None
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
        with (
            open_client(headers=self._headers, transport=self._transport) as client,
            ThreadPoolExecutor(_AT_ONCE) as pool,
        ):
            return list(pool.map(lambda query: self._search(client, query, k), queries))

    def _search(self, client: httpx.Client, query: str, k: int) -> list[Passage]:
        end = time.monotonic() + self._deadline
        for attempt in range(self._retries + 1):
            problem, wait = "", self._pause * 2**attempt
            try:
                response = self._send(client, query, k, end)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code != 429 and response.status_code < 500:
                    return self._read(response, k)
                problem = f"status {response.status_code}"
                wait = max(wait, _asked_wait(response))
            if attempt == self._retries or time.monotonic() + wait >= end:
                break
            time.sleep(wait)
        raise ServerError(
            f"the search server {self._shown} failed: {problem}, after {attempt + 1} tries "
            f"within {self._deadline:g} s. Check that it runs."
        )

    def _send(self, client: httpx.Client, query: str, k: int, end: float) -> httpx.Response:
        """One try. httpx limits each read, not all of them together: the body is read against the clock."""
        request = self._request(client, query, k)
        request.extensions["timeout"] = httpx.Timeout(max(0.001, end - time.monotonic())).as_dict()
        response = client.send(request, stream=True)
        body = bytearray()
        try:
            for chunk in response.iter_bytes():
                body += chunk
                if time.monotonic() > end:
                    raise httpx.ReadTimeout("the reply took too long")
                if len(body) > _LARGEST_REPLY:
                    raise ServerError(f"the search server {self._shown} sent more than {_LARGEST_REPLY} bytes.")
        finally:
            response.close()
        return httpx.Response(
            response.status_code,
            content=bytes(body),
            headers={name: value for name, value in response.headers.items() if name == "retry-after"},
        )

    def _request(self, client: httpx.Client, query: str, k: int) -> httpx.Request:
        query = query.encode("utf-8", "replace").decode()  # half a character (a lone surrogate) cannot be sent
        if "{query}" not in self._url:
            return client.build_request("POST", self._url, json={"query": query, "k": k})
        url = self._url.replace("{k}", str(k)).replace("{query}", quote(query, safe=""))
        return client.build_request("GET", url)

    def _read(self, response: httpx.Response, k: int) -> list[Passage]:
        if response.status_code != 200:
            raise ServerError(
                f"the search server {self._shown} answered with status {response.status_code}: {response.text[:200]}"
            )
        return read_reply(response.text, f"the search server {self._shown}")[:k]

    @property
    def _shown(self) -> str:
        """The URL without user, password and parameters, which may hold keys."""
        url = httpx.URL(self._url.partition("?")[0])
        return str(url.copy_with(username=None, password=None))


def _asked_wait(response: httpx.Response) -> float:
    """Seconds of Retry-After; 0 when absent or given as a date."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0
