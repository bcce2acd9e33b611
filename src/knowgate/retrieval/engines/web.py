"""Web search: `web:searxng@URL`, `web:tavily`, `web:brave`, or `web:replay@DIR` for recorded searches.

Options follow a question mark (see `WebOptions`). API keys are read from the environment variables TAVILY_API_KEY and
BRAVE_API_KEY. The id of a passage is its URL, so that answers can cite it. The fingerprint cannot detect changes of the
web, so a guarantee holds only for recorded searches.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl, urlsplit

import httpx

from knowgate.core.files import cache_dir, file_lock, sha256_file, sha256_text, write_json
from knowgate.core.limited_log import LimitedLog
from knowgate.core.options import read_options
from knowgate.core.redaction import redact_message
from knowgate.core.schema import read_record
from knowgate.core.validation import read_json
from knowgate.errors import BadInput, BadSetting, KnowgateError, ServerError, get_brief
from knowgate.retrieval.engines.web_engines import WEB_ENGINES, WebOptions, WebResult
from knowgate.retrieval.passages import check_k
from knowgate.types import Passage

MAX_RESULTS = 20  # maximum results of one search; Brave returns no more
MIN_RESULTS = 10  # results requested even for a smaller k, so that a later search with a larger k can use the cache
REPLAY_ENGINE = "replay"  # the name in a spec that returns recorded searches instead of searching
MINUTE_SECONDS, DAY_SECONDS = 60.0, 86_400.0
TRACKING_PARAMETERS = ("utm_", "fbclid", "gclid")  # URL parameters with these prefixes do not change the page
Record = TypeVar("Record")


def open_web(value: str) -> WebRetriever | WebReplayRetriever:
    """Create a web retriever from a spec `ENGINE[@URL][?options]`, or `replay@DIR` for recorded searches.

    Raises:
        BadSetting: The engine or an option is unknown, or an address or API key is missing.
    """
    engine_and_url, _, query = value.partition("?")
    name, _, url = engine_and_url.partition("@")
    options = parse_web_options(query)
    if name == REPLAY_ENGINE:
        return WebReplayRetriever(url)
    if name not in WEB_ENGINES:
        known = ", ".join([*WEB_ENGINES, REPLAY_ENGINE])
        raise BadSetting(f"unknown web search engine '{redact_message(name[:40])}'. Use one of: {known}.")
    return WebRetriever(name, url, options)


def parse_web_options(query: str) -> WebOptions:
    """Parse the options of a web search spec, such as `lang=en&days=0.5`."""
    return read_options(WebOptions, dict(parse_qsl(query, keep_blank_values=True)), "web search")


class SearchBudgetError(ServerError):
    """The maximum number of searches per minute or per day is reached. The search engine itself has not failed."""


class WebRetriever:
    """Searches the web with one search engine.

    Responses are cached on disk. Searches per minute and per day are limited.

    Args:
        engine: The name of the engine: `searxng`, `tavily` or `brave`.
        url: The address of the engine, or '' for its default address.
        options: Language, limits, cache and recording.
        transport: An httpx transport that replaces the network in tests.

    Attributes:
        budget_seconds: Maximum seconds to wait if the maximum number of searches per minute is reached.
    """

    name = "web"

    def __init__(self, engine: str, url: str, options: WebOptions, transport: httpx.BaseTransport | None = None):
        self.options = options
        folder = cache_dir() / "web"
        self._budget = SearchBudget(folder / f"{engine}-budget.json", options.minute, options.day)
        self.engine = WEB_ENGINES[engine](url, options, transport)
        self.engine.client.allow_retry = self._budget.try_spend
        self._cache = ResultFolder(folder / "replies", options.days * DAY_SECONDS)
        self._recording = ResultFolder(Path(options.record)) if options.record else None
        self.budget_seconds = options.deadline
        self._log = LimitedLog(logging.getLogger(__name__))

    @property
    def fingerprint(self) -> str:
        """A hash of the engine, its address, the language and safe search. It cannot detect changes of the web."""
        # This text must never change, because existing fingerprints were computed with it.
        settings = f"Wish(lang={self.options.lang!r}, safe={self.options.safe})"
        return sha256_text("web", self.engine.name, self.engine.client.url, settings)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to k passages for each query, best first.

        Equal queries are sent only once.
        """
        check_k(k)
        normalized = [_normalize_query(query) for query in queries]
        distinct = list(dict.fromkeys(normalized))
        results = self.engine.client.map(lambda query: self._search(query, k), distinct)
        passages = dict(zip(distinct, results, strict=True))
        return [passages[query] for query in normalized]

    def only_cached(self) -> WebRetriever:
        """Return a retriever that uses only the cache.

        Queries not in the cache raise SearchBudgetError.
        """
        other = copy.copy(self)
        # With `stale`, an expired response would be used instead of raising SearchBudgetError.
        other.options = self.options.model_copy(update={"stale": False})
        other._budget = SearchBudget(self._budget.file, per_minute=0, per_day=0)  # allows no search
        return other

    def delete_expired(self) -> None:
        """Delete expired responses from the cache.

        With the option `stale`, they are kept for failures of the engine.
        """
        if not self.options.stale:
            self._cache.delete_expired()

    def _search(self, query: str, k: int) -> list[Passage]:
        """Search for one query, using the cache if possible, and optionally record the results."""
        if not query:
            return []
        n = min(max(k, MIN_RESULTS), MAX_RESULTS)
        key = sha256_text(self.fingerprint, query, str(n))
        results = self._cache.find(key)
        if results is None:
            results = self._request(key, query, n)
        recording_key = _make_recording_key(query)
        if self._recording is not None and self._recording.find(recording_key) is None:
            self._recording.add(recording_key, results, query=query)
        return convert_results(results)[:k]

    def _request(self, key: str, query: str, n: int) -> list[WebResult]:
        """Ask the engine for n results and cache them.

        With the option `stale`, an expired response replaces a failed search.
        """
        try:
            self._budget.spend(self.budget_seconds)
            results = self.engine.search(query, n)
        except ServerError as error:
            expired = self._cache.find(key, expired=True) if self.options.stale else None
            if expired is None:
                raise
            self._log.write("Web search failed, using an expired response: %s", get_brief(error))
            return expired
        self._cache.add(key, results)
        return results


