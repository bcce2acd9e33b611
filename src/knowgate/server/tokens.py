"""How many tokens an answer took: as its usage says, else by its size. Knows bytes of replies and nothing more."""

from __future__ import annotations

import re

TOTAL = re.compile(rb'"total_tokens"\s*:\s*(\d{1,12})')
BYTES = 4  # of an English token, about


def said(reply: bytes) -> int | None:
    """The total that a reply, or an event of a stream, gives; None where it gives none."""
    found = TOTAL.search(reply) if b'"total_tokens"' in reply else None
    return int(found.group(1)) if found else None


def guessed(asked: int, answered: int = 0, events: int = 0) -> int:
    """By the bytes of the request and of a reply in one piece; each event of a stream is about a token."""
    return asked // BYTES + answered // BYTES + events
