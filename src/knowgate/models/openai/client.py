"""HTTP client for an OpenAI-compatible server, with timeouts and retries.

Sends JSON requests and reads JSON responses or server-sent events (streams).

Error messages never contain the API key or the text of a request.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import httpx

from knowgate.core import http_client
from knowgate.core.http_client import RetryPolicy, call_with_retries
from knowgate.core.network_deadline import request_deadline
from knowgate.core.redaction import MAX_MESSAGE_CHARS, redact_message
from knowgate.errors import BadSetting, ModelError, ServerError

API_KEY_VARIABLES = ("KNOWGATE_API_KEY", "OPENAI_API_KEY")
STREAM_END = "[DONE]"
# 128 sampled answers with log-probabilities take far less. Thousands of log-probabilities for each token of a prompt fit.
MAX_LLM_BYTES = 32 << 20
MAX_LLM_VALUES = 3_000_000


class StatusError(ServerError):
    """The server refused a request. `status` is the HTTP status code."""

    def __init__(self, url: str, status: int, message: str):
        brief = f"{url} answered {status}"  # for logs, because the message of the server can quote the prompt
        super().__init__(f"{brief}: {message or 'no reason given'}", brief=brief)
        self.status = status


@contextlib.contextmanager
def ignore_refusals(*statuses: int) -> Iterator[None]:
    """End the block without an error if the server refuses a request with one of these HTTP statuses."""
    try:
        yield
    except StatusError as error:
        if error.status not in statuses:
            raise


class ApiClient:
    """A thread-safe HTTP client for one server.

    Args:
        url: Base URL of the server, which usually ends in /v1.
        retry: Timeouts and retries.
        connections: Maximum number of connections.
        transport: An httpx transport that replaces the network in tests.
    """

    def __init__(self, url: str, *, retry: RetryPolicy, connections: int, transport: httpx.BaseTransport | None = None):
        self.url = url.rstrip("/")
        self._retry = retry
        self._connections = connections
        self._transport = transport

    def get(self, path: str) -> Any:
        """Send a GET request and return the JSON response."""
        return self._send("GET", self.url + path, None)

    def post(self, path: str, body: dict[str, Any], *, outside_v1: bool = False) -> Any:
        """Send a POST request and return the JSON response.

        Args:
            path: Path after the base URL, such as /completions.
            body: The JSON body.
            outside_v1: The path is not below /v1, as that of /tokenize on vLLM.
        """
        base = self.url.removesuffix("/v1") if outside_v1 else self.url
        return self._send("POST", base + path, _encode(body))

    def stream(self, path: str, body: dict[str, Any]) -> Generator[Any, None, None]:
        """Send a POST request and return a generator of JSON chunks.

        Failures in the middle of the stream are not retried.
        """
        url = self.url + path
        content = _encode(body)
        response = call_with_retries(lambda deadline: self._open(url, content, deadline), self._retry)
        return self._iter_chunks(url, response)

    def close(self) -> None:
        """Close all connections. The client stays usable, because the next request opens new ones."""
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    @functools.cached_property
    def _client(self) -> httpx.Client:
        """The httpx client, which sends the API key. It is closed when this object is deleted."""
        headers = {"Content-Type": "application/json"}
        key, _ = find_api_key()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        client = http_client.open_client(headers, connections=self._connections, transport=self._transport)
        weakref.finalize(self, client.close)
        return client

    def _send(self, method: str, url: str, content: bytes | None) -> Any:
        """Send a request, with retries, and return its JSON response."""
        return call_with_retries(lambda deadline: self._attempt(method, url, content, deadline), self._retry)

    def _attempt(self, method: str, url: str, content: bytes | None, deadline: float) -> Any:
        """Send a request once, without retries, and return its JSON response."""
        seconds = self._remaining_seconds(deadline)
        request = self._client.build_request(method, url, content=content)
        with _translate_errors(url, seconds):
            response = http_client.send_request(self._client, request, time.monotonic() + seconds, url, MAX_LLM_BYTES)
        if not response.is_success:
            raise _make_refusal(url, response)
        return _parse(url, response.content)

    def _open(self, url: str, content: bytes, deadline: float) -> httpx.Response:
        """Send a request once and return the response with an unread body."""
        seconds = self._remaining_seconds(deadline)
        client = self._client
        with _translate_errors(url, seconds), request_deadline(time.monotonic() + seconds):
            request = client.build_request("POST", url, content=content, timeout=seconds)
            response = client.send(request, stream=True)
            if response.is_success:
                return response
            with contextlib.closing(response):
                refusal = http_client.read_response(response, url)
        raise _make_refusal(url, refusal)

    def _remaining_seconds(self, deadline: float) -> float:
        return max(0.001, min(self._retry.timeout, deadline - time.monotonic()))

    def _iter_chunks(self, url: str, response: httpx.Response) -> Generator[Any, None, None]:
        """Yield the JSON chunks of a streamed response and close the response at the end."""
        with contextlib.closing(response):
            for data in parse_events(self._iter_bytes(url, response)):
                chunk = data if data == STREAM_END else _parse(url, data.encode())
                if isinstance(chunk, dict) and chunk.get("error"):
                    brief = f"{url} reported an error in the middle of its answer"
                    raise ServerError(f"{brief}: {_find_message(chunk).rstrip('.')}. Check its log.", brief=brief)
                yield chunk
                if chunk == STREAM_END:
                    return

    def _iter_bytes(self, url: str, response: httpx.Response) -> Iterator[bytes]:
        """Yield the body of a streamed response piece by piece.

        Time limits count only the time of the server, not that of the caller between two pieces.

        Raises:
            ServerError: The server takes too long for one piece or in total, or closes the connection.
        """
        body = http_client.iter_body(response, url, MAX_LLM_BYTES)
        waited = 0.0  # seconds
        while True:
            start = time.monotonic()
            with _translate_stream_errors(url), request_deadline(start + self._retry.timeout):
                data = next(body, None)
            waited += time.monotonic() - start
            if data is None:
                return
            if waited > self._retry.total:
                raise ServerError(
                    f"the server {url} did not finish within {self._retry.total:.3g} s. Check its load, or lower `max_tokens`."
                )
            yield data


def parse_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event in a response body.

    A response of one JSON value counts as one event.
    """
    for line in _split_lines(chunks):
        name, _, value = line.partition(":")
        if line.startswith(("{", "[")):
            yield line
        elif name == "data" and value.strip():
            yield value.strip()


