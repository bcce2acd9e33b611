"""The web search engines SearXNG, Tavily and Brave: send queries and convert the results to plain text."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from pydantic import AfterValidator

from knowgate.core.http_client import JsonClient
from knowgate.core.options import Options, option
from knowgate.errors import BadSetting, RejectionError, ServerError
from knowgate.retrieval.engines.http import MAX_BYTES
from knowgate.retrieval.file_formats import read_html
from knowgate.retrieval.passages import MAX_LABEL_CHARS, cut_query

MAX_WEB_QUERY = (400, 50)  # Brave's limits of characters and words; the other engines gain nothing from longer queries
MAX_TEXT_CHARS = 4000  # maximum text of one result
MAX_MARKUP_FACTOR = 5  # markup is cut to this many times the maximum text, because parsing megabytes takes seconds
MAX_URL_CHARS = 4000  # results with a longer URL are skipped, because a shortened one leads nowhere
MAX_SCORE = 1e30  # JSON integers can be too large for a float; no real score is this large
QUOTA_STATUSES = (402, 432, 433)  # HTTP statuses that Tavily returns when the quota of a plan is used up


def _check_language(lang: str) -> str:
    """Return a language code such as `en` or `zh-CN` after checking its form."""
    if lang and not re.fullmatch(r"[A-Za-z]{2,3}(-[A-Za-z]{2,4})?", lang):
        raise ValueError("the language must be a code such as en or zh-CN")
    return lang


Language = Annotated[str, AfterValidator(_check_language)]


class WebOptions(Options):
    """Options of a web search, written after the question mark of a spec, such as `web:brave?lang=en`.

    `minute` and `day` limit the number of searches. `days` is how long responses are cached.
    """

    lang: Language = option("", "Language of the results, such as en or zh-CN.")
    safe: int = option(1, "How strictly to filter adult content: 0 off, 1 moderate, 2 strict.", ge=0, le=2)
    minute: int = option(30, "Maximum number of searches per minute, across all processes.", ge=1)
    day: int = option(1000, "Maximum number of searches per day, across all processes.", ge=1)
    days: float = option(7.0, "How many days a response is cached; 0 turns the cache off.", ge=0, le=3650)
    stale: bool = option(False, "Use an expired cached response, with a warning, if the engine fails.")
    record: str = option(
        "", "Folder in which every response is recorded. The index web:replay@DIR returns the recorded responses later."
    )
    deadline: float = option(10.0, "Time limit for a search in seconds, including retries.", ge=0.1, le=600)


@dataclass(frozen=True)
class WebResult:
    """A web search result as plain text.

    Args:
        url: The address of the page.
        title: The title of the page.
        text: An excerpt of the page, or its whole text.
        score: How well the page matches; higher is better. None if the engine returns no scores.
    """

    url: str
    title: str
    text: str
    score: float | None = None


class WebEngine(ABC):
    """Base class of web search engines. A subclass sends the request and selects the text of a result.

    Args:
        url: The address of the engine, or '' for its default address.
        options: Language, safe search and time limit.
        transport: An httpx transport that replaces the network in tests.

    Raises:
        BadSetting: The address or the API key is missing.
    """

    name: str
    default_url: str
    key_variable = ""  # the environment variable of the API key; '' if none is needed

    def __init__(self, url: str, options: WebOptions, transport: httpx.BaseTransport | None = None):
        if not url and not self.default_url:
            raise BadSetting(
                f"web search by {self.name} needs its address. Write web:{self.name}@https://search.example"
            )
        self.options = options
        address = url or self.default_url
        name = f"the web search {self.name}"
        headers = self._make_headers(self._read_key())
        deadline = options.deadline
        self.client = JsonClient(
            address, name, headers=headers, deadline=deadline, max_bytes=MAX_BYTES, transport=transport
        )

    def search(self, query: str, n: int) -> list[WebResult]:
        """Return up to n results, best first.

        Overlong queries are cut off. Results without a URL, or with an overlong one, are skipped.
        """
        response = self._request(cut_query(query, *MAX_WEB_QUERY), n)
        items = self._get_items(response) if isinstance(response, dict) else None
        if not isinstance(items, list):
            raise RejectionError(f"{self.client.name} returned no list of results. Check the address of the engine.")
        valid = [item for item in items if isinstance(item, dict) and _is_valid_url(item.get("url"))]
        return [_make_result(item, self._get_text(item)) for item in valid[:n]]

    @abstractmethod
    def _request(self, query: str, n: int) -> Any:
        """Send a search and return its response as JSON."""

    def _get_items(self, response: dict[str, Any]) -> Any:
        """Return the list of results in a response."""
        return response.get("results")

    @abstractmethod
    def _get_text(self, item: dict[str, Any]) -> Any:
        """Return the text of a result, which may contain markup."""

    def _make_headers(self, key: str) -> dict[str, str]:
        """Return the HTTP headers that send the API key."""
        return {}

    def _read_key(self) -> str:
        """Return the API key from the environment; '' if the engine needs none."""
        key = os.environ.get(self.key_variable, "").strip() if self.key_variable else ""
        if self.key_variable and not key:
            raise BadSetting(
                f"web search by {self.name} needs an API key. Set the environment variable {self.key_variable}."
            )
        return key


class SearxngEngine(WebEngine):
    """Your own SearXNG server. Turn on JSON output in the server's settings."""

    name = "searxng"
    default_url = ""

    def _request(self, query: str, n: int) -> Any:
        """Send a search and return its response as JSON."""
        # SearXNG takes words such as !bing, :de and <3 as commands (engine, language, timeout). Their marks are removed.
        query = re.sub(r"(?<!\S)[!:<]+\s*", "", query)
        language = self.options.lang or "auto"
        params = {"q": query, "format": "json", "safesearch": self.options.safe, "language": language}
        try:
            return self.client.request_json("GET", "/search", params=params) if query else {"results": []}
        except ServerError as error:
            if "status 403" not in str(error):
                raise
            raise ServerError(
                f"{self.client.name} refuses JSON. Allow it in the settings.yml of SearXNG: search: formats: [html, json]."
            ) from None

    def _get_text(self, item: dict[str, Any]) -> Any:
        return item.get("content")


