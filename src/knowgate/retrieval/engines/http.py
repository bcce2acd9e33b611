"""Use your own search engine behind an HTTP endpoint: `http:URL`, or just the URL.

By default, each query is sent by POST as JSON: {"query": ..., "k": ...}. If the URL contains {query} (and {k}), each
query is sent by GET: `http:https://search.example/api?q={query}&n={k}`. The response is a JSON list of passages, or an
object with such a list:

    {"passages": [{"id": "42", "title": "Paris", "text": "Paris is ...", "score": 7.1}]}

The list can also be named `results`, `documents` or `hits`, and the text `content`. Only the text is required.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from knowgate.core.files import sha256_text
from knowgate.core.http_client import JsonClient, parse_json_response, wait_for_turn
from knowgate.core.redaction import redact_message, redact_urls
from knowgate.core.text import replace_surrogates
from knowgate.errors import RejectionError
from knowgate.retrieval.passages import check_k, cut_query
from knowgate.types import Passage

LIST_FIELDS = ("passages", "results", "documents", "hits")
TEXT_FIELDS = ("text", "content")
EXCERPT_CHARS = 80  # of a response, in error messages
MAX_EXCERPT_BYTES = 2_000  # what is searched for keys before it is cut, so that no part of a key is left
MAX_BYTES, MAX_VALUES = 4 << 20, 250_000  # size and JSON values of a response
MAX_PASSAGES = 10_000  # of a response; the rest is not used
MAX_SCORE = 1e30  # JSON integers can be too large for a float; no real score is this large
_EXPECTED_FORMAT = (
    f"The response must be a JSON list of passages, or an object with such a list under {', '.join(LIST_FIELDS[:-1])} "
    f"or {LIST_FIELDS[-1]}. Each passage is an object with {' or '.join(TEXT_FIELDS)}, and optionally id, title and score."
)


class HttpRetriever:
    """Sends each query to a search endpoint over HTTP.

    Lost connections and the statuses 429 and 5xx are retried.

    Args:
        url: The address of the endpoint. It may contain {query} and {k}.
        deadline: The time limit for a query in seconds, including retries.
        pause: The time before the first retry in seconds.
        options: Other options of `JsonClient`, such as `headers` with an API key.
    """

    name = "http"

    def __init__(self, url: str, *, deadline: float = 10.0, pause: float = 0.2, **options: Any):
        self._url = url
        # Error messages show the URL without its parameters and login, which may be secret.
        public_url = redact_urls(url.partition("?")[0]).replace("***@", "")
        name = f"the search server {public_url}"
        advice = "Check its address, and the key if it needs one."
        self._server = JsonClient(
            url, name, advice=advice, deadline=deadline, pause=pause, max_bytes=MAX_BYTES, **options
        )

    @property
    def fingerprint(self) -> str:
        return sha256_text(self.name, self._url)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to k passages for each query, in the order of the server."""
        check_k(k)
        return self._server.map(lambda query: self._search(query, k), queries)

    def _search(self, query: str, k: int) -> list[Passage]:
        """Send one query and return up to k passages.

        The method is GET if the URL contains {query}, else POST.
        """
        query = replace_surrogates(cut_query(query))
        if "{query}" in self._url:
            url = self._url.replace("{k}", str(k)).replace("{query}", quote(query, safe=""))
            body = self._server.request_bytes("GET", url)
        else:
            body = self._server.request_bytes("POST", self._url, body={"query": query, "k": k})
        with wait_for_turn(body):  # until most passages are freed
            return parse_search_response(body, self._server.name, self._server.redact)[:k]


def parse_search_response(body: bytes, server: str, redact: Callable[[str], str] = redact_message) -> list[Passage]:
    """Return the passages in the response of a search server, in its order. Repeated ones are left out.

    Args:
        body: The body of the response: a JSON list of passages, or an object with such a list.
        server: A description of the server, for error messages.
        redact: Removes API keys from a text, because error messages show the beginning of the response.

    Raises:
        RejectionError: The response has another format.
    """
    try:
        value = parse_json_response(body, "it", MAX_VALUES)
        items = (value if isinstance(value, list) else _find_list(value))[:MAX_PASSAGES]
        passages = [_parse_passage(item, f"passage {number}") for number, item in enumerate(items)]
    except (RejectionError, ValueError) as error:
        excerpt = redact(body[:MAX_EXCERPT_BYTES].decode(errors="replace"))[:EXCERPT_CHARS]
        brief = f"{server} returned an invalid response: {str(error).rstrip('.')}"  # for logs, so without the excerpt
        raise RejectionError(f"{brief}: '{excerpt}'. {_EXPECTED_FORMAT}", brief=brief) from None
    unique: dict[tuple[str, str], Passage] = {}
    for passage in passages:
        unique.setdefault((passage.id, passage.text), passage)
    return list(unique.values())


def _find_list(value: Any) -> list[Any]:
    """Return the list of passages in an object; raise ValueError if there is none."""
    if isinstance(value, dict):
        for name in LIST_FIELDS:
            if isinstance(value.get(name), list):
                return list(value[name])
    raise ValueError("the response has no list of passages")


def _parse_passage(item: Any, name: str) -> Passage:
    """Convert one item of a response to a passage.

    The default id is a hash of the text.

    Args:
        item: The item, an object with a text and optionally an id, a title and a score.
        name: How an error names the item.

    Raises:
        ValueError: A field is missing or has the wrong type.
    """
    if not isinstance(item, dict):
        raise ValueError(f"{name} is not an object")
    text = next((item[field] for field in TEXT_FIELDS if field in item), None)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name} has no text")
    passage_id = item.get("id")
    title = item.get("title") or ""
    if not isinstance(title, str) or not isinstance(passage_id, str | int | None):
        raise ValueError(f"{name} has an id or title that is not a string")
    if passage_id is None or passage_id == "":
        passage_id = sha256_text(text)[:16]
    return Passage(str(passage_id), text, title, _parse_score(item.get("score"), name))


def _parse_score(score: Any, name: str) -> float | None:
    """Convert the score of the item `name` to a float; a missing score stays None."""
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, int | float) or abs(score) > MAX_SCORE:
        raise ValueError(f"{name} has a score that is not a number")
    return float(score)
