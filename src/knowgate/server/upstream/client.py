"""HTTP client that sends requests to the upstream, with timeouts and a circuit breaker.

The URL comes only from the settings, and redirects are not followed. The API key for the upstream comes from the
environment. If there is none, and this server has no API keys of its own, the API key of the client is forwarded.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp.client_exceptions import ClientError
from aiohttp.client_proto import ResponseHandler
from starlette.datastructures import Headers
from yarl import URL

from knowgate.models.openai.client import find_api_key
from knowgate.server import streaming
from knowgate.server.circuit_breaker import CircuitBreaker
from knowgate.server.json_api import ApiError
from knowgate.server.load_limits import FairLock
from knowgate.server.options import ServeOptions
from knowgate.server.streaming import InvalidResponse
from knowgate.server.upstream import response_body
from knowgate.server.upstream.response_body import parse_upstream_json, read_content, run_for_size

FORWARDED_RESPONSE_HEADERS = ("content-type", "retry-after", "x-request-id", "openai-processing-ms")
FORWARDED_REQUEST_HEADERS = ("openai-beta", "x-request-id", "traceparent", "tracestate")
ACCOUNT_HEADERS = ("openai-organization", "openai-project")  # forwarded together with the API key of the client
DEFAULT_MODEL_SECONDS = 60.0  # the upstream may list another model later
MAX_ACCOUNTS = 1_000  # accounts of the upstream for which a default model is cached
MAX_STATUS = 599
MIN_SECRET_CHARS = 8  # shorter ones, such as EMPTY for a server without keys, are no secrets
NO_LIST_STATUSES = (404, 405, 501)  # of a server that has no list of models
MAX_LIST_BYTES, MAX_LIST_VALUES, MAX_MODEL_CHARS = 4 << 20, 100_000, 1_000  # of a list of models, and of a name in it
MAX_INTERIM_RESPONSES = 100
# Headers, chunk sizes, chunk extensions and trailers may be this much larger than half of the body. A chunk of one byte has
# five bytes of them, and takes as long to parse as a large chunk.
MAX_FRAMING_EXCESS = 64 << 10
MAX_LARGE_RESPONSES = 16  # in memory until their clients have read them; one API key can have half of them
HUGE_BYTES, MAX_HUGE_RESPONSES = 4 << 20, 4  # likewise; with log-probabilities, each can take 150 MB
# Bytes that each connection without TLS processes in one turn of the event loop, and the time that it should take for them.
MIN_READ_BYTES, MAX_READ_BYTES, READ_SECONDS = 1 << 10, 64 << 10, 0.001
PROBE_SECONDS = 5.0  # maximum time in which an upstream that failed repeatedly must list its models
DEADLINE_SHARE = 0.9  # maximum time to the first byte, as a share of the deadline of a request


class StaleConnectionError(aiohttp.ServerDisconnectedError):
    """The upstream closed a connection that had been used before, and sent nothing in response to the request."""


class UpstreamConnection(ResponseHandler):
    """Connection to the upstream with counts of requests and bytes.

    The connection is closed if headers and chunk framing are too large for the body, or if the upstream sends something
    after the end of a response. The next request could get it as its response, even one of another API key.
    """

    request_count = 0
    byte_count = 0  # of the current response, with headers, chunk sizes and trailers
    has_response = False  # whether the headers of the response are there, after those of interim ones

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to read less at a time than asyncio does."""
        super().connection_made(transport)
        self._set_read_size(MIN_READ_BYTES)

    def _set_read_size(self, size: int) -> None:
        """Set how many bytes are read at a time. Other requests wait meanwhile, and they can be thousands of chunks."""
        transport: Any = self.transport
        if hasattr(transport, "max_size"):  # no public option
            transport.max_size = min(max(size, MIN_READ_BYTES), MAX_READ_BYTES)

    def set_response_params(self, **params: Any) -> None:
        """Prepare the connection for a request. aiohttp calls this before it sends the request."""
        self.request_count += 1
        self.byte_count, self.has_response = 0, False
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        """Process bytes of a response. Close the connection if there are too many besides the body, or after its end."""
        has_ended = self.has_response and self._payload is not None and self._payload.is_eof()
        if data and has_ended and self.transport is not None:
            self.transport.abort()
            return
        self.byte_count += len(data)
        start = time.perf_counter()
        super().data_received(data)
        seconds = time.perf_counter() - start
        if data:  # aiohttp passes none when it continues to read
            self._set_read_size(len(data) // 2 if seconds > READ_SECONDS else 2 * len(data))
        body_bytes = 0 if self._payload is None else self._payload.total_bytes
        framing_bytes = self.byte_count - body_bytes
        if framing_bytes > body_bytes / 2 + MAX_FRAMING_EXCESS and self.transport is not None:
            self.transport.abort()


class LimitedResponse(aiohttp.ClientResponse):
    """Response of the upstream with a limit on interim responses (status 1xx). aiohttp has no such limit.

    Attributes:
        wait_for_place: Called with the size so far when a large body is being read into memory, to wait until there are
            few of them.
    """

    wait_for_place: Callable[[int], Awaitable[None]] | None = None

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Wait for the headers of the final response. Raise an error after too many interim responses.

        Raises:
            StaleConnectionError: The upstream closed an idle connection, maybe before it got this request.
        """
        protocol = connection.protocol
        read = protocol.read
        reads_left = MAX_INTERIM_RESPONSES + 1

        async def read_limited() -> Any:
            nonlocal reads_left
            reads_left -= 1
            if reads_left < 0:
                connection.close()
                message = "the upstream sent too many responses with a status of 1xx before its reply"
                raise aiohttp.ClientPayloadError(message)
            return await read()

        protocol.read = read_limited
        try:
            response = await super().start(connection)
            protocol.has_response = True
            return response
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if protocol.request_count > 1 and not protocol.byte_count:
                raise StaleConnectionError from None
            raise
        finally:
            del protocol.read  # the connection may be used again


class UpstreamClient:
    """Client of the upstream, the OpenAI-compatible server with the LLM.

    Args:
        url: URL of the upstream, ending in /v1. It may hold a user name and a password.
        options: Options of the server, of which the timeouts and `keys` are used.
    """

    def __init__(self, url: str, options: ServeOptions):
        address = URL(url)
        self.url = url if address.user is None else str(address.with_user(None))
        self._login = _find_login(address)
        self.breaker = CircuitBreaker("upstream", probes_first=True)
        self.large_responses, self.huge_responses = FairLock(MAX_LARGE_RESPONSES), FairLock(MAX_HUGE_RESPONSES)
        self._probe: asyncio.Task[None] | None = None
        # When the request of each response was sent.
        self._start_times: WeakKeyDictionary[aiohttp.ClientResponse, float] = WeakKeyDictionary()
        self._forwards_keys = options.keys is None
        self._connect_timeout = options.connect_seconds
        # Time out before the deadline. At the deadline, a request is cancelled, which does not count as a failure.
        longest = DEADLINE_SHARE * options.deadline
        self._first_byte_timeout = min(options.first_byte_seconds or longest, longest)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by `reuses_connections`
        # By account, because an upstream may list other models to others: the name, and when to ask again.
        self._default_models: dict[tuple[str, ...], tuple[str, float]] = {}

    async def close(self) -> None:
        """Close all connections."""
        for session in self._sessions.values():
            await session.close()

    def _get_session(self, *, reuses_connections: bool) -> aiohttp.ClientSession:
        """Return an HTTP session, which is opened at the first call.

        Args:
            reuses_connections: Whether connections stay open for further requests. Otherwise each request gets a new one.
        """
        if reuses_connections not in self._sessions:
            # The number of connections has no limit of its own, because requests in progress are limited.
            connector = aiohttp.TCPConnector(limit=0, force_close=not reuses_connections)
            connect_timeout, read_timeout = self._connect_timeout, self._first_byte_timeout
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout, sock_read=read_timeout)
            # aiohttp has no public option for the class of connections.
            vars(connector)["_factory"] = partial(UpstreamConnection, asyncio.get_running_loop())
            self._sessions[reuses_connections] = aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                response_class=LimitedResponse,
                cookie_jar=aiohttp.DummyCookieJar(),  # a cookie for one client is not sent with requests of another
                auto_decompress=False,  # `iter_chunks` decompresses, with a limit
                skip_auto_headers=("User-Agent",),
                **_find_proxy(self.url),
            )
        return self._sessions[reuses_connections]

    async def send(
        self, method: str, path: str, content: bytes | None, headers: Headers, *, uses_breaker: bool = True
    ) -> aiohttp.ClientResponse:
        """Send a request, and return the response with its headers. The caller must close the response.

        Args:
            method: HTTP method.
            path: API path, which is appended to the URL of the upstream.
            content: Request body.
            headers: Headers of the client's request. Only some of them are forwarded.
            uses_breaker: Whether an open circuit breaker blocks the request.

        Raises:
            ApiError: 503 while the circuit breaker is open, 504 if the response does not start in time, 502 if the
                upstream cannot be reached.
        """
        if uses_breaker:
            await self._check_breaker(headers)
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._first_byte_timeout):
                response = await self._request(method, path, content, headers)
        except (ClientError, OSError) as error:  # OSError includes TimeoutError
            self.breaker.record_failure(start)
            raise make_connection_error(error) from None
        if not 200 <= response.status <= MAX_STATUS:
            response.close()
            raise ApiError(502, f"the upstream server sent the invalid status {response.status}.", "upstream_invalid")
        if response.status == 200:
            self._start_times[response] = start  # not yet a success: the body may never arrive
        else:
            self.breaker.record_success()
        return response

    async def _request(self, method: str, path: str, content: bytes | None, headers: Headers) -> aiohttp.ClientResponse:
        """Send a request. Send it again on a new connection, if the old one was stale."""
        url = f"{self.url}{path}"
        options: dict[str, Any] = {"data": content, "headers": self._build_headers(headers), "allow_redirects": False}
        try:
            return await self._get_session(reuses_connections=True).request(method, url, **options)
        except StaleConnectionError:
            return await self._get_session(reuses_connections=False).request(method, url, **options)

    # --- the circuit breaker ----------------------------------------------------------------------

    async def _check_breaker(self, headers: Headers) -> None:
        """Raise an error while the circuit breaker is open. In the half-open state, a probe decides first.

        Raises:
            ApiError: 503 if the circuit breaker is open, or if the probe failed.
        """
        if self.breaker.state == "half-open":
            if self._probe is None or self._probe.done():
                self._probe = asyncio.ensure_future(self._run_probe(headers))
            await asyncio.shield(self._probe)  # continue the probe if the client of this request leaves
        if self.breaker.state != "closed":
            seconds = f"{max(1, round(self.breaker.seconds_until_probe))}"
            message = f"the upstream failed repeatedly, so no requests are sent to it. Try again in {seconds} seconds."
            raise ApiError(503, message, "upstream_down", {"retry-after": seconds})

    async def _run_probe(self, headers: Headers) -> None:
        """Ask the upstream for its models. A reply closes the circuit breaker, a failure opens it."""
        try:
            async with asyncio.timeout(min(PROBE_SECONDS, self._first_byte_timeout)):
                with suppress(InvalidResponse):  # the upstream works, even if its response is too large
                    await read_content(await self._request("GET", "/models", None, headers), MAX_LIST_BYTES)
            self.breaker.record_success()
        except (ClientError, OSError):
            self.breaker.trip()

    def record_body_error(self, error: BaseException, response: aiohttp.ClientResponse) -> ApiError:
        """Return the client's error for an unreadable response body. Timeouts also count for the circuit breaker."""
        error.__traceback__ = None  # the response refers to the error, and a traceback to the whole request
        if isinstance(error, TimeoutError):
            self.breaker.record_failure(self._start_times.get(response))
        return make_connection_error(error)

    # --- requests ---------------------------------------------------------------------------------

    def _build_headers(self, client_headers: Headers) -> dict[str, str]:
        """Return the headers for the upstream. The API key comes from this server or the client."""
        headers = {name: client_headers[name] for name in FORWARDED_REQUEST_HEADERS if name in client_headers}
        headers["Content-Type"] = "application/json"
        headers["Accept-Encoding"] = "identity"  # without compression, streams can be forwarded as they are
        if self._login:
            headers["Authorization"] = self._login
        elif self._forwards_keys and "authorization" in client_headers:
            headers["Authorization"] = client_headers["authorization"]
            headers |= {name: client_headers[name] for name in ACCOUNT_HEADERS if name in client_headers}
        return headers

    def redact_login(self, content: bytes) -> bytes:
        """Replace the login of this server in a response by ***. Some servers repeat it in errors."""
        _, _, secret = self._login.partition(" ")  # such as "Bearer SECRET"
        return content.replace(secret.encode(), b"***") if len(secret) >= MIN_SECRET_CHARS else content

    async def list_models(self, headers: Headers) -> list[dict[str, Any]]:
        """Return the models of the upstream, or [] if it has no valid list.

        The list is requested even if the circuit breaker rejects calls. A response closes the breaker.

        Raises:
            ApiError: The upstream cannot be reached, or returned an error, which has the same status.
        """
        response = await self.send("GET", "/models", None, headers, uses_breaker=False)
        try:
            content = await read_content(response, MAX_LIST_BYTES)
            self.breaker.record_success()
            parsed = await run_for_size(len(content), lambda: parse_upstream_json(content, MAX_LIST_VALUES))
            models = parsed["data"]
        except (InvalidResponse, KeyError, TypeError, ClientError):
            models = None
        if response.status >= 400 and response.status not in NO_LIST_STATUSES:
            message = f"the upstream did not list its models (status {response.status})."
            retry_headers = {name: value for name, value in response.headers.items() if name.lower() == "retry-after"}
            raise ApiError(response.status, message, "upstream_error", retry_headers)
        if response.status != 200 or not isinstance(models, list):
            return []
        return [model for model in models if isinstance(model, dict)]

    @property
    def default_model(self) -> str | None:
        """The default model for requests with this server's own login, if it is known."""
        return self.find_default_model(Headers())

    def find_default_model(self, headers: Headers) -> str | None:
        """Return the default model for the account of a request. None until a request needs it."""
        name, _ = self._default_models.get(self.get_account(headers), (None, 0.0))
        return name

    def get_account(self, headers: Headers) -> tuple[str, ...]:
        """Return the headers by which the upstream knows whose request it is."""
        sent = self._build_headers(headers)
        return tuple(sent.get(name, "") for name in ("Authorization", *ACCOUNT_HEADERS))

    async def get_default_model(self, headers: Headers) -> str:
        """Return the first model in the list of the upstream. The name is cached for each account, for a minute.

        Raises:
            ApiError: 404 if the upstream lists no models. Otherwise, the error of the upstream.
        """
        account = self.get_account(headers)
        name, expires = self._default_models.get(account, ("", 0.0))
        if time.monotonic() < expires:
            return name
        if name:  # requests that arrive meanwhile use the old name
            self._default_models[account] = (name, time.monotonic() + DEFAULT_MODEL_SECONDS)
        names = [model.get("id") for model in await self.list_models(headers)]
        if not names or not isinstance(names[0], str) or len(names[0]) > MAX_MODEL_CHARS:
            advice = "Set the field `model` of the request, or `upstream_model` on the server."
            raise ApiError(404, f"the upstream lists no models. {advice}", "model_not_found")
        if len(self._default_models) == MAX_ACCOUNTS:
            self._default_models.clear()
        self._default_models[account] = (names[0], time.monotonic() + DEFAULT_MODEL_SECONDS)
        return names[0]


def _find_login(address: URL) -> str:
    """Return this server's login header for the upstream, from its URL or the environment. "" means no own login."""
    if address.user:  # aiohttp would refuse a login in the URL together with an API key
        credentials = f"{address.user}:{address.password or ''}".encode()
        return f"Basic {base64.b64encode(credentials).decode()}"
    key, _ = find_api_key()
    return f"Bearer {key}" if key else ""


def _find_proxy(url: str) -> dict[str, Any]:
    """Return the proxy settings of the environment for a URL. The `trust_env` of aiohttp is slower."""
    parts = urlsplit(url)
    proxy_url = getproxies().get(parts.scheme)
    if not proxy_url or proxy_bypass(parts.hostname or ""):
        return {}
    proxy = URL(proxy_url)
    login = aiohttp.BasicAuth(proxy.user, proxy.password or "") if proxy.user else None
    return {"proxy": str(proxy.with_user(None)), "proxy_auth": login}


def build_response_headers(response: aiohttp.ClientResponse, added: Mapping[str, str]) -> dict[str, str]:
    """Return the headers for the client: some of the upstream, and `added`."""
    headers = {}
    for name in FORWARDED_RESPONSE_HEADERS:
        value = response.headers.get(name, "")
        if value and value.isascii() and value.isprintable():  # values with other characters cannot be sent
            headers[name] = value
    return headers | dict(added)


def make_connection_error(error: BaseException) -> ApiError:
    """Convert an error of the upstream to an error response. 504 means a late response."""
    if isinstance(error, InvalidResponse):
        return ApiError(502, f"the response of the upstream cannot be used: {error}.", "upstream_invalid")
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
        return ApiError(504, "the upstream did not respond in time. Try again later.", "upstream_timeout")
    message = f"the server cannot reach the upstream ({type(error).__name__}). Try again later."
    return ApiError(502, message, "upstream_unreachable")


async def forward_stream(
    upstream: UpstreamClient,
    response: aiohttp.ClientResponse,
    annotator: streaming.StreamAnnotator | None,
    first_lines: list[bytes],
    remaining_lines: AsyncGenerator[bytes, None],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream of the upstream. A cut answer gets an error event at the end.

    Args:
        upstream: The upstream.
        response: The response of the upstream.
        annotator: Adds the `knowgate` object to events. None leaves them unchanged.
        first_lines: Lines of the stream that have already been read.
        remaining_lines: The rest of the stream.
    """
    event: list[bytes] = []  # lines of the current event
    size = 0
    end = streaming.StreamEnd()
    try:
        async for line in streaming.chain_lines(first_lines, remaining_lines):
            size += len(line)
            end.add(line)
            if annotator is not None and line.startswith(b"data:"):
                line = await run_for_size(len(line), partial(annotator.annotate, line))
            event.append(line)
            await response_body.wait_for_event(response, max(size, len(line)))
            if line == b"\n":  # a blank line ends an event
                upstream.breaker.record_success()
                yield b"".join(event)
                event = []
                size = 0
            elif size > streaming.MAX_EVENT_BYTES:
                message = f"the stream has an event of more than {streaming.MAX_EVENT_BYTES:,} bytes"
                raise InvalidResponse(message)
        upstream.breaker.record_success()
        last_line = event[-1] if event else b""
        is_whole = await run_for_size(size, partial(streaming.is_whole_line, last_line))
        if is_whole:
            yield b"".join([*event, b"\n\n"])
        yield end.format_missing_events()
    except InvalidResponse as error:
        yield streaming.format_error_end(make_connection_error(error))
    except (ClientError, OSError) as error:
        failure = upstream.record_body_error(error, response)
        yield streaming.format_error_end(failure) if isinstance(error, TimeoutError) else end.format_missing_events()
    finally:
        await remaining_lines.aclose()
        response.close()
