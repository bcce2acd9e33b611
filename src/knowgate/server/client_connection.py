"""Sends responses and event streams to clients, and notices when a client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from knowgate.server.json_api import ApiError
from knowgate.server.streaming import format_error_end, has_error

log = logging.getLogger(__name__)

Result = TypeVar("Result")
WATCH_DELAY_SECONDS = 0.05  # time from which on a request notices that its client disconnects
LAST_EVENTS_SECONDS = 1.0  # time for the error at the end of a stream, if the client reads slowly
ABORT_EXTENSION = "knowgate.abort"  # extension of the ASGI scope; its field `abort` is a function
EVENT_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class DisconnectError(Exception):
    """The client closed its connection, so a response can no longer be sent."""


class CancelOnDisconnect:
    """Context manager that cancels its body when the client disconnects. It then raises DisconnectError."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._is_disconnected = False
        self._watcher: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        """Start to watch the connection."""
        task = asyncio.current_task()
        assert task is not None
        self._body, self._earlier_cancellations = task, task.cancelling()
        # Most disconnects happen while an LLM answers. A task for each shorter request would cost a twentieth of its time.
        self._timer = asyncio.get_running_loop().call_later(WATCH_DELAY_SECONDS, self._start_watching)

    def _start_watching(self) -> None:
        self._watcher = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """Wait until the client disconnects, and then cancel the body."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_disconnected = True
        self._body.cancel()

    async def __aexit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        """Stop watching the connection. After a disconnect, raise DisconnectError instead of CancelledError."""
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = (
                None  # its error refers to this object, so the memory of the request could not be freed at once
            )
        if self._is_disconnected:
            remaining_cancellations = self._body.uncancel()  # without that of `_watch`
            is_only_cancellation = remaining_cancellations <= self._earlier_cancellations
            if is_only_cancellation and exception_type is asyncio.CancelledError:
                raise DisconnectError


async def run_while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, and cancel it if the client disconnects first.

    Raises:
        DisconnectError: The client disconnected.
    """
    async with CancelOnDisconnect(request.receive):
        return await work


class EventStreamResponse(Response):
    """Response that streams events. It ends with the last event, a disconnect or the deadline, then calls `on_close`.

    Attributes:
        error_status: The status that a whole response would have had after the error that ended the stream, or None.

    Args:
        events: Encoded server-sent events.
        headers: Headers in addition to those of an event stream.
        deadline: Time of the event loop's clock at which the stream ends with an error event.
    """

    error_status: int | None = None

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str], deadline: float):
        super().__init__(None, 200, {**EVENT_STREAM_HEADERS, **headers})
        del self.headers["content-length"]
        self.events = events
        self.deadline = deadline
        self.on_close: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Stop when the client disconnects or does not read the end."""
        try:
            with suppress(DisconnectError):
                async with CancelOnDisconnect(receive):
                    if error := await self._send_events(send):
                        self.error_status = error.status
                    await self._send_end(scope, send, error)
        finally:
            await self.events.aclose()
            self.on_close()

    async def _send_events(self, send: Send) -> ApiError | None:
        """Send the headers and the events. Return an error after the deadline or a failure."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout_at(self.deadline):
                async for event in self.events:
                    if has_error(event):
                        self.error_status = 502
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except TimeoutError:
            message = "the answer was not complete before the deadline of the server, so the stream ends here."
            return ApiError(504, message, "deadline")
        except (OSError, DisconnectError):
            raise
        except Exception:
            log.exception("A stream failed")
            return ApiError(500, "internal error, so the stream ends here. The server's log has details.", "internal")
        return None

    async def _send_end(self, scope: Scope, send: Send, error: ApiError | None) -> None:
        """Send the end of the stream, after any error. After an error, abort the connection of a client that does not read."""
        try:
            # Without an error, the client may read slowly. `connection_limits` closes its connection if it does not read.
            async with asyncio.timeout(None if error is None else LAST_EVENTS_SECONDS):
                if error is not None:
                    await send({"type": "http.response.body", "body": format_error_end(error), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            if ABORT_EXTENSION in scope.get("extensions", {}):
                scope["extensions"][ABORT_EXTENSION]["abort"]()
                await asyncio.sleep(0)  # uvicorn notices the end of the connection in the next turn of the event loop
            raise DisconnectError from None


async def reject_unstored(response: Response, headers: Mapping[str, str]) -> Response:
    """Discard a response whose decision could not be stored. Return the error that is sent instead."""
    if isinstance(response, EventStreamResponse):
        await response.events.aclose()  # the stream is never sent, so it must be closed here
    message = "the decision could not be stored, so the response is not sent. Try again later."
    return ApiError(503, message, "log_down", headers).to_response()


class HeaderBuffer:
    """Transport of a response that sends its headers together with the beginning of its body.

    Two small packets instead of one would cost the server and the client a tenth of their time.

    Attributes:
        holds: Whether the bytes that are written next are held back until further ones are written.
    """

    def __init__(self, transport: asyncio.Transport):
        self.holds = False
        self._transport = transport
        self._held = b""

    def write(self, data: bytes) -> None:
        """Send bytes after those that were held back, or hold them back. Do nothing if the connection is closed."""
        if self._transport.is_closing():
            return
        if self.holds:
            self._held = data
            return
        if self._held:
            self._transport.writelines([self._held, data])
            self._held = b""
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send bytes that were held back."""
        if self._held:
            self.write(b"")

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection after everything is sent."""
        self.flush()
        self._transport.close()