class TavilyEngine(WebEngine):
    """The search service Tavily, which returns longer texts for LLMs."""

    name = "tavily"
    default_url = "https://api.tavily.com"
    key_variable = "TAVILY_API_KEY"

    def _make_headers(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    def _request(self, query: str, n: int) -> Any:
        """Send a search and return its response as JSON."""
        body = {"query": query, "max_results": n, "search_depth": "basic", "include_answer": False}
        response = self.client.request_json("POST", "/search", body=body, accept=QUOTA_STATUSES)
        if isinstance(response, dict) and "results" not in response and "detail" in response:
            detail = self.client.redact(str(response["detail"]))
            raise ServerError(f"{self.client.name} is over its quota: {detail}. Wait, or choose a larger plan.")
        return response

    def _get_text(self, item: dict[str, Any]) -> Any:
        return item.get("raw_content") or item.get("content")


class BraveEngine(WebEngine):
    """The search service Brave Search. A result has a description and sometimes further snippets."""

    name = "brave"
    default_url = "https://api.search.brave.com/res/v1"
    key_variable = "BRAVE_API_KEY"

    def _make_headers(self, key: str) -> dict[str, str]:
        return {"X-Subscription-Token": key}

    def _request(self, query: str, n: int) -> Any:
        params = {"q": query, "count": n, "safesearch": ("off", "moderate", "strict")[self.options.safe]}
        if self.options.lang:
            params["search_lang"] = self.options.lang
        return self.client.request_json("GET", "/web/search", params=params)

    def _get_items(self, response: dict[str, Any]) -> Any:
        web = response.get("web", {"results": []})  # Brave leaves out "web" if there are no results.
        return web.get("results") if isinstance(web, dict) else None

    def _get_text(self, item: dict[str, Any]) -> Any:
        snippets = item.get("extra_snippets")
        extra = [snippet for snippet in snippets if isinstance(snippet, str)] if isinstance(snippets, list) else []
        return "\n".join([str(item.get("description") or ""), *extra])


def _is_valid_url(url: Any) -> bool:
    return isinstance(url, str) and len(url) <= MAX_URL_CHARS


def _make_result(item: Mapping[str, Any], text: Any) -> WebResult:
    """Convert an item of a response to a result. An implausible score becomes None."""
    score: float | None = None
    value = item.get("score")
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_SCORE:
        score = float(value)
    title = _remove_markup(item.get("title"), MAX_LABEL_CHARS)
    return WebResult(item["url"], title, _remove_markup(text, MAX_TEXT_CHARS), score)


def _remove_markup(markup: Any, max_chars: int) -> str:
    """Return HTML as one line of plain text of at most `max_chars`; '' for anything that is not a string."""
    if not isinstance(markup, str):
        return ""
    return " ".join(read_html(markup[: MAX_MARKUP_FACTOR * max_chars]).text.split())[:max_chars]


WEB_ENGINES: dict[str, type[WebEngine]] = {"searxng": SearxngEngine, "tavily": TavilyEngine, "brave": BraveEngine}
