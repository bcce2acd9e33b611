"""Web search behind one name: `web:searxng@URL`, `web:tavily`, `web:brave`, or `web:replay@DIR` of what was recorded.

| option | meaning | default |
|---|---|---|
| lang | language of the results, such as en | the engine's |
| safe | safe search: 0 off, 1 moderate, 2 strict | 1 |
| minute, day | searches a minute and a day, at most; all processes together | 30, 1000 |
| days | how long a reply is kept; 0: not at all | 7 |
| stale | true: where the engine fails, an expired reply is used, and that is said | false |
| record | folder that keeps every reply, for web:replay@DIR | none |
| deadline | seconds of a search, all tries together | 10 |

Keys come from TAVILY_API_KEY and BRAVE_API_KEY. The id of a passage is its address: what was used can be cited. The web
changes under any fingerprint: a guarantee holds for a recording only.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx

from knowgate.core.files import cache_dir, file_lock, sha256_file, sha256_text, write_json
from knowgate.core.redaction import redact_message
from knowgate.core.schema import read_record
from knowgate.core.validation import check_integer, check_number, read_json
from knowgate.errors import BadInput, BadSetting, KnowgateError, ServerError
from knowgate.retrieval.engines.web_engines import WEB_ENGINES, SearchOptions, WebEngine, WebResult
from knowgate.retrieval.passages import check_k
from knowgate.types import Passage

MINUTE_SECONDS, DAY_SECONDS = 60.0, 86_400.0


class ResponseCache:
    """A folder of replies, each good for `seconds`."""

    def __init__(self, folder: Path, seconds: float):
        self._folder, self._seconds = folder, seconds

    def find(self, key: str, *, expired: bool = False) -> list[WebResult] | None:
        """None where there is none, or none that is still good. expired: those that are not do, too."""
        kept = _read(self._folder / f"{key}.json")
        if kept is None or not (expired or 0 <= time.time() - kept["at"] < self._seconds):
            return None
        return _results(kept)

    def keep(self, key: str, results: Sequence[WebResult]) -> None:
        if self._seconds > 0:
            _write(self._folder / f"{key}.json", {"at": time.time(), "results": [asdict(one) for one in results]})


class SearchRecording:
    """A folder of what was found for each query, for good."""

    def __init__(self, folder: Path):
        self._folder = folder

    def keep(self, query: str, results: Sequence[WebResult]) -> None:
        file = self._file(query)
        if not file.exists():
            _write(file, {"query": query, "at": time.time(), "results": [asdict(one) for one in results]})

    def find(self, query: str) -> list[WebResult]:
        kept = _read(self._file(query))
        if kept is None:
            raise BadInput(
                f"the recording '{self._folder}' holds nothing for '{query[:80]}': record it, "
                "--index 'web:ENGINE?record=DIR'."
            )
        return _results(kept)

    def digest(self) -> str:
        files = sorted(self._folder.glob("*.json"))
        return sha256_text(*(file.name for file in files), *(sha256_file(file) for file in files))

    def _file(self, query: str) -> Path:
        return self._folder / f"{sha256_text('query', query)[:32]}.json"


class SearchBudget:
    """So many searches a minute and a day, of all processes that share the file."""

    def __init__(self, file: Path, minute: int, day: int):
        self._file, self._minute, self._day = file, minute, day

    def spend(self, patience: float) -> None:
        """One search; waits for its turn as long as `patience` seconds, and says so where that is not enough."""
        end = time.monotonic() + patience
        while (wait := self._try()) > 0:
            if time.monotonic() + wait > end:
                raise ServerError(
                    f"the budget of {self._minute} searches a minute is spent; the next is due in {wait:.0f} s. Wait, "
                    "or raise it: ?minute=N"
                )
            time.sleep(wait)

    def _try(self) -> float:
        """Seconds until there is room; 0 where there was, and it is taken."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(self._file.with_suffix(".lock")):
            now = time.time()
            spent = [at for at in (_read(self._file) or {}).get("spent", []) if 0 <= now - at < DAY_SECONDS]
            if len(spent) >= self._day:
                raise ServerError(
                    f"the budget of {self._day:,} searches a day is spent. Wait until tomorrow, or raise it: ?day=N"
                )
            recent = [at for at in spent if now - at < MINUTE_SECONDS]
            if len(recent) >= self._minute:
                return float(MINUTE_SECONDS - (now - recent[-self._minute]))
            write_json(self._file, {"spent": [*spent, now]})
        return 0.0


def _read(file: Path) -> dict[str, Any] | None:
    try:
        kept = read_json(file)
    except (OSError, KnowgateError):
        return None
    usable = isinstance(kept, dict) and isinstance(kept.get("at", 0.0), int | float)
    numbers = kept.get("spent", []) if isinstance(kept, dict) else None
    spent = isinstance(numbers, list) and all(isinstance(at, int | float) for at in numbers)
    return kept if usable and spent else None


def _results(kept: dict[str, Any]) -> list[WebResult]:
    listed = kept.get("results")
    return [read_record(WebResult, one, "a kept result") for one in (listed if isinstance(listed, list) else [])]


def _write(file: Path, value: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, value)


