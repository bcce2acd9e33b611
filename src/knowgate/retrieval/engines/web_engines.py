"""The web search engines SearXNG, Tavily and Brave: how each is queried, and how its results become text."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from pydantic import AfterValidator, Field

from knowgate.core.http_client import JsonClient
from knowgate.core.options import Options
from knowgate.errors import BadSetting, ServerError
from knowgate.retrieval.file_formats import read_html

MAX_QUERY_CHARS = 400  # Brave's limit; the other engines gain nothing from longer queries
MAX_QUERY_WORDS = 50
MAX_TEXT_CHARS = 4000  # of a result
MAX_SCORE = 1e30
QUOTA_STATUSES = (402, 432, 433)  # returned when a plan is used up


def _check_language(lang: str) -> str:
    if lang and not re.fullmatch(r"[A-Za-z]{2,3}(-[A-Za-z]{2,4})?", lang):
        raise ValueError("it must be a language such as en or zh-CN")
    return lang


Language = Annotated[str, AfterValidator(_check_language)]


class WebOptions(Options):
    """Options of a web search, written after the question mark of a spec."""

    lang: Language = Field(default="", description="Language of the results, such as en.")
    safe: int = Field(default=1, ge=0, le=2, description="Safe search: 0 off, 1 moderate, 2 strict.")
    minute: int = Field(default=30, ge=1, description="Most searches per minute, of all processes together.")
    day: int = Field(default=1000, ge=1, description="Most searches per day, of all processes together.")
    days: float = Field(default=7.0, ge=0, le=3650, description="Days a response stays in the cache; 0: no cache.")
    stale: bool = Field(default=False, description="Use an expired response if the engine fails, with a warning.")
    record: str = Field(default="", description="Folder that stores every response, for web:replay@DIR.")
    deadline: float = Field(default=10.0, ge=0.1, le=600, description="Seconds per search, including retries.")


@dataclass(frozen=True)
class WebResult:
    """A search result as plain text."""

    url: str
    title: str
    text: str
    score: float | None = None


class WebEngine(ABC):
    """A web search engine.

    Args:
        url: Its address; '' for the default one.
        options: Language, safe search and deadline.
        transport: Replaces the network in tests.
    """

    name: str
    default_url: str
    key_variable = ""  # the environment variable of the API key; '' if none is needed

    def __init__(self, url: str, options: WebOptions, transport: httpx.BaseTransport | None = None):
        if not url and not self.default_url:
            raise BadSetting(f"web search by {self.name} needs its address: web:{self.name}@https://search.example")
        self.options = options
        self.client = JsonClient(
            url or self.default_url,
            f"the web search {self.name}",
            headers=self._make_headers(self._read_key()),
            deadline=options.deadline,
            transport=transport,
        )

    def search(self, query: str, n: int) -> list[WebResult]:
        """Return up to n results, best first; a query that is too long for an engine is shortened."""
        response = self._request(" ".join(query.split()[:MAX_QUERY_WORDS])[:MAX_QUERY_CHARS], n)
        items = self._get_items(response) if isinstance(response, dict) else None
        if not isinstance(items, list):
            raise ServerError(f"{self.client.name} returned no list of results. Check its address.")
        valid = [item for item in items if isinstance(item, dict) and isinstance(item.get("url"), str)]
        return [_make_result(item, self._get_text(item)) for item in valid[:n]]

    @abstractmethod
    def _request(self, query: str, n: int) -> Any:
        """Send a search and return its response as JSON."""

    def _get_items(self, response: dict[str, Any]) -> Any:
        return response.get("results")

    @abstractmethod
    def _get_text(self, item: dict[str, Any]) -> Any:
        """Return the text of a result, which may contain markup."""

    def _make_headers(self, key: str) -> dict[str, str]:
        return {}

    def _read_key(self) -> str:
        key = os.environ.get(self.key_variable, "").strip() if self.key_variable else ""
        if self.key_variable and not key:
            raise BadSetting(f"web search by {self.name} needs an API key: set {self.key_variable}.")
        return key


class SearxngEngine(WebEngine):
    """Your own SearXNG instance; its JSON output is off by default."""

    name = "searxng"
    default_url = ""

    def _request(self, query: str, n: int) -> Any:
        language = self.options.lang or "auto"
        params = {"q": query, "format": "json", "safesearch": self.options.safe, "language": language}
        try:
            return self.client.request_json("GET", "/search", params=params)
        except ServerError as error:
            if "status 403" not in str(error):
                raise
            raise ServerError(
                f"{self.client.name} refuses JSON. Allow it in its settings.yml: search: formats: [html, json]."
            ) from None

    def _get_text(self, item: dict[str, Any]) -> Any:
        return item.get("content")


class TavilyEngine(WebEngine):
    """Tavily, whose results are texts written for LLMs."""

    name = "tavily"
    default_url = "https://api.tavily.com"
    key_variable = "TAVILY_API_KEY"

    def _make_headers(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    def _request(self, query: str, n: int) -> Any:
        body = {"query": query, "max_results": n, "search_depth": "basic", "include_answer": False}
        response = self.client.request_json("POST", "/search", body=body, accept=QUOTA_STATUSES)
        if isinstance(response, dict) and "results" not in response and "detail" in response:
            detail = self.client.redact(str(response["detail"]))
            raise ServerError(f"{self.client.name} is over its quota: {detail}. Wait, or choose a larger plan.")
        return response

    def _get_text(self, item: dict[str, Any]) -> Any:
        return item.get("raw_content") or item.get("content")


class BraveEngine(WebEngine):
    """Brave Search; a result has a description and sometimes extra snippets."""

    name = "brave"
    default_url = "https://api.search.brave.com/res/v1"
    key_variable = "BRAVE_API_KEY"

    def _make_headers(self, key: str) -> dict[str, str]:
        return {"X-Subscription-Token": key}

    def _request(self, query: str, n: int) -> Any:
        safe, lang = ("off", "moderate", "strict")[self.options.safe], self.options.lang
        params = {"q": query, "count": n, "safesearch": safe, **({"search_lang": lang} if lang else {})}
        return self.client.request_json("GET", "/web/search", params=params)

    def _get_items(self, response: dict[str, Any]) -> Any:
        web = response.get("web", {"results": []})  # missing if there are no results
        return web.get("results") if isinstance(web, dict) else None

    def _get_text(self, item: dict[str, Any]) -> Any:
        snippets = item.get("extra_snippets")
        extra = [snippet for snippet in snippets if isinstance(snippet, str)] if isinstance(snippets, list) else []
        return "\n".join([str(item.get("description") or ""), *extra])


def _make_result(item: Mapping[str, Any], text: Any) -> WebResult:
    score = item.get("score")
    is_number = isinstance(score, int | float) and not isinstance(score, bool) and abs(score) < MAX_SCORE
    title, plain_text = _remove_markup(item.get("title")), _remove_markup(text)[:MAX_TEXT_CHARS]
    return WebResult(item["url"], title, plain_text, float(score) if is_number else None)  # type: ignore[arg-type]


def _remove_markup(markup: Any) -> str:
    return " ".join(read_html(markup).text.split()) if isinstance(markup, str) else ""


WEB_ENGINES: dict[str, type[WebEngine]] = {"searxng": SearxngEngine, "tavily": TavilyEngine, "brave": BraveEngine}
