"""Replies that come piece by piece, and clients that go away: whoever hangs up stops the work done for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from knowgate.server.events import event
from knowgate.server.problems import Problem

Result = TypeVar("Result")
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class HungUp(Exception):
    """The client is gone; there is nobody to answer."""


async def gone(receive: Receive) -> None:
    """Until the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work gives; it is cancelled if the client goes before."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HungUp
        return working.result()
    finally:
        await _end(working, listening)


class Streamed(Response):
    """Sends pieces until they end, the client hangs up or the time (`until`, of the loop's clock) is over."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], headers: Mapping[str, str], until: float):
        super().__init__(None, 200, {**EVENTS, **headers})
        del self.headers["content-length"]
        self.pieces = pieces
        self.until = until
        self.when_over: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pumping = asyncio.ensure_future(self._pump(send))
        listening = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({pumping, listening}, return_when=asyncio.FIRST_COMPLETED)
            if pumping.done():
                pumping.result()
        finally:
            await _end(pumping, listening)
            await self.pieces.aclose()
            self.when_over()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout_at(self.until):
                async for piece in self.pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError:
            late = Problem(504, "the answer was not ready in time.", "deadline")
            await send({"type": "http.response.body", "body": event(late.record), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
