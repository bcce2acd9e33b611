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
    """Lines end in LF or CR LF; other line ends of Unicode are part of a text. A reply that is JSON is not cut.

    What waits for its end is kept in pieces: joining it again for every piece would take for ever on a long line.
    """
    waiting: list[bytes] = []
    is_json = None
    for chunk in chunks:
        if is_json is None and chunk.strip():
            is_json = chunk.lstrip()[:1] in (b"{", b"[")
        first, *rest = [chunk] if is_json else chunk.split(b"\n")
        waiting.append(first)
        for start in rest:
            yield _text(b"".join(waiting))
            waiting = [start]
    yield _text(b"".join(waiting).strip())


def _text(line: bytes) -> str:
    return line.decode(errors="replace").removesuffix("\r")
