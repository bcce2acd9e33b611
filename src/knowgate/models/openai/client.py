"""HTTP client for an OpenAI-compatible server: JSON requests and server-sent events, with deadlines and retries.

Error messages never contain the API key or the text of a request.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from knowgate.core.http_client import (
    HttpResponse,
    iter_body,
    open_client,
    parse_json_response,
    read_response,
    request_deadline,
)
from knowgate.core.redaction import MAX_MESSAGE_CHARS, redact_message
from knowgate.errors import BadSetting, ModelError, ServerError

Result = TypeVar("Result")
API_KEY_VARIABLES = ("KNOWGATE_API_KEY", "OPENAI_API_KEY")
STREAM_END = "[DONE]"


@dataclass(frozen=True)
class RetryPolicy:
    """Timeouts and retries of requests.

    Args:
        timeout: Seconds for one attempt; in a stream, for each chunk.
        total: Seconds for a request with all attempts and pauses; in a stream, for waiting for chunks.
        retries: Number of further attempts after a temporary failure.
        backoff: Seconds before the second attempt; doubles each time, with jitter.
        sleep: Function that pauses between attempts.
    """

    timeout: float = 60.0
    total: float = 180.0
    retries: int = 4
    backoff: float = 0.5
    sleep: Callable[[float], None] = time.sleep


class StatusError(ServerError):
    """The server refused a request. `status` is the HTTP status."""

    def __init__(self, url: str, status: int, message: str):
        super().__init__(f"{url} answered {status}: {message or 'no reason given'}")
        self.status = status


class _RetryableError(Exception):
    """A failure that may be temporary. `error` is raised when no attempts are left; `wait` overrides the backoff."""

    def __init__(self, error: ServerError, wait: float | None = None):
        super().__init__(str(error))
        self.error = error
        self.wait = wait


class ApiClient:
    """A thread-safe client for one server.

    Args:
        url: Base URL, which usually ends in /v1.
        retry: Timeouts and retries.
        connections: Maximum number of connections.
        transport: Replaces the network in tests.
    """

    def __init__(self, url: str, *, retry: RetryPolicy, connections: int, transport: httpx.BaseTransport | None = None):
        self.url = url.rstrip("/")
        self._retry = retry
        self._connections = connections
        self._transport = transport

    def get(self, path: str) -> Any:
        """Send a GET request and return the JSON response."""
        return self._send("GET", self.url + path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a POST request and return the JSON response."""
        return self._send("POST", self.url + path, _encode(body))

    def post_outside_v1(self, path: str, body: dict[str, Any]) -> Any:
        """Send a POST request to a path next to /v1, not below it."""
        return self._send("POST", self.url.removesuffix("/v1") + path, _encode(body))

    def stream(self, path: str, body: dict[str, Any]) -> Generator[Any, None, None]:
        """Send a POST request at once and return its response as a generator of JSON chunks.

        The last chunk is STREAM_END if the server sends it. Attempts are repeated only before the first chunk. Closing
        the generator closes the connection.
        """
        url, content = self.url + path, _encode(body)
        return self._iter_chunks(url, self._with_retries(lambda deadline: self._open(url, content, deadline)))

    def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    @functools.cached_property
    def _client(self) -> httpx.Client:
        headers = {"Content-Type": "application/json"}
        key, _ = find_api_key()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        client = open_client(headers, connections=self._connections, transport=self._transport)
        weakref.finalize(self, client.close)
        return client

    def _send(self, method: str, url: str, content: bytes | None) -> Any:
        return self._with_retries(lambda deadline: self._attempt(method, url, content, deadline))

    def _with_retries(self, attempt: Callable[[float], Result]) -> Result:
        """Call `attempt` with the deadline of the request, again after temporary failures."""
        deadline = time.monotonic() + self._retry.total
        for number in itertools.count():
            try:
                return attempt(deadline)
            except _RetryableError as failure:
                pause = failure.wait
                if pause is None:
                    pause = self._retry.backoff * 2.0**number * random.uniform(0.5, 1.0)
                if number >= self._retry.retries or time.monotonic() + pause >= deadline:
                    raise failure.error from None
                self._retry.sleep(pause)
        raise AssertionError("unreachable")

    def _attempt(self, method: str, url: str, content: bytes | None, deadline: float) -> Any:
        """Send a request once and return its JSON response."""
        seconds, client = self._remaining_seconds(deadline), self._client
        with (
            _translate_errors(url, seconds),
            request_deadline(time.monotonic() + seconds),
            client.stream(method, url, content=content, timeout=seconds) as stream,
        ):
            response = read_response(stream, url)
        if not response.is_success:
            raise _make_refusal(url, response)
        return _parse(url, response.content)

    def _open(self, url: str, content: bytes, deadline: float) -> httpx.Response:
        """Send a request and return its response, unread; raises if the server refuses it."""
        seconds, client = self._remaining_seconds(deadline), self._client
        with _translate_errors(url, seconds), request_deadline(time.monotonic() + seconds):
            request = client.build_request("POST", url, content=content, timeout=seconds)
            response = client.send(request, stream=True)
            if response.is_success:
                return response
            with contextlib.closing(response):
                refusal = read_response(response, url)
        raise _make_refusal(url, refusal)

    def _remaining_seconds(self, deadline: float) -> float:
        return max(0.001, min(self._retry.timeout, deadline - time.monotonic()))

    def _iter_chunks(self, url: str, response: httpx.Response) -> Generator[Any, None, None]:
        """Yield the JSON chunks of a stream and close it at the end."""
        with contextlib.closing(response):
            for data in parse_events(self._iter_bytes(url, response)):
                chunk = data if data == STREAM_END else _parse(url, data.encode())
                if isinstance(chunk, dict) and chunk.get("error"):
                    raise ServerError(f"{url} failed in the middle of its answer: {_find_message(chunk)}")
                yield chunk
                if chunk == STREAM_END:
                    return

    def _iter_bytes(self, url: str, response: httpx.Response) -> Iterator[bytes]:
        """Yield the body. Only the time spent waiting for the server counts towards `total`."""
        body, waited = iter_body(response, url), 0.0
        while True:
            start = time.monotonic()
            with _translate_stream_errors(url), request_deadline(start + self._retry.timeout):
                data = next(body, None)
            if data is None:
                return
            waited += time.monotonic() - start
            if waited > self._retry.total:
                raise ServerError(
                    f"{url} had not finished its answer after {self._retry.total:.3g} s. "
                    "Check its load, or lower `max_tokens`."
                )
            yield data


