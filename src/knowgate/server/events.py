"""A stream of server-sent events on its way through: lines in, lines out, the first and the last chunk amended.

What is neither the first nor the last goes on byte by byte as it came.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any

from knowgate.server.trace import Trace

LONGEST_LINE = 32 << 20
DONE = b"data: [DONE]\n\n"
ENDS = (b"\n", b"\r\n")  # lines that end an event
LAST = (b'"type":"response.completed"', b'"type": "response.completed"')  # of a stream of the Responses API
OPEN = (b'"finish_reason":null', b'"finish_reason": null')


class StreamTooLong(Exception):
    """A line without end."""


async def lines(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Each line with its end, as it was sent."""
    waiting = b""
    async for piece in pieces:
        waiting += piece
        if len(waiting) > LONGEST_LINE:
            raise StreamTooLong
        *whole, waiting = waiting.split(b"\n")
        for line in whole:
            yield line + b"\n"
    if waiting:
        yield waiting


async def chained(begun: Iterable[bytes], rest: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The lines that were read already, then those that come."""
    for line in begun:
        yield line
    async for line in rest:
        yield line


def data_of(line: bytes) -> dict[str, Any] | None:
    """The chunk that a line holds; None where it holds none."""
    if not line.startswith(b"data:"):
        return None
    text = line[5:].strip()
    if not text.startswith(b"{"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def event(record: Any) -> bytes:
    return b"data: " + json.dumps(record, separators=(",", ":")).encode() + b"\n\n"


class Amending:
    """Puts what became of a request into the first chunk of its stream and into those that end an answer.

    hides_logprobs: they were asked for by the gate, not by the client.
    """

    def __init__(self, trace: Trace, *, hides_logprobs: bool = False):
        self.trace = trace
        self.hides_logprobs = hides_logprobs
        self.begun = False

    def amend(self, line: bytes) -> bytes:
        ends = b'"finish_reason"' in line and not any(mark in line for mark in OPEN)
        ends = ends or any(mark in line for mark in LAST)
        if self.begun and not ends and not self.hides_logprobs:
            return line
        chunk = data_of(line)
        if chunk is None:
            return line
        if not self.begun or ends:
            chunk["knowgate"] = self.trace.record
            self.begun = True
        if self.hides_logprobs:
            hide_logprobs(chunk)
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n"


def hide_logprobs(reply: dict[str, Any]) -> None:
    """As if they had not been asked for."""
    for choice in reply.get("choices") or ():
        if isinstance(choice, dict) and "logprobs" in choice:
            choice["logprobs"] = None
