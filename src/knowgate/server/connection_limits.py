"""HTTP connections with limits on headers, on queued requests, and on connections per client address.

Uvicorn itself reads headers of any size, for any time, and queues any number of requests of a connection. These limits
hold before a request is authenticated.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from functools import partial
from typing import Any

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from knowgate.core.limited_log import LimitedLog
from knowgate.server.client_connection import ABORT_EXTENSION, HeaderBuffer

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 32 << 10  # request line and headers together
MAX_HEADERS = 100
MAX_SMALL_CHUNKS = 1024  # chunks of a body beyond one for every CHUNK_BYTES; parsing each one takes time
CHUNK_BYTES = 256
HEADER_SECONDS = 10.0  # maximum time for the headers of a request, and for its trailers
LARGE_HEADERS_MESSAGE = f"The headers exceed {MAX_HEADER_BYTES:,} bytes."
WRITE_SECONDS = 60.0  # maximum time for a client to read a response, or an event of a stream
WRITE_BYTES = 64 << 10  # of a large response that are written at once
MAX_QUEUED_REQUESTS = 4  # requests of a connection that wait for the responses to earlier ones (pipelining)
LINGER_SECONDS = 5.0  # time for a client to send the rest of a body after an early response, such as a 413
MAX_CONNECTIONS_PER_ADDRESS = 512
MAX_WAITING_PER_ADDRESS = 64  # connections that wait for headers; above this number, old ones are closed
MAX_WAITING = 4_096  # the same, of all addresses together
MAX_UNREAD = (
    1_024  # connections of all addresses whose clients do not read their responses; beyond, the oldest is closed
)
REQUESTS_PER_TURN = 16  # requests that start in one iteration of the event loop
MIN_EVICTION_SECONDS = 1.0  # connections younger than this are not closed to make room for others


class RequestTurns:
    """Limit on the requests that start in one iteration of the event loop. Client addresses take turns.

    Without it, hundreds of connections would fill each iteration for a second, and other clients need several iterations to
    connect and to be answered.
    """

    def __init__(self) -> None:
        self._starts = 0  # requests that started in this iteration
        # The requests that wait, by address. The first address is the next one.
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}

    async def wait(self, address: str) -> None:
        """Wait until a request of this address may start."""
        loop = asyncio.get_running_loop()
        if not self._starts:
            loop.call_soon(self._start_iteration)
        if self._starts < REQUESTS_PER_TURN:
            self._starts += 1
            return
        turn = loop.create_future()
        self._turns.setdefault(address, deque()).append(turn)
        await turn

    def _start_iteration(self) -> None:
        """Let requests start that have waited. Called in the next iteration of the event loop."""
        self._starts = 0
        while self._turns and self._starts < REQUESTS_PER_TURN:
            address = next(iter(self._turns))
            turns = self._turns.pop(address)
            turn = turns.popleft()
            if turns:
                self._turns[address] = turns  # behind all other addresses
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._starts += 1
        if self._starts:
            asyncio.get_running_loop().call_soon(self._start_iteration)


class AddressConnections:
    """The open connections of one client address."""

    def __init__(self) -> None:
        self.open: set[LimitedHttpProtocol] = set()
        self.waiting: dict[LimitedHttpProtocol, float] = {}  # connections without complete headers -> since when


class LimitedHttpProtocol(HttpToolsProtocol):
    """HTTP protocol of uvicorn with limits on headers, queued requests and connections.

    Some attributes are uvicorn's: `cycle` is the latest request with its response, `pipeline` has the requests that wait
    for the responses to earlier ones. `cycle.more_body` is true until the whole body of the request has arrived.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._header_bytes = 0  # received since the time limit for headers started
        self._parsed_bytes = 0  # of the URL, headers and trailers of the current request
        self._has_headers = False  # whether the headers of the current request are complete
        self._request_bytes = 0  # received of the current request
        self._body_bytes = 0  # of the current request, without the sizes of its chunks and the like
        self._chunks = 0  # of the body of the current request; if it is queued, also small ones of earlier requests
        # Whether no byte of the latest chunk was received. The last chunk is empty; trailers can follow it.
        self._is_chunk_empty = False
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._ignores_input = False  # whether further requests of this connection are not read
        self._ends_with_connection = False  # whether the end of the connection marks the end of the current response
        self._responded_early = False  # whether a response started before the body of its request was complete
        self._address = ""
        self.app = partial(self._run_in_turn, self.app)
        # All connections of a server process share its state, so the connections by address are stored there.
        shared = vars(self.server_state)
        self._addresses: defaultdict[str, AddressConnections] = shared.setdefault(
            "addresses", defaultdict(AddressConnections)
        )
        self._waiting: dict[LimitedHttpProtocol, float] = shared.setdefault("waiting", {})  # of all addresses
        self._unread: dict[LimitedHttpProtocol, None] = shared.setdefault("unread", {})  # in the order of their pauses
        self._turns: RequestTurns = shared.setdefault("turns", RequestTurns())

    # --- connections ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count a new connection of the client address. Close it, or an older one that only waits, if there are too many."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        connections = self._addresses[self._address]
        connections.open.add(self)
        self._close_oldest(connections.waiting, MAX_WAITING_PER_ADDRESS)
        self._close_oldest(self._waiting, MAX_WAITING)
        if len(connections.open) > MAX_CONNECTIONS_PER_ADDRESS:
            transport.abort()
            return
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of the connection, and no longer count it."""
        self._stop_waiting()
        self._note_reading()
        self._stop_timer("_linger_timer")
        connections = self._addresses[self._address]
        connections.open.discard(self)
        if not connections.open:
            del self._addresses[self._address]
        super().connection_lost(exc)
        self.app = self.config.loaded_app  # no longer refers to this connection, so its memory can be freed at once

    def _close_oldest(self, waiting: dict[LimitedHttpProtocol, float], limit: int) -> None:
        """Close the connection that waits longest for its headers, if too many wait. Very new connections stay open."""
        if len(waiting) > limit:
            oldest, since = next(iter(waiting.items()))
            if self.loop.time() - since >= MIN_EVICTION_SECONDS:
                oldest._stop_waiting()
                # Not later by `connection_lost`, so that a new connection gets its place now.
                self._addresses[oldest._address].open.discard(oldest)
                oldest.transport.abort()

    async def _run_in_turn(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request when it is the turn of its client address."""
        await self._turns.wait(self._address)
        # Headers of responses are changed in `_send`. If the cycle (a request of uvicorn) itself referred to `_send`, its body
        # would stay in memory until the garbage collection.
        cycle: RequestResponseCycle = send.__self__  # type: ignore[attr-defined]
        await app(scope, receive, partial(self._send, cycle))

    # --- headers ----------------------------------------------------------------------------------

    def _wait_for_headers(self) -> None:
        """Note that this connection waits for headers: start their time limit, and count their bytes from zero."""
        if self._header_timer is None:
            self._header_bytes = 0
            self._note_waiting()
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._on_header_timeout)

    def _note_waiting(self) -> None:
        """Note that this connection may be closed to make room for others."""
        self._addresses[self._address].waiting[self] = self._waiting[self] = self.loop.time()

    def _stop_waiting(self) -> None:
        """Note that this connection no longer waits for headers, and stop their time limit."""
        self._addresses[self._address].waiting.pop(self, None)
        self._waiting.pop(self, None)
        self._stop_timer("_header_timer")

    def _on_header_timeout(self) -> None:
        """Reject a request with late headers or trailers. Wait again while an earlier request is being answered."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        has_whole_request = self.cycle is not None and not self.cycle.more_body
        if is_answering and has_whole_request:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._on_header_timeout)
            return
        self._reject(408, f"The headers or trailers did not arrive within {HEADER_SECONDS:g} seconds.")

    def data_received(self, data: bytes) -> None:
        """Process bytes from the client, and limit the time and size of headers."""
        if self._ignores_input or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        is_between_requests = self.cycle is None or not self.cycle.more_body
        if is_between_requests:
            self._wait_for_headers()
        self._header_bytes += len(data)
        self._request_bytes += len(data)
        self._parse(data)
        # A chunk without any byte so far may be the last one, which trailers follow. Their timer is started here rather than
        # in `on_chunk_header`, because timers are too slow to start one for each chunk.
        if self._is_chunk_empty and not self._responded_early:
            self._wait_for_headers()
        overhead = self._request_bytes - self._body_bytes  # headers, sizes and extensions of chunks, trailers
        if not is_between_requests and overhead > 2 * MAX_HEADER_BYTES + self._body_bytes:
            self._reject(400, "The sizes and extensions of the chunks are longer than the body.")
        if self._header_timer is not None and self._header_bytes > MAX_HEADER_BYTES:
            self._reject(431, LARGE_HEADERS_MESSAGE)

    def _parse(self, data: bytes) -> None:
        """Parse received bytes, and reject invalid HTTP. The bytes may hold several requests."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._reject(400, "The request is not valid HTTP.")

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Parse the current request again without its Upgrade header.

        With this header, the parser would treat the body as the next request.

        Args:
            rest: The bytes that follow the headers.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        headers = [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, b"".join(headers)) + rest)

    def on_message_begin(self) -> None:
        """Start a new request, unless the connection is being closed. Called by the parser."""
        if self._ignores_input or self.transport.is_closing():
            raise ValueError("the connection is being closed")  # stops the parser
        is_queued = self.cycle is not None and not self.cycle.response_complete
        # A queued request shares the limit MAX_SMALL_CHUNKS with earlier ones, so their small chunks count for it, too.
        # Small chunks are those beyond one for every CHUNK_BYTES of a body.
        small_chunks = max(0, self._chunks - self._body_bytes // CHUNK_BYTES)
        self._chunks = small_chunks if is_queued else 0
        self._parsed_bytes = self._request_bytes = self._body_bytes = 0
        self._has_headers = False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_parsed(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the current request. Reject a request with too many headers. Trailers are only counted."""
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError(f"the request has more than {MAX_HEADERS} headers")  # uvicorn answers 400 and closes
        self._count_parsed(len(name) + len(value) + len(": \r\n"))
        if not self._has_headers:  # otherwise a trailer could be a login
            super().on_header(name, value)

    def _count_parsed(self, size: int) -> None:
        """Count bytes of headers during parsing. All headers may arrive in one large piece."""
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEADER_BYTES:
            self._reject(431, LARGE_HEADERS_MESSAGE)
            raise ValueError("the request headers are too large")  # stops the parser

    def on_headers_complete(self) -> None:
        """Check the headers of a request, and start to process it. A ValueError stops the parser."""
        self._stop_waiting()
        self._check_headers()
        if self.parser.should_upgrade():
            return  # `_parse_without_upgrade` parses the request again, and this method is called again
        if len(self.pipeline) >= MAX_QUEUED_REQUESTS:
            self._close_after_responses()
            raise ValueError("too many requests are queued on this connection")
        self._has_headers = True
        super().on_headers_complete()
        self.cycle.transport = HeaderBuffer(self.transport)  # type: ignore[assignment]
        self.cycle.scope.setdefault("extensions", {})[ABORT_EXTENSION] = {"abort": self.transport.abort}

    def _check_headers(self) -> None:
        """Reject requests that another server may read in another way. A ValueError stops the parser."""
        is_http_1_0 = self.parser.get_http_version() == "1.0"
        n_hosts = sum(name == b"host" for name, _ in self.headers)
        if self.parser.get_method() == b"CONNECT" or n_hosts > 1 or (n_hosts == 0 and not is_http_1_0):
            raise ValueError("the request uses CONNECT, or does not have exactly one Host header")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and is_http_1_0:
            raise ValueError("HTTP/1.0 has no Transfer-Encoding")
        if codings not in ([], [b"chunked"]):
            self._reject(501, "The only supported Transfer-Encoding is chunked.")
            raise ValueError("the Transfer-Encoding is not supported")

    def on_chunk_header(self) -> None:
        """Count a chunk of the body, and reject too many small ones."""
        self._chunks += 1
        if self._chunks > MAX_SMALL_CHUNKS + self._body_bytes // CHUNK_BYTES:
            self._reject(400, "The body has too many small chunks.")
            raise ValueError("the request body has too many small chunks")  # stops the parser
        self._is_chunk_empty = True

    def on_body(self, body: bytes) -> None:
        """Process a part of the body. The chunk that it is part of is not the last one, so no trailers follow it."""
        self._body_bytes += len(body)
        self._is_chunk_empty = False
        if self._header_timer is not None:
            self._stop_waiting()  # for trailers, in case `data_received` has taken this chunk for the last one
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Finish reading a request. Close the connection after an early response, such as status 413.

        Nothing is done for a request with an Upgrade header, because `_parse_without_upgrade` parses it again.
        """
        if self.parser.should_upgrade():
            return
        self._is_chunk_empty = False
        self._stop_waiting()
        super().on_message_complete()
        if self._responded_early and self.cycle.response_complete:
            self.transport.close()

    def _reject(self, status: int, message: str) -> None:
        """Reject the current request: send an error response, and close the connection.

        The error cannot be sent before the responses to earlier requests, or after the response to this one has started.
        Then the connection is only closed: after all responses if no body is still arriving, otherwise at once.
        """
        self._stop_waiting()
        if self.transport.is_closing() or self._ignores_input:
            return
        limited_log: LimitedLog = vars(self.server_state).setdefault("limited_log", LimitedLog(log))
        limited_log.write(f"A request was rejected with status {status}: %s", message)
        is_idle = self.cycle is None or self.cycle.response_complete
        is_receiving_body = not is_idle and self.cycle.more_body
        can_respond = is_idle or (is_receiving_body and not self.cycle.response_started and not self.pipeline)
        if can_respond:
            head = f"content-type: text/plain\r\ncontent-length: {len(message)}\r\nconnection: close\r\n\r\n{message}"
            self.transport.write(STATUS_LINE[status] + head.encode())
        elif not is_receiving_body:  # the headers of a further request are being rejected
            self._close_after_responses()
            return
        self.transport.close()

    def _close_after_responses(self) -> None:
        """Ignore further requests. Close the connection after all pending responses."""
        self._ignores_input = True
        # `cycle` is the latest request. Uvicorn closes the connection after its response.
        self.cycle.keep_alive = False

    # --- responses --------------------------------------------------------------------------------

    async def _send(self, cycle: RequestResponseCycle, message: Any) -> None:
        """Send the headers or a part of the body of a response. Replaces uvicorn's `cycle.send`."""
        body = message.get("body", b"")
        if message["type"] == "http.response.start":
            await self._send_headers(cycle, message)
        elif len(body) > WRITE_BYTES and not message.get("more_body", False):
            await self._send_large_body(cycle, body)
        else:
            if self._ends_with_connection:
                # This response has no Content-Length, but uvicorn accepts only parts with the expected length.
                cycle.expected_content_length = len(body)
            await RequestResponseCycle.send(cycle, message)
            cycle.transport.flush()  # type: ignore[attr-defined]  # for a response without a body

    async def _send_large_body(self, cycle: RequestResponseCycle, body: bytes) -> None:
        """Send a large body in pieces that wait for the client to read, so that the request keeps its slot meanwhile."""
        timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)
        try:
            for start in range(0, len(body), WRITE_BYTES):
                piece, has_more = body[start : start + WRITE_BYTES], start + WRITE_BYTES < len(body)
                await self._send(cycle, {"type": "http.response.body", "body": piece, "more_body": has_more})
        finally:
            timer.cancel()

    async def _send_headers(self, cycle: RequestResponseCycle, message: Any) -> None:
        """Send the headers of a response. Some get the header "Connection: close".

        These are responses to HTTP/1.0 without a length, and early responses, which start before the body of the request
        is complete.
        """
        self._ends_with_connection = False
        if cycle.scope["http_version"] == "1.0" and not _has_length(message):  # HTTP/1.0 has no chunks
            self._ends_with_connection = True
            cycle.chunked_encoding = False
            cycle.keep_alive = False
        is_early = cycle.more_body
        if is_early:
            cycle.keep_alive = False  # adds the header "Connection: close"
        # The body of a response with a length follows at once. The first event of a stream may take long.
        cycle.transport.holds = _has_length(message)  # type: ignore[attr-defined]
        await RequestResponseCycle.send(cycle, message)
        cycle.transport.holds = False  # type: ignore[attr-defined]
        if is_early:
            # If uvicorn closed the connection at the end of the response while the client still sends, the client would not
            # see the response. `on_response_complete` closes it later instead.
            cycle.keep_alive = True
            self._responded_early = True

    def on_response_complete(self) -> None:
        """Finish a response. After an early one, wait for the rest of the request body before closing."""
        super().on_response_complete()
        if self._responded_early and self.cycle.more_body:
            self._stop_timer("_header_timer")  # a request that has a response gets no error for slow trailers
            self._note_waiting()  # it may be closed to make room for others
            self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        elif self._responded_early:
            self.transport.close()

    def pause_writing(self) -> None:
        """Start the time limit for a client that does not read its response. Close the oldest such connection of too many."""
        super().pause_writing()
        if self._write_timer is None:
            self._unread[self] = None
            self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)
        if len(self._unread) > MAX_UNREAD:
            oldest = next(iter(self._unread))
            oldest._note_reading()
            oldest.transport.abort()

    def resume_writing(self) -> None:
        """Stop the time limit, because the client reads again."""
        super().resume_writing()
        self._note_reading()

    def _note_reading(self) -> None:
        """Note that the client reads its response."""
        self._unread.pop(self, None)
        self._stop_timer("_write_timer")

    def _stop_timer(self, name: str) -> None:
        """Cancel the timer in the attribute with this name, if it runs."""
        timer: asyncio.TimerHandle | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)


def _has_length(message: Any) -> bool:
    """Return whether the headers of a response name its length."""
    return any(name.lower() == b"content-length" for name, _ in message["headers"])
