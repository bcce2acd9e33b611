"""HTTP clients with a deadline per request, a maximum response size, and error messages without secrets.

httpx limits the time of each read but not of the whole request. Here every read and write of a connection also ends at the
deadline of the request, so a server that sends one byte per second is cut off. There are no redirects and no cookies.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

import httpx

from knowgate.core.network_deadline import REQUEST_DEADLINE, DeadlineBackend, request_deadline
from knowgate.core.redaction import find_url_secrets, redact_message, redact_urls
from knowgate.core.validation import count_json_values, parse_json, parse_retry_after
from knowgate.errors import BadInput, BadSetting, RejectionError, ServerError

Item = TypeVar("Item")
Result = TypeVar("Result")
_PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")
NETWORK_VARIABLES = (*_PROXY_VARIABLES, *map(str.lower, _PROXY_VARIABLES), *_CERTIFICATE_VARIABLES)
MAX_RESPONSE_BYTES = 16 << 20  # 64 embeddings of 8,192 numbers each take less
MAX_RESPONSE_VALUES = 1_000_000
LARGE_RESPONSE_BYTES = 64 << 10  # larger ones are parsed one at a time
_LARGE_RESPONSE_LOCK = threading.RLock()
ALLOWED_ENCODINGS = ("", "identity", "gzip")  # gzip expands data about 1,000 times at most; others have no such limit
MAX_CONCURRENT_REQUESTS, MAX_RETRIES = 8, 2
SETUP_STATUSES = (401, 403, 404, 408, 429)  # they do not depend on the content of a request


@dataclass(frozen=True)
class RetryPolicy:
    """Timeouts of requests, and how often failed requests are retried.

    Args:
        timeout: Maximum seconds for one attempt. In a stream, the maximum seconds to wait for each chunk.
        total: Maximum seconds for a request, including all attempts and the pauses between them. In a stream, the
            maximum seconds spent waiting for chunks.
        retries: Maximum number of further attempts after a temporary failure.
        backoff: Seconds to wait before the second attempt. The time doubles with each attempt, and a random factor
            between 0.5 and 1 is applied.
        sleep: Function that waits between attempts.
        allow_retry: Function that is called before each further attempt. False ends the request with the last error.
    """

    timeout: float = 60.0
    total: float = 180.0
    retries: int = 4
    backoff: float = 0.5
    sleep: Callable[[float], None] = time.sleep
    allow_retry: Callable[[], bool] = lambda: True


class RetryableError(Exception):
    """A failure that may be temporary, so the request is sent again.

    Args:
        error: The error to raise when no attempts are left.
        wait: Seconds to wait before the next attempt, as the server asked for; None to use the backoff.
    """

    def __init__(self, error: ServerError, wait: float | None = None):
        super().__init__(str(error))
        self.error = error
        self.wait = wait


def call_with_retries(attempt: Callable[[float], Result], policy: RetryPolicy) -> Result:
    """Call `attempt`, and call it again after temporary failures.

    Args:
        attempt: Sends the request once. Its argument is the deadline of the request, a time of `time.monotonic`. It
            raises RetryableError for a temporary failure.
        policy: Timeouts and retries.

    Raises:
        ServerError: The last attempt failed, or no time is left for another one.
    """
    deadline = min(time.monotonic() + policy.total, REQUEST_DEADLINE.get())
    for number in itertools.count():
        try:
            return attempt(deadline)
        except RetryableError as failure:
            backoff = policy.backoff * 2.0**number * random.uniform(0.5, 1.0)
            pause = backoff if failure.wait is None else failure.wait
            has_ended = number >= policy.retries or time.monotonic() + pause >= deadline
            if has_ended or not policy.allow_retry():
                raise failure.error from None
            policy.sleep(pause)
    raise AssertionError("unreachable")


class JsonClient:
    """Client of a JSON API. Lost connections, status 429 and 5xx are retried until the deadline.

    Args:
        url: Base URL. It may contain secrets, which never appear in messages.
        name: How errors name the server, such as "the search server".
        headers: Headers of every request. They may contain keys, which never appear in messages.
        advice: Sentence that ends the error about a rejected request and says what to do.
        deadline: Seconds per request, including all retries.
        pause: Seconds before the first retry, for servers that do not say how long to wait; doubles each time.
        max_bytes: Maximum size of a response.
        transport: Replaces the network in tests.

    Attributes:
        allow_retry: Function that is called before each retry. False ends the request with the last error.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        headers: Mapping[str, str] | None = None,
        advice: str = "Check its address and key.",
        deadline: float = 30.0,
        pause: float = 0.3,
        max_bytes: int = MAX_RESPONSE_BYTES,
        transport: httpx.BaseTransport | None = None,
    ):
        try:
            host = httpx.URL(url).host if url.startswith(("http://", "https://")) else ""
        except httpx.InvalidURL:
            host = ""
        if not host:
            address = redact_message(redact_urls(url))
            raise BadSetting(f"'{address}' is not a valid address for {name}. Write http(s)://HOST[:PORT]/...")
        self.url = url.rstrip("/")
        self.name = name
        self._headers = {key: value for key, value in (headers or {}).items() if value}
        self._advice = advice
        self.allow_retry: Callable[[], bool] = lambda: True
        self._retry = RetryPolicy(
            deadline, deadline, retries=MAX_RETRIES, backoff=pause, allow_retry=lambda: self.allow_retry()
        )
        self._max_bytes = max_bytes
        self._transport = transport

    def request_json(self, method: str, path: str = "", **options: Any) -> Any:
        """Send a request and return the parsed JSON body of the response. Takes the options of `request_bytes`."""
        return parse_json_response(self.request_bytes(method, path, **options), f"the response of {self.name}")

    def request_bytes(
        self,
        method: str,
        path: str = "",
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        accept: Sequence[int] = (),
    ) -> bytes:
        """Send a request and return the body of the response.

        Args:
            method: HTTP method.
            path: Path after the base URL, or a whole URL.
            body: JSON body.
            params: Query parameters.
            accept: Status codes besides 2xx that are not errors: their body is returned, too.

        Raises:
            ServerError: The server failed, or did not answer in time.
            RejectionError: The server rejected this request.
        """
        url = path if path.startswith(("http://", "https://")) else self.url + path
        request = self._client.build_request(method, url, json=body, params=params)
        response = call_with_retries(lambda deadline: self._attempt(request, deadline), self._retry)
        if not response.is_success and response.status not in accept:
            raise self._make_status_error(response)
        return response.content

    def _make_status_error(self, response: HttpResponse) -> ServerError:
        """Make the error for a response whose status is not accepted."""
        message = self._get_message(response).rstrip(".") or "no reason given"
        brief = f"{self.name} answered with status {response.status}"
        error_type = ServerError if response.status in SETUP_STATUSES else RejectionError
        return error_type(f"{brief}: {message}. {self._advice}", brief=brief)

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call `work` with each item in several threads. Results keep the order of the items."""
        _ = self._client  # create the client now, so that the threads share it
        if len(items) < 2:
            return [work(item) for item in items]
        deadline = REQUEST_DEADLINE.get()

        def work_until_deadline(item: Item) -> Result:
            with request_deadline(deadline):  # threads do not inherit it
                return work(item)

        with ThreadPoolExecutor(min(MAX_CONCURRENT_REQUESTS, len(items))) as pool:
            return list(pool.map(work_until_deadline, items))

    def redact(self, message: str) -> str:
        """Remove this client's keys and URL secrets from a server message."""
        keys = list(self._headers.values())  # such as 'Bearer KEY'
        keys += [value.rpartition(" ")[2] for value in keys]  # such as 'KEY'
        long_keys = [key for key in keys if len(key) > 5]  # a shorter value is no key, and may be part of a word
        return redact_message(message, [*find_url_secrets(self.url), *long_keys])

    def _attempt(self, request: httpx.Request, deadline: float) -> HttpResponse:
        """Send a request once and return its response.

        Raises:
            RetryableError: The connection was lost or timed out, or the status is 429 or 5xx.
        """
        try:
            response = send_request(self._client, request, deadline, self.name, self._max_bytes)
        except httpx.RequestError as error:
            raise self._make_failure(f"{type(error).__name__}: {self.redact(str(error))}") from None
        if response.status != 429 and response.status < 500:
            return response
        message = self._get_message(response)
        problem = f"status {response.status}: {message}" if message else f"status {response.status}"
        advice = " The quota is used up, or requests are sent too fast." if response.status == 429 else ""
        raise self._make_failure(problem, advice, response.retry_after)

    def _make_failure(self, problem: str, advice: str = "", wait: float | None = None) -> RetryableError:
        """Make the error for a temporary failure. `wait` is the delay requested by the server."""
        error = ServerError(
            f"{self.name} failed: {problem.rstrip('.')}. No request succeeded within {self._retry.total:g} s.{advice} Check "
            "that the server runs, or try again later.",
            brief=f"{self.name} failed: {problem.partition(': ')[0]}",
        )
        return RetryableError(error, wait)

    def _get_message(self, response: HttpResponse) -> str:
        """Return the beginning of the body of an error response, without this client's keys."""
        return self.redact(response.content[:2000].decode(errors="replace"))

    @functools.cached_property
    def _client(self) -> httpx.Client:
        client = open_client(self._headers, transport=self._transport)
        weakref.finalize(self, client.close)
        return client