def parse_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event.

    LLM servers write the data of an event on one line, so every line is an event. Comments and other fields are ignored.
    A response that is not a stream but one JSON value is one event. Until autumn 2025 llama.cpp wrote `error:` where
    other servers write data with an error in it.
    """
    for line in _split_lines(chunks):
        name, _, value = line.partition(":")
        if line.startswith(("{", "[")):
            yield line
        elif name == "data" and value.strip():
            yield value.strip()
        elif name == "error":
            yield json.dumps({"error": value.strip()})


def _split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield lines that end in LF or CRLF; other Unicode line ends are text, and a JSON response is not split.

    An incomplete line is kept as a list of chunks, because joining it again for each chunk takes quadratic time.
    """
    pending: list[bytes] = []
    is_json = None
    for chunk in chunks:
        if is_json is None and chunk.strip():
            is_json = chunk.lstrip()[:1] in (b"{", b"[")
        first, *others = [chunk] if is_json else chunk.split(b"\n")
        pending.append(first)
        for start in others:
            yield b"".join(pending).decode(errors="replace").removesuffix("\r")
            pending = [start]
    yield b"".join(pending).strip().decode(errors="replace")


def find_api_key() -> tuple[str, str]:
    """Return the API key and the name of its environment variable, or two empty strings."""
    for name in API_KEY_VARIABLES:
        key = os.environ.get(name, "").strip()
        if key and not (key.isascii() and key.isprintable()):
            raise BadSetting(f"the key in {name} has characters that no key can have. Set it again.")
        if key:
            return key, name
    return "", ""


def _encode(body: dict[str, Any]) -> bytes:
    """Encode JSON with ASCII escapes, which also represent lone surrogates."""
    return json.dumps(body).encode()


@contextlib.contextmanager
def _translate_errors(url: str, seconds: float) -> Iterator[None]:
    """Translate httpx errors before a response; connection failures become retryable."""
    try:
        yield
    except httpx.ConnectTimeout:
        raise _RetryableError(_make_connection_error(url, "connection timed out")) from None
    except httpx.TimeoutException:
        raise ServerError(
            f"{url} did not answer within {seconds:.3g} s. Check the server's load, or allow more time."
        ) from None
    except httpx.TransportError as error:
        raise _RetryableError(_make_connection_error(url, str(error) or type(error).__name__)) from None
    except httpx.DecodingError:
        raise _make_decoding_error(url) from None


@contextlib.contextmanager
def _translate_stream_errors(url: str) -> Iterator[None]:
    """Translate httpx errors in the middle of a stream, which are not retried."""
    try:
        yield
    except httpx.TimeoutException:
        raise ServerError(f"{url} stopped in the middle of its answer. Check the server's load.") from None
    except httpx.TransportError as error:
        reason = _redact(str(error) or type(error).__name__)
        raise ServerError(f"{url} broke off in the middle of its answer ({reason}). Ask again.") from None
    except httpx.DecodingError:
        raise _make_decoding_error(url) from None


def _make_connection_error(url: str, reason: str) -> ServerError:
    return ServerError(f"cannot reach {url} ({_redact(reason)}). Check that the server runs and the URL is right.")


def _make_decoding_error(url: str) -> ModelError:
    return ModelError(f"{url} sent a response that cannot be decompressed. Check the server and any proxy before it.")


def _make_refusal(url: str, response: HttpResponse) -> Exception:
    """Return the error for a response whose status is not a success."""
    status = response.status
    if status in (401, 403):
        key, name = find_api_key()
        if key:
            return ServerError(f"{url} refused the key in {name} ({status}). Check that variable.")
        return ServerError(f"{url} requires a key ({status}). Set {API_KEY_VARIABLES[0]}.")
    try:
        message = _find_message(parse_json_response(response.content, "the refusal"))
    except ModelError:
        message = _redact(response.content[: 4 * MAX_MESSAGE_CHARS].decode(errors="replace"))
    error = StatusError(url, status, message)
    if status in (408, 429) or (status >= 500 and status != 501):
        return _RetryableError(error, response.retry_after)
    return error


def _parse(url: str, content: bytes) -> Any:
    """Parse JSON from the server; raises ModelError if it is malformed."""
    try:
        return parse_json_response(content, f"the response of {url}")
    except ModelError as error:
        raise ModelError(f"{error} Check the server and its URL.") from None


def _find_message(value: Any) -> str:
    """Return the error message in a server's JSON."""
    for field in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(field):
            value = value[field]
    return _redact(value if isinstance(value, str) else json.dumps(value))


def _redact(text: str) -> str:
    key, _ = find_api_key()
    return redact_message(text, [key] if key else [])
