"""What a search endpoint may answer: a list of passages, bare or under one of a few usual names.

    {"passages": [{"id": "42", "title": "Paris", "text": "Paris is ...", "score": 7.1}]}

`results`, `documents` or `hits` do as well as `passages`, `content` as well as `text`; only `text` is required.
Knows nothing of HTTP.
"""

from __future__ import annotations

from typing import Any

from knowgate.errors import ServerError
from knowgate.files import sha256_text
from knowgate.servers import one_line, parse_reply
from knowgate.types import Passage

LIST_NAMES = ("passages", "results", "documents", "hits")
TEXT_NAMES = ("text", "content")
LARGEST_SCORE = 1e30  # no measure of likeness is beyond; a whole number may be beyond any float
_EXPECTED = (
    f"Expected: a JSON list, or an object with one of {', '.join(LIST_NAMES)}, of objects with "
    f"{' or '.join(TEXT_NAMES)} and, if there are, id, title and score."
)


def read_reply(body: bytes, server: str) -> list[Passage]:
    """The passages of a reply, in its order."""
    shown = one_line(body[:80].decode(errors="replace"))
    try:
        value = parse_reply(body, "it")
    except ServerError as error:
        raise _nonsense(server, f"{str(error).rstrip('.')}: '{shown}'") from None
    items = value
    if isinstance(value, dict):
        items = next((value[name] for name in LIST_NAMES if name in value), None)
    if not isinstance(items, list):
        raise _nonsense(server, f"no list of passages: '{shown}'")
    return [_passage(item, number, server) for number, item in enumerate(items)]


def _passage(item: Any, number: int, server: str) -> Passage:
    if not isinstance(item, dict):
        raise _nonsense(server, f"passage {number} is not an object")
    text = next((item[name] for name in TEXT_NAMES if name in item), None)
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
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > LARGEST_SCORE:
        raise _nonsense(server, f"passage {number} has a score that is not a number: {one_line(repr(value))}")
    return float(value)


def _nonsense(server: str, problem: str) -> ServerError:
    return ServerError(f"{server} gave a reply that cannot be used: {problem}. {_EXPECTED}")
