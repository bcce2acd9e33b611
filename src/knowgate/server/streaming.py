"""How many tokens an answer took: as its usage says, else by its size. Knows bytes of replies and nothing more."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from knowgate.server.json_api import ApiError
from knowgate.server.telemetry.trace import RequestTrace

TOTAL_TOKENS = re.compile(rb'"total_tokens"\s*:\s*(\d{1,12})')
BYTES_PER_TOKEN = 4  # of an English token, about


def read_total_tokens(reply: bytes) -> int | None:
    """The total that a reply, or an event of a stream, gives; None where it gives none."""
    found = TOTAL_TOKENS.search(reply) if b'"total_tokens"' in reply else None
    return int(found.group(1)) if found else None


def guess_total_tokens(asked: int, answered: int = 0, events: int = 0) -> int:
    """By the bytes of the request and of a reply in one piece; each event of a stream is about a token."""
    return asked // BYTES_PER_TOKEN + answered // BYTES_PER_TOKEN + events


MAX_LINE_BYTES = 32 << 20
DONE_EVENT = b"data: [DONE]\n\n"
EVENT_TERMINATORS = (b"\n", b"\r\n")  # lines that end an event
COMPLETED_MARKERS = (
    b'"type":"response.completed"',
    b'"type": "response.completed"',
)  # of a stream of the Responses API
UNFINISHED_MARKERS = (b'"finish_reason":null', b'"finish_reason": null')


class LineTooLong(Exception):
    """A line without end."""


async def split_lines(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Each line with its end, as it was sent."""
    waiting = b""
    async for piece in pieces:
        waiting += piece
        if len(waiting) > MAX_LINE_BYTES:
            raise LineTooLong
        *whole, waiting = waiting.split(b"\n")
        for line in whole:
            yield line + b"\n"
    if waiting:
        yield waiting


async def chain_lines(begun: Iterable[bytes], rest: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The lines that were read already, then those that come."""
    for line in begun:
        yield line
    async for line in rest:
        yield line


def parse_event_data(line: bytes) -> dict[str, Any] | None:
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


def format_event(record: Any) -> bytes:
    return b"data: " + json.dumps(record, separators=(",", ":")).encode() + b"\n\n"


class StreamAnnotator:
    """Puts what became of a request into the first chunk of its stream and into those that end an answer.

    hides_logprobs: they were asked for by the gate, not by the client.
    """

    def __init__(self, trace: RequestTrace, *, hides_logprobs: bool = False):
        self.trace = trace
        self.hides_logprobs = hides_logprobs
        self.begun = False

    def amend(self, line: bytes) -> bytes:
        ends = b'"finish_reason"' in line and not any(mark in line for mark in UNFINISHED_MARKERS)
        ends = ends or any(mark in line for mark in COMPLETED_MARKERS)
        if self.begun and not ends and not self.hides_logprobs:
            return line
        chunk = parse_event_data(line)
        if chunk is None:
            return line
        if not self.begun or ends:
            chunk["knowgate"] = self.trace.record
            self.begun = True
        if self.hides_logprobs:
            remove_logprobs(chunk)
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n"


def remove_logprobs(reply: dict[str, Any]) -> None:
    """As if they had not been asked for."""
    for choice in reply.get("choices") or ():
        if isinstance(choice, dict) and "logprobs" in choice:
            choice["logprobs"] = None


Result = TypeVar("Result")
EVENT_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class ClientDisconnected(Exception):
    """The client is gone; there is nobody to answer."""


async def wait_for_disconnect(receive: Receive) -> None:
    """Until the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


class CancelOnDisconnect:
    """What is done inside is cancelled when the client hangs up, which comes out as HungUp. As `asyncio.timeout` does
    it: the work stays in its own task, only the listening gets one."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._has_gone = False

    async def __aenter__(self) -> None:
        working = asyncio.current_task()
        assert working is not None
        self._working, self._cancelling = working, working.cancelling()
        self._listening = asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        await wait_for_disconnect(self._receive)
        self._has_gone = True
        self._working.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._listening.cancel()
        if self._has_gone and self._working.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientDisconnected


async def run_while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work gives; it is cancelled if the client goes before."""
    async with CancelOnDisconnect(request.receive):
        return await work


class EventStreamResponse(Response):
    """Sends pieces until they end, the client hangs up or the time (`until`, of the loop's clock) is over."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], headers: Mapping[str, str], until: float):
        super().__init__(None, 200, {**EVENT_STREAM_HEADERS, **headers})
        del self.headers["content-length"]
        self.pieces = pieces
        self.until = until
        self.when_over: Callable[[], None] = lambda: None
        self.events = 0
        self.tokens: int | None = None  # as the stream says itself

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnected):
                async with CancelOnDisconnect(receive):
                    await self._pump(send)
        finally:
            await self.pieces.aclose()
            self.when_over()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout_at(self.until):
                async for piece in self.pieces:
                    self.events += 1
                    self.tokens = read_total_tokens(piece) or self.tokens
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError:
            late = ApiError(504, "the answer was not ready in time.", "deadline")
            await send({"type": "http.response.body", "body": format_event(late.record), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