def _split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a response body.

    A body that begins with { or [ is JSON and yielded as one line.
    """
    # The pieces of the line that has not ended yet. Joining them for every chunk would take quadratic time.
    open_line: list[bytes] = []
    is_json = None  # not known before the first chunk with text
    for chunk in chunks:
        if is_json is None and chunk.strip():
            is_json = chunk.lstrip().startswith((b"{", b"["))
        continuation, *new_lines = [chunk] if is_json else chunk.split(b"\n")
        open_line.append(continuation)
        for new_line in new_lines:  # a line break ends the open line
            yield b"".join(open_line).decode(errors="replace").removesuffix("\r")
            open_line = [new_line]
    yield b"".join(open_line).strip().decode(errors="replace")


def find_api_key() -> tuple[str, str]:
    """Return the API key and the name of its environment variable, or two empty strings."""
    for name in API_KEY_VARIABLES:
        key = os.environ.get(name, "").strip()
        if key and not (key.isascii() and key.isprintable()):
            raise BadSetting(f"the API key in variable {name} is not printable ASCII text. Set the variable again.")
        if key:
            return key, name
    return "", ""


def _encode(body: dict[str, Any]) -> bytes:
    """Encode a request body as JSON. Non-ASCII characters are escaped, because UTF-8 cannot encode lone surrogates."""
    return json.dumps(body).encode()


@contextlib.contextmanager
def _translate_errors(url: str, seconds: float) -> Iterator[None]:
    """Turn httpx errors in the block into errors with advice.

    Failed connections become RetryableError. Timeouts of a connected server do not. `seconds` is the timeout.
    """
    try:
        yield
    except httpx.ConnectTimeout:
        raise http_client.RetryableError(_make_connection_error(url, "connection timed out")) from None
    except httpx.TimeoutException:
        raise ServerError(f"the server {url} did not answer within {seconds:.3g} s. Check the server's load.") from None
    except httpx.TransportError as error:
        raise http_client.RetryableError(_make_connection_error(url, str(error) or type(error).__name__)) from None
    except httpx.DecodingError:
        raise _make_decoding_error(url) from None


@contextlib.contextmanager
def _translate_stream_errors(url: str) -> Iterator[None]:
    """Translate httpx errors in the middle of a stream.

    They are not retried, because text was already passed on.
    """
    try:
        yield
    except httpx.TimeoutException:
        raise ServerError(f"the server {url} stopped sending in the middle of its answer. Check its load.") from None
    except httpx.TransportError as error:
        reason = _redact(str(error) or type(error).__name__)
        raise ServerError(f"{url} closed the connection in the middle of its answer ({reason}). Ask again.") from None
    except httpx.DecodingError:
        raise _make_decoding_error(url) from None


def _make_connection_error(url: str, reason: str) -> ServerError:
    return ServerError(f"cannot reach {url} ({_redact(reason)}). Check that the server runs and the URL is right.")


def _make_decoding_error(url: str) -> ModelError:
    return ModelError(f"{url} sent a response that cannot be decompressed. Check the server and its proxy.")


def _make_key_error(url: str, status: int) -> ServerError:
    """Return the error for a missing or wrong API key."""
    key, variable = find_api_key()
    if key:
        return ServerError(f"{url} refused the API key in the environment variable {variable} ({status}). Check it.")
    return ServerError(
        f"{url} requires an API key (status {status}). Set the environment variable {API_KEY_VARIABLES[0]}."
    )


def _make_refusal(url: str, response: http_client.HttpResponse) -> Exception:
    """Return the error for a response with an error status.

    Temporary failures become retryable errors.
    """
    status = response.status
    if status in (401, 403):
        return _make_key_error(url, status)
    try:
        message = _find_message(http_client.parse_json_response(response.content, "the refusal"))
    except ModelError:
        message = _redact(response.content[: 4 * MAX_MESSAGE_CHARS].decode(errors="replace"))
    error = StatusError(url, status, message)
    if status in (408, 429) or (status >= 500 and status != 501):
        return http_client.RetryableError(error, response.retry_after)
    return error


def _parse(url: str, content: bytes) -> Any:
    """Parse JSON from the server; raises ModelError if it is malformed."""
    try:
        return http_client.parse_json_response(content, f"the response of {url}", MAX_LLM_VALUES)
    except ModelError as error:
        raise ModelError(f"{error} Check the server and its URL.") from None


def _find_message(value: Any) -> str:
    """Return the error message in a server's JSON, such as {"error": {"message": ...}}, without secrets."""
    for field in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(field):
            value = value[field]
    return _redact(value if isinstance(value, str) else json.dumps(value))


def _redact(text: str) -> str:
    """Remove the API key and other secrets from a message."""
    key, _ = find_api_key()
    return redact_message(text, [key] if key else [])