class WebReplayRetriever:
    """Returns the results of recorded web searches, without using the network.

    The fingerprint covers all recorded results.

    Args:
        folder: The folder that an earlier search wrote with the option `record`.

    Raises:
        BadSetting: The folder does not exist.
    """

    name = "web"

    def __init__(self, folder: str):
        if not folder or not Path(folder).is_dir():
            raise BadSetting(
                f"there is no folder of recorded web searches at '{redact_message(folder)}'. Record searches with "
                "web:ENGINE?record=DIR."
            )
        self._folder = folder
        self._recording = ResultFolder(Path(folder))

    @property
    def fingerprint(self) -> str:
        return sha256_text("web replay", self._recording.compute_digest())

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to k recorded passages for each query."""
        check_k(k)
        return [convert_results(self._find(_normalize_query(query)))[:k] for query in queries]

    def _find(self, query: str) -> list[WebResult]:
        """Return the recorded results of one query; raise BadInput if it was not recorded."""
        if not query:
            return []
        key = _make_recording_key(query)
        results = self._recording.find(key, expired=True)
        if results is None:
            raise BadInput(
                f"the recording '{self._folder}' contains no search for '{query[:80]}'. Record it with web:ENGINE?record=DIR.",
                brief=f"the recording '{self._folder}' contains no file {key}.json, so this question was not recorded",
            )
        return results


def convert_results(results: Sequence[WebResult]) -> list[Passage]:
    """Convert web results to passages; skip results without text, repeated pages and repeated texts."""
    seen: set[str] = set()
    passages = []
    for result in results:
        page = _normalize_url(result.url)
        text = " ".join(result.text.split())
        if not text or page in seen or text in seen:
            continue
        seen |= {page, text}
        passages.append(Passage(result.url, text, result.title, result.score))
    return passages


def _normalize_url(url: str) -> str:
    """Return the same key for all usual spellings of a page's URL.

    Example: "http://www.a.de/b/#c" and "https://a.de/b" are equal.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    host = parts.netloc.lower().removeprefix("www.")
    path = parts.path.rstrip("/")
    parameters = [pair for pair in parse_qsl(parts.query) if not pair[0].startswith(TRACKING_PARAMETERS)]
    return f"{host}{path}?{sorted(parameters)}"


def _normalize_query(query: str) -> str:
    """Return a query with single spaces and without characters that JSON or UTF-8 cannot represent."""
    return " ".join(query.encode("utf-8", "replace").decode().replace("\0", " ").split())


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredSearch:
    """The stored results of a search.

    Args:
        at: The time of the search, in seconds since 1970.
        results: The results, best first.
    """

    at: float
    results: tuple[WebResult, ...] = ()


@dataclass(frozen=True)
class SpentBudget:
    """The contents of a `SearchBudget` file.

    Args:
        spent: The times of the searches of the last day, in seconds since 1970.
    """

    spent: tuple[float, ...] = ()


def _read_file(kind: type[Record], file: Path) -> Record | None:
    """Read a JSON file into a record, or return None if this fails."""
    try:
        return read_record(kind, read_json(file), file.name, ignore_unknown=True)
    except (OSError, KnowgateError):
        return None