MAX_RESULTS = 20  # results of one search; Brave gives no more
REPLAY_ENGINE = "replay"
SECONDS_PER_DAY = 86_400.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WebOptions:
    """What stands after the question mark."""

    lang: str = ""
    safe: int = 1
    minute: int = 30
    day: int = 1000
    days: float = 7.0
    stale: bool = False
    record: str = ""
    deadline: float = 10.0

    def __post_init__(self) -> None:
        if self.lang and not re.fullmatch(r"[A-Za-z]{2,3}(-[A-Za-z]{2,4})?", self.lang):
            raise BadSetting(f"lang is '{redact_message(self.lang[:20])}'; it must be a language such as en or zh-CN.")
        check_integer(self.safe, "safe", minimum=0, maximum=2)
        check_integer(self.minute, "minute")
        check_integer(self.day, "day")
        check_number(self.days, "days", maximum=3650)
        check_number(self.deadline, "deadline", minimum=0.1, maximum=600)


def open_web(value: str) -> WebRetriever | WebReplayRetriever:
    """`ENGINE[@URL][?options]`."""
    place, _, query = value.partition("?")
    name, _, at = place.partition("@")
    options = parse_web_options(query)
    if name == REPLAY_ENGINE:
        return WebReplayRetriever(at)
    if name not in WEB_ENGINES:
        raise BadSetting(
            f"web search by '{redact_message(name[:40])}' is not known; allowed: {', '.join([*WEB_ENGINES, REPLAY_ENGINE])}."
        )
    return WebRetriever(name, at, options)


def parse_web_options(query: str) -> WebOptions:
    """Options by name, each a value of its kind."""
    kinds = {one.name: type(one.default) for one in fields(WebOptions)}
    given: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in kinds:
            raise BadSetting(f"'web:' has no option '{redact_message(key[:40])}'. Known options: {', '.join(kinds)}.")
        given[key] = _value(key, text, kinds[key])
    return WebOptions(**given)


def _value(key: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise BadSetting(f"{key} is '{redact_message(text[:40])}'; allowed: true, false.")
        return text == "true"
    try:
        return kind(text)
    except ValueError:
        raise BadSetting(f"{key} is '{redact_message(text[:40])}'; it must be a number.") from None


class WebRetriever:
    """Asks one engine, within a budget; replies are kept on disk for a while. cache: where, instead of knowgate's own
    cache folder."""

    name = "web"

    def __init__(
        self,
        engine: str,
        url: str = "",
        options: WebOptions | None = None,
        *,
        cache: Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ):
        self.options = options or WebOptions()
        self.engine: WebEngine = WEB_ENGINES[engine](url, self.options.deadline, transport)
        folder = cache or cache_dir() / "web"
        self._wish = SearchOptions(self.options.lang, self.options.safe)
        self._replies = ResponseCache(folder / "replies", self.options.days * SECONDS_PER_DAY)
        self._recording = SearchRecording(Path(self.options.record)) if self.options.record else None
        self._budget = SearchBudget(folder / f"{engine}-budget.json", self.options.minute, self.options.day)

    @property
    def fingerprint(self) -> str:
        """Of engine, address and wishes. What the web says today is no part of it: it would never hold."""
        return sha256_text("web", self.engine.name, self.engine.url, repr(self._wish))

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        asked = list(dict.fromkeys(_tidy(query) for query in queries))
        found = dict(zip(asked, self.engine.each(lambda query: self._search(query, k), asked), strict=True))
        return [found[_tidy(query)] for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        if not query:
            return []
        n = min(max(k, 10), MAX_RESULTS)  # whoever asks for 3 and then for 10 is answered from one reply
        key = sha256_text(self.fingerprint, query, str(n))
        results = self._replies.find(key)
        if results is None:
            results = self._ask(key, query, n)
        if self._recording is not None:
            self._recording.keep(query, results)
        return convert_results(results)[:k]

    def _ask(self, key: str, query: str, n: int) -> list[WebResult]:
        try:
            self._budget.spend(self.options.deadline)
            results = self.engine.search(query, n, self._wish)
        except ServerError as error:
            old = self._replies.find(key, expired=True) if self.options.stale else None
            if old is None:
                raise
            logger.warning("Web search failed, so an expired reply is used: %s", error)
            return old
        self._replies.keep(key, results)
        return results


class WebReplayRetriever:
    """What an earlier run found: nothing is asked of anybody, and the fingerprint is that of the recording."""

    name = "web"

    def __init__(self, folder: str):
        if not folder or not Path(folder).is_dir():
            raise BadSetting(
                f"there is no recording at '{redact_message(folder)}'. Make one: --index 'web:ENGINE?record=DIR'"
            )
        self._recording = SearchRecording(Path(folder))

    @property
    def fingerprint(self) -> str:
        return sha256_text("web replay", self._recording.digest())

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        return [convert_results(self._recording.find(_tidy(query)))[:k] if _tidy(query) else [] for query in queries]


def convert_results(results: Sequence[WebResult]) -> list[Passage]:
    """Results with a text, each page and each text once; the address is the id."""
    seen: set[str] = set()
    kept = []
    for one in results:
        page, text = _page(one.url), " ".join(one.text.split())
        if not text or page in seen or text in seen:
            continue
        seen |= {page, text}
        kept.append(Passage(one.url, text, one.title, one.score))
    return kept


def _page(url: str) -> str:
    """Two addresses of one page are the same: without scheme, www, fragment, tracking and last slash."""
    parts = urlsplit(url)
    pairs = [pair for pair in parse_qsl(parts.query) if not pair[0].startswith(("utm_", "fbclid", "gclid"))]
    return f"{parts.netloc.lower().removeprefix('www.')}{parts.path.rstrip('/')}?{sorted(pairs)}"


def _tidy(query: str) -> str:
    return " ".join(query.encode("utf-8", "replace").decode().replace("\0", " ").split())