@dataclass(frozen=True)
class HttpResponse:
    """A completely read response. `retry_after` is the requested delay in seconds."""

    status: int  # HTTP status code
    content: bytes  # the decompressed body
    retry_after: float | None

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


def open_client(
    headers: Mapping[str, str], *, connections: int | None = None, transport: httpx.BaseTransport | None = None
) -> httpx.Client:
    """Create an httpx client. Its requests end at the deadline of `request_deadline`.

    Args:
        headers: Headers of every request.
        connections: Maximum number of open connections; None for no limit.
        transport: Replaces the network in tests.
    """
    limits = httpx.Limits(max_connections=connections)
    client = create_client(
        headers={"Accept-Encoding": "gzip", **headers}, limits=limits, transport=transport, follow_redirects=False
    )
    # httpx has no public way to replace the network backend. The mounts are the connections through proxies.
    for network in (client._transport, *client._mounts.values()):
        if isinstance(network, httpx.HTTPTransport):
            network._pool._network_backend = DeadlineBackend(network._pool._network_backend)
    return client


def create_client(**options: Any) -> httpx.Client:
    """Create an httpx client. Errors hide the proxy address, because it may contain a password.

    Raises:
        BadSetting: The proxy or the certificates that an environment variable names cannot be used.
    """
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
    try:
        return httpx.Client(cookies=no_cookies, **options)
    except (ImportError, ValueError, OSError, httpx.InvalidURL):
        names = [name for name in NETWORK_VARIABLES if os.environ.get(name)]
        raise BadSetting(
            f"the proxy or the certificates in {' or '.join(names) or 'the environment'} cannot be used. Write a proxy as "
            "http://HOST:PORT, and name certificates that exist. A SOCKS proxy also needs: pip install 'httpx[socks]'"
        ) from None


