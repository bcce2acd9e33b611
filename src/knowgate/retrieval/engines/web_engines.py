"""Three search engines of the web and the forms of their replies: SearXNG, Tavily, Brave.

Knows nothing of caches or budgets. Markup in titles and snippets becomes text here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from knowgate.core.http_client import JsonClient
from knowgate.errors import BadSetting, ServerError
from knowgate.retrieval.file_formats import read_html

MAX_QUERY_LENGTH = 400  # characters of a query: Brave's limit, and the others gain nothing from more
MAX_QUERY_WORDS = 50
MAX_TEXT_LENGTH = 4000  # characters of a result's text
QUOTA_STATUSES = (402, 432, 433)  # Tavily's and others' words for a plan that is used up
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class SearchOptions:
    """safe: 0 off, 1 moderate, 2 strict."""

    lang: str = ""
    safe: int = 1


@dataclass(frozen=True)
class WebResult:
    """One result, as text."""

    url: str
    title: str
    text: str
    score: float | None = None


class WebEngine(ABC):
    """One search engine. key: the variable that holds its key; '' where it needs none."""

    name: str
    address: str
    key = ""

    def __init__(self, url: str, deadline: float, transport: httpx.BaseTransport | None = None):
        if not url and not self.address:
            raise BadSetting(f"web search by {self.name} needs its address: web:{self.name}@https://search.example")
        self._server = JsonClient(
            url or self.address,
            f"the web search {self.name}",
            headers=self._headers(self._secret()),
            deadline=deadline,
            transport=transport,
        )

    @property
    def url(self) -> str:
        return self._server.url

    def each(self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
        return self._server.map(work, items)

    def search(self, query: str, n: int, wish: SearchOptions) -> list[WebResult]:
        """Up to n results, best first. A query too long for an engine is cut."""
        short = " ".join(query.split()[:MAX_QUERY_WORDS])[:MAX_QUERY_LENGTH]
        reply = self._ask(short, n, wish)
        items = self._items(reply) if isinstance(reply, dict) else None
        if not isinstance(items, list):
            raise ServerError(f"{self._server.name} gave no list of results. Check its address.")
        return [self._result(one) for one in items if isinstance(one, dict) and isinstance(one.get("url"), str)][:n]

    @abstractmethod
    def _ask(self, query: str, n: int, wish: SearchOptions) -> Any:
        """The reply as JSON."""

    @abstractmethod
    def _items(self, reply: dict[str, Any]) -> Any:
        """The list in it."""

    @abstractmethod
    def _result(self, item: dict[str, Any]) -> WebResult: ...

    def _headers(self, secret: str) -> dict[str, str]:
        return {}

    def _secret(self) -> str:
        found = os.environ.get(self.key, "").strip() if self.key else ""
        if self.key and not found:
            raise BadSetting(f"web search by {self.name} needs a key: set {self.key}.")
        return found


class SearxngEngine(WebEngine):
    """A SearXNG of one's own; its JSON is off by default."""

    name = "searxng"
    address = ""

    def _ask(self, query: str, n: int, wish: SearchOptions) -> Any:
        params = {"q": query, "format": "json", "safesearch": wish.safe, "language": wish.lang or "auto"}
        try:
            return self._server.request_json("GET", "/search", params=params)
        except ServerError as error:
            if "status 403" in str(error):
                raise ServerError(
                    f"{self._server.name} refuses JSON. Allow it in its settings.yml: search: formats: [html, json]."
                ) from None
            raise

    def _items(self, reply: dict[str, Any]) -> Any:
        return reply.get("results")

    def _result(self, item: dict[str, Any]) -> WebResult:
        return _made(item, item.get("content"))


class TavilyEngine(WebEngine):
    """Its results are texts for LLMs already."""

    name = "tavily"
    address = "https://api.tavily.com"
    key = "TAVILY_API_KEY"

    def _headers(self, secret: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {secret}"}

    def _ask(self, query: str, n: int, wish: SearchOptions) -> Any:
        body = {"query": query, "max_results": n, "search_depth": "basic", "include_answer": False}
        reply = self._server.request_json("POST", "/search", body=body, accept=QUOTA_STATUSES)
        if isinstance(reply, dict) and "results" not in reply and "detail" in reply:
            raise ServerError(
                f"{self._server.name} is over its quota: {self._server.redact(str(reply['detail']))}. Wait, or choose a "
                "larger plan."
            )
        return reply

    def _items(self, reply: dict[str, Any]) -> Any:
        return reply.get("results")

    def _result(self, item: dict[str, Any]) -> WebResult:
        return _made(item, item.get("raw_content") or item.get("content"))


class BraveEngine(WebEngine):
    """A description and some extra snippets."""

    name = "brave"
    address = "https://api.search.brave.com/res/v1"
    key = "BRAVE_API_KEY"

    def _headers(self, secret: str) -> dict[str, str]:
        return {"X-Subscription-Token": secret}

    def _ask(self, query: str, n: int, wish: SearchOptions) -> Any:
        safe = ("off", "moderate", "strict")[wish.safe]
        params = {"q": query, "count": n, "safesearch": safe, **({"search_lang": wish.lang} if wish.lang else {})}
        return self._server.request_json("GET", "/web/search", params=params)

    def _items(self, reply: dict[str, Any]) -> Any:
        web = reply.get("web", {"results": []})  # left out where nothing was found
        return web.get("results") if isinstance(web, dict) else None

    def _result(self, item: dict[str, Any]) -> WebResult:
        given = item.get("extra_snippets")
        extra = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
        return _made(item, "\n".join([str(item.get("description") or ""), *extra]))


def _made(item: dict[str, Any], text: Any) -> WebResult:
    score = item.get("score")
    known = isinstance(score, int | float) and not isinstance(score, bool) and abs(score) < 1e30
    return WebResult(item["url"], _plain(item.get("title")), _plain(text)[:MAX_TEXT_LENGTH], float(score) if known else None)  # type: ignore[arg-type]  # fmt: skip


def _plain(markup: Any) -> str:
    return " ".join(read_html(markup).text.split()) if isinstance(markup, str) else ""


WEB_ENGINES: dict[str, type[WebEngine]] = {"searxng": SearxngEngine, "tavily": TavilyEngine, "brave": BraveEngine}
