"""Replies that come piece by piece, and clients that go away: whoever hangs up stops the work done for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from knowgate.server.events import event
from knowgate.server.problems import Problem
from knowgate.server.tokens import said

Result = TypeVar("Result")
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class HungUp(Exception):
    """The client is gone; there is nobody to answer."""


async def gone(receive: Receive) -> None:
    """Until the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Connected:
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
        await gone(self._receive)
        self._has_gone = True
        self._working.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._listening.cancel()
        if self._has_gone and self._working.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise HungUp


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work gives; it is cancelled if the client goes before."""
    async with Connected(request.receive):
        return await work


class Streamed(Response):
    """Sends pieces until they end, the client hangs up or the time (`until`, of the loop's clock) is over."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], headers: Mapping[str, str], until: float):
        super().__init__(None, 200, {**EVENTS, **headers})
        del self.headers["content-length"]
        self.pieces = pieces
        self.until = until
        self.when_over: Callable[[], None] = lambda: None
        self.events = 0
        self.tokens: int | None = None  # as the stream says itself

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(HungUp):
                async with Connected(receive):
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
                    self.tokens = said(piece) or self.tokens
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError:
            late = Problem(504, "the answer was not ready in time.", "deadline")
            await send({"type": "http.response.body", "body": event(late.record), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