class ResultFolder:
    """A folder that stores the results of web searches, one file per search. A damaged file counts as missing.

    Args:
        folder: The folder.
        max_age: The age in seconds at which results expire. With 0, nothing is stored.
    """

    def __init__(self, folder: Path, max_age: float = math.inf):
        self._folder = folder
        self._max_age = max_age

    def find(self, key: str, *, expired: bool = False) -> list[WebResult] | None:
        """Return the stored results of a search, or None if missing or expired.

        Args:
            key: The name of the file.
            expired: Whether to return expired results, too.
        """
        search = _read_file(StoredSearch, self._folder / f"{key}.json")
        if search is None:
            return None
        is_fresh = 0 <= time.time() - search.at < self._max_age
        return list(search.results) if is_fresh or expired else None

    def add(self, key: str, results: Sequence[WebResult], **fields: str) -> None:
        """Store the results of a search.

        Args:
            key: The name of the file.
            results: The results.
            fields: More fields for people who read the file, such as the query.
        """
        if self._max_age > 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            record = {**fields, "at": time.time(), "results": [asdict(result) for result in results]}
            write_json(self._folder / f"{key}.json", record)

    def delete_expired(self) -> None:
        """Delete the files of expired results."""
        oldest = time.time() - self._max_age
        for file in self._folder.glob("*.json"):
            with suppress(OSError):  # another process may have deleted the file
                if file.stat().st_mtime < oldest:
                    file.unlink()

    def compute_digest(self) -> str:
        """Return a hash of the names and contents of all files."""
        files = sorted(self._folder.glob("*.json"))
        return sha256_text(*(file.name for file in files), *(sha256_file(file) for file in files))


def _make_recording_key(query: str) -> str:
    """Return the file name of a recorded search, which depends only on the query."""
    return sha256_text("query", query)[:32]


class SearchBudget:
    """Limits the searches per minute and per day, across all processes sharing a file.

    Args:
        file: The file with the times of the searches of the last day.
        per_minute: The maximum number of searches per minute.
        per_day: The maximum number of searches in 24 hours.
    """

    def __init__(self, file: Path, per_minute: int, per_day: int):
        self.file = file
        self._per_minute = per_minute
        self._per_day = per_day

    def spend(self, timeout: float) -> None:
        """Count one search. If the limit per minute is reached, wait first, up to `timeout` seconds.

        Raises:
            SearchBudgetError: The limit per day is reached, or the wait would exceed `timeout`.
        """
        end = time.monotonic() + timeout
        while (wait := self._spend_or_get_wait()) > 0:
            if time.monotonic() + wait > end:
                raise SearchBudgetError(
                    f"the budget of {self._per_minute} searches per minute is used up. The next search is possible in "
                    f"{wait:.0f} s. Wait, or raise the limit: web:ENGINE?minute=N"
                )
            time.sleep(wait)

    def try_spend(self) -> bool:
        """Count one search if the limits allow it now, and return whether they do."""
        try:
            return self._spend_or_get_wait() == 0
        except SearchBudgetError:
            return False

    def _spend_or_get_wait(self) -> float:
        """Count one search and return 0. If the limit per minute is reached, return the seconds to wait instead.

        Raises:
            SearchBudgetError: The limit per day is reached.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(self.file.with_suffix(".lock")):
            now = time.time()
            times = self._read_times(now)
            if len(times) >= self._per_day:
                raise SearchBudgetError(
                    f"the budget of {self._per_day:,} searches per day is used up. Wait until tomorrow, or raise the limit: "
                    "web:ENGINE?day=N"
                )
            wait = self._compute_wait(times, now)
            if wait == 0:
                write_json(self.file, {"spent": [*times, now]})
        return wait

    def _compute_wait(self, times: Sequence[float], now: float) -> float:
        """Return the seconds until the limit per minute allows another search, or 0 if it allows one now."""
        last_minute = [at for at in times if now - at < MINUTE_SECONDS]
        if len(last_minute) < self._per_minute:
            return 0.0
        # A search is possible again when the oldest of the last `per_minute` searches is a minute old.
        return MINUTE_SECONDS - (now - last_minute[-self._per_minute])

    def _read_times(self, now: float) -> list[float]:
        """Read the times of the last day's searches. Times in the future are corrected in the file."""
        budget = _read_file(SpentBudget, self.file) or SpentBudget()
        times = sorted(min(at, now) for at in budget.spent if now - at < DAY_SECONDS)
        if any(at > now for at in budget.spent):  # The clock was set back, so searches ahead of it count from now on.
            write_json(self.file, {"spent": times})
        return times
