"""Server-sent events as LLM servers send them: bytes in, the data of each event out. Knows nothing of what is in them.

Every server writes an event's data on one line, so a line is an event; some leave out the blank line after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

DONE = "[DONE]"


def read_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The data of each event; a reply that is no stream but one JSON value is one event.

    Comments, which keep a connection alive, and fields that say nothing to us are passed over. `error:` is what
    llama.cpp wrote until autumn 2025 where others write data with an error in it.
    """
    for line in _lines(chunks):
        name, _, value = line.partition(":")
        if line.startswith(("{", "[")):
            yield line
        elif name == "data" and value.strip():
            yield value.strip()
        elif name == "error":
            yield json.dumps({"error": value.strip()})


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines end in LF or CR LF; other line ends of Unicode are part of a text. A reply that is JSON is not cut."""
    waiting, is_json = b"", None
    for chunk in chunks:
        waiting += chunk
        if is_json is None and waiting.strip():
            is_json = waiting.lstrip()[:1] in (b"{", b"[")
        if not is_json:
            *lines, waiting = waiting.split(b"\n")
            yield from (_text(line) for line in lines)
    yield _text(waiting.strip())


def _text(line: bytes) -> str:
    return line.decode(errors="replace").removesuffix("\r")
