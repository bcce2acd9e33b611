"""HTTP connections with limits on the size, number and time of headers, and on connections per client address.

Uvicorn itself reads headers of any size, for any time. These limits hold before a request is authenticated.
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEADER_BYTES = 32 << 10  # request line and headers together
MAX_HEADERS = 100
HEADER_SECONDS = 10.0  # maximum time from the first byte of a request to the end of its headers
WRITE_SECONDS = 60.0  # maximum time in which a client reads nothing of its response
MAX_CONNECTIONS_PER_ADDRESS = 512
MAX_WAITING_PER_ADDRESS = 64  # connections that wait for headers; above this number, old ones are closed
MIN_EVICTION_SECONDS = 1.0  # connections younger than this are not closed to make room for others


class AnnouncedServer(uvicorn.Server):
    """A server of uvicorn that calls a function when it accepts requests.

    Args:
        config: Options of uvicorn.
        on_start: The function.
    """

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]):
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server, and call the function if that succeeded."""
        await super().startup(sockets)
        if self.started:
            self._on_start()


class AddressConnections:
    """The open connections of one client address."""

    def __init__(self) -> None:
        self.count = 0
        self.waiting: dict[LimitedHttpProtocol, float] = {}  # connections without complete headers -> since when

    def evict(self, now: float) -> None:
        """Close the oldest connection that waits for headers, if there are too many of them."""
        if len(self.waiting) <= MAX_WAITING_PER_ADDRESS:
            return
        oldest, since = next(iter(self.waiting.items()))
        if now - since >= MIN_EVICTION_SECONDS:
            self.waiting.pop(oldest)
            oldest.transport.abort()


class LimitedHttpProtocol(HttpToolsProtocol):
    """The HTTP protocol of uvicorn, with limits."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._header_bytes = 0  # received since the time limit for headers started
        self._parsed_bytes = 0  # of the request line, headers and trailers of the current request
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._address = ""
        # All connections of a server process share its state, so the connections by address are stored there.
        shared = vars(self.server_state)
        self._addresses: defaultdict[str, AddressConnections] = shared.setdefault(
            "addresses", defaultdict(AddressConnections)
        )

    # --- connections ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        connections = self._addresses[self._address]
        connections.count += 1
        connections.evict(self.loop.time())
        if connections.count > MAX_CONNECTIONS_PER_ADDRESS:
            transport.abort()
            return
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_timer("_write_timer")
        connections = self._addresses[self._address]
        connections.count -= 1
        if not connections.count:
            del self._addresses[self._address]
        super().connection_lost(exc)

    # --- headers ----------------------------------------------------------------------------------

    def _wait_for_headers(self) -> None:
        """Start the time limit for headers, and count their bytes from zero."""
        if self._header_timer is None:
            self._header_bytes = 0
            self._addresses[self._address].waiting[self] = self.loop.time()
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._on_header_timeout)

    def _stop_waiting(self) -> None:
        """Stop the time limit for headers."""
        self._addresses[self._address].waiting.pop(self, None)
        self._stop_timer("_header_timer")

    def _on_header_timeout(self) -> None:
        if (
            self.cycle is not None and not self.cycle.response_complete
        ):  # a client that sends its next request too early
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._on_header_timeout)
            return
        self._reject(408, f"The headers did not arrive within {HEADER_SECONDS:g} seconds.")

    def data_received(self, data: bytes) -> None:
        is_between_requests = self.cycle is None or not self.cycle.more_body
        if is_between_requests:
            self._wait_for_headers()
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_timer is not None and self._header_bytes > MAX_HEADER_BYTES:
            self._reject_large_headers()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # otherwise the request has already been rejected
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        self._parsed_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_parsed(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} headers")  # uvicorn answers 400 and closes the connection
        self._count_parsed(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count_parsed(self, size: int) -> None:
        """Count bytes of headers as they are parsed, because complete headers may arrive in one large piece."""
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEADER_BYTES:
            self._reject_large_headers()
            raise ValueError("the headers are too large")  # stops the parser

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def _reject_large_headers(self) -> None:
        self._reject(431, f"The headers exceed {MAX_HEADER_BYTES:,} bytes.")

    def _reject(self, status: int, message: str) -> None:
        """Answer with an error, if no response is being sent, and close the connection."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            head = f"content-type: text/plain\r\ncontent-length: {len(message)}\r\nconnection: close\r\n\r\n{message}"
            self.transport.write(STATUS_LINE[status] + head.encode())
        self.transport.close()

    # --- responses --------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("_write_timer")

    def _stop_timer(self, name: str) -> None:
        timer: asyncio.TimerHandle | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)
