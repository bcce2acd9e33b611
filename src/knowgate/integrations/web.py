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
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx

from knowgate.doors import check_whole, check_within
from knowgate.errors import BadSetting, ServerError
from knowgate.files import cache_dir, sha256_text
from knowgate.integrations.web_engines import ENGINES, Engine, Result, Wish
from knowgate.integrations.web_store import Budget, Recording, Replies
from knowgate.retrieval import check_k
from knowgate.servers import one_line
from knowgate.types import Passage

MOST = 20  # results of one search; Brave gives no more
REPLAY = "replay"
DAY = 86_400.0
log = logging.getLogger(__name__)


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
            raise BadSetting(f"lang is '{one_line(self.lang[:20])}'; it must be a language such as en or zh-CN.")
        check_whole(self.safe, "safe", least=0, most=2)
        check_whole(self.minute, "minute")
        check_whole(self.day, "day")
        check_within(self.days, "days", most=3650)
        check_within(self.deadline, "deadline", least=0.1, most=600)


def open_web(value: str) -> WebRetriever | ReplayedWeb:
    """`ENGINE[@URL][?options]`."""
    place, _, query = value.partition("?")
    name, _, at = place.partition("@")
    options = read_options(query)
    if name == REPLAY:
        return ReplayedWeb(at)
    if name not in ENGINES:
        raise BadSetting(
            f"web search by '{one_line(name[:40])}' is not known; allowed: {', '.join([*ENGINES, REPLAY])}."
        )
    return WebRetriever(name, at, options)


def read_options(query: str) -> WebOptions:
    """Options by name, each a value of its kind."""
    kinds = {one.name: type(one.default) for one in fields(WebOptions)}
    given: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in kinds:
            raise BadSetting(f"'web:' has no option '{one_line(key[:40])}'. Known options: {', '.join(kinds)}.")
        given[key] = _value(key, text, kinds[key])
    return WebOptions(**given)


def _value(key: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise BadSetting(f"{key} is '{one_line(text[:40])}'; allowed: true, false.")
        return text == "true"
    try:
        return kind(text)
    except ValueError:
        raise BadSetting(f"{key} is '{one_line(text[:40])}'; it must be a number.") from None


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
        self.engine: Engine = ENGINES[engine](url, self.options.deadline, transport)
        folder = cache or cache_dir() / "web"
        self._wish = Wish(self.options.lang, self.options.safe)
        self._replies = Replies(folder / "replies", self.options.days * DAY)
        self._recording = Recording(Path(self.options.record)) if self.options.record else None
        self._budget = Budget(folder / f"{engine}-budget.json", self.options.minute, self.options.day)

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
        n = min(max(k, 10), MOST)  # whoever asks for 3 and then for 10 is answered from one reply
        key = sha256_text(self.fingerprint, query, str(n))
        results = self._replies.find(key)
        if results is None:
            results = self._ask(key, query, n)
        if self._recording is not None:
            self._recording.keep(query, results)
        return passages(results)[:k]

    def _ask(self, key: str, query: str, n: int) -> list[Result]:
        try:
            self._budget.spend(self.options.deadline)
            results = self.engine.search(query, n, self._wish)
        except ServerError as error:
            old = self._replies.find(key, expired=True) if self.options.stale else None
            if old is None:
                raise
            log.warning("Web search failed, so an expired reply is used: %s", error)
            return old
        self._replies.keep(key, results)
        return results


class ReplayedWeb:
    """What an earlier run found: nothing is asked of anybody, and the fingerprint is that of the recording."""

    name = "web"

    def __init__(self, folder: str):
        if not folder or not Path(folder).is_dir():
            raise BadSetting(
                f"there is no recording at '{one_line(folder)}'. Make one: --index 'web:ENGINE?record=DIR'"
            )
        self._recording = Recording(Path(folder))

    @property
    def fingerprint(self) -> str:
        return sha256_text("web replay", self._recording.digest())

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_k(k)
        return [passages(self._recording.find(_tidy(query)))[:k] if _tidy(query) else [] for query in queries]


def passages(results: Sequence[Result]) -> list[Passage]:
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