def read_key_header(*variables: str) -> dict[str, str]:
    """Return the header with the API key from the environment. Without a key, return {}."""
    keys = [os.environ.get(name, "").strip() for name in variables]
    key = next(filter(None, keys), "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def iter_body(response: httpx.Response, server: str, max_bytes: int = MAX_RESPONSE_BYTES) -> Iterator[bytes]:
    """Yield the decompressed body of a response in chunks.

    Args:
        response: The response, opened as a stream.
        server: How an error names the server.
        max_bytes: Maximum size of the body.

    Raises:
        RejectionError: The body is larger than `max_bytes`.
        ServerError: It is compressed in a way that was not requested.
    """
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ALLOWED_ENCODINGS:
        raise ServerError(
            f"{server} compressed its response with '{redact_message(encoding)}', which was not requested. Check the "
            "server and any proxy in front of it."
        )
    size = 0
    for chunk in response.iter_bytes():
        size += len(chunk)
        if size > max_bytes:
            raise RejectionError(
                f"{server} sent more than {max_bytes:,} bytes, the maximum for a response. Check the server's address."
            )
        yield chunk


def send_request(
    client: httpx.Client, request: httpx.Request, deadline: float, server: str, max_bytes: int = MAX_RESPONSE_BYTES
) -> HttpResponse:
    """Send a request once and read its response completely.

    Args:
        client: A client from `open_client`.
        request: The request. Its timeout is set to the time until the deadline.
        deadline: When the request must have ended, a time of `time.monotonic`.
        server: How an error names the server.
        max_bytes: Maximum size of the response.

    Raises:
        httpx.RequestError: The connection failed, or the deadline passed.
        ServerError: The response is too large, or compressed in a way that was not requested.
    """
    request.extensions["timeout"] = httpx.Timeout(max(0.001, deadline - time.monotonic())).as_dict()
    with request_deadline(deadline), contextlib.closing(client.send(request, stream=True)) as response:
        return read_response(response, server, max_bytes)


def read_response(response: httpx.Response, server: str, max_bytes: int = MAX_RESPONSE_BYTES) -> HttpResponse:
    """Read a response completely. After the deadline, ReadTimeout is raised."""
    body = bytearray()
    for chunk in iter_body(response, server, max_bytes):
        body += chunk
        # A network read checks the deadline, but a chunk that is already in memory is returned without a network read.
        if time.monotonic() > REQUEST_DEADLINE.get():
            raise httpx.ReadTimeout("the server sent its response too slowly")
    return HttpResponse(response.status_code, bytes(body), parse_retry_after(response.headers.get("Retry-After", "")))


@contextlib.contextmanager
def wait_for_turn(content: bytes) -> Iterator[None]:
    """Wait until no other thread processes a large response, if this one is large. Processing takes memory and time.

    Raises:
        ServerError: The deadline of `request_deadline` passed, so nobody waits for the result any more.
    """
    if len(content) <= LARGE_RESPONSE_BYTES:
        yield
        return
    seconds = REQUEST_DEADLINE.get() - time.monotonic()
    if not _LARGE_RESPONSE_LOCK.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX)):
        raise ServerError("a large response was not processed in time. Try again later.")
    try:
        yield
    finally:
        _LARGE_RESPONSE_LOCK.release()


def parse_json_response(content: bytes, where: str, max_values: int = MAX_RESPONSE_VALUES) -> Any:
    """Parse the JSON response of a server. Invalid characters become U+FFFD.

    Large responses are parsed one at a time.

    Args:
        content: The body of the response.
        where: How an error names the response.
        max_values: Maximum number of JSON values.

    Raises:
        RejectionError: The body is not valid JSON, or has too many values.
    """
    with wait_for_turn(content):
        if count_json_values(content, max_values) > max_values:
            raise RejectionError(f"{where} has more than {max_values:,} JSON values. Check the server's address.")
        try:
            return parse_json(content.decode("utf-8-sig", errors="replace"), where, replace_surrogates=True)
        except BadInput as error:
            raise RejectionError(str(error)) from None
