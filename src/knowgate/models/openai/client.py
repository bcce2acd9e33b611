"""HTTP to an OpenAI-compatible server: a request in, a JSON reply or its parts out. Knows nothing of what is asked.

Every request is bounded in time, retried a bounded number of times when the failure may pass, and fails with
one sentence. Neither the key nor the text of a request is ever put into a message.
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

STREAM_END = "[DONE]"


def parse_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The data of each event; a reply that is no stream but one JSON value is one event.

    Comments, which keep a connection alive, and fields that say nothing to us are passed over. `error:` is what
    llama.cpp wrote until autumn 2025 where others write data with an error in it.
    """
    for line in _lines(chunks):
        name, _, value = line.partition(":")
        if line.startswith(("{", "[")):
            yield line
        elif name == "data" and value.strip():
            yield value.strip()
        elif name == "error":
            yield json.dumps({"error": value.strip()})


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines end in LF or CR LF; other line ends of Unicode are part of a text. A reply that is JSON is not cut.

    What waits for its end is kept in pieces: joining it again for every piece would take for ever on a long line.
    """
    waiting: list[bytes] = []
    is_json = None
    for chunk in chunks:
        if is_json is None and chunk.strip():
            is_json = chunk.lstrip()[:1] in (b"{", b"[")
        first, *rest = [chunk] if is_json else chunk.split(b"\n")
        waiting.append(first)
        for start in rest:
            yield _text(b"".join(waiting))
            waiting = [start]
    yield _text(b"".join(waiting).strip())


def _text(line: bytes) -> str:
    return line.decode(errors="replace").removesuffix("\r")


Result = TypeVar("Result")
API_KEY_VARIABLES = ("KNOWGATE_API_KEY", "OPENAI_API_KEY")


@dataclass(frozen=True)
class RetryPolicy:
    """How long to wait and how often to try. `total` bounds one request with all its attempts and pauses.

    The clock is looked at between the pieces of a reply, so one that comes drop by drop is cut off too. Of a stream
    `timeout` bounds the wait for each piece, `total` that for all of them: the time between them is the listener's.
    """

    timeout: float = 60.0
    total: float = 180.0
    retries: int = 4
    backoff: float = 0.5  # seconds before the second attempt; doubles each time, with jitter
    sleep: Callable[[float], None] = time.sleep


class StatusError(ServerError):
    """The server refused: its status and its own words."""

    def __init__(self, url: str, status: int, message: str):
        super().__init__(f"{url} answered {status}: {message or 'no reason given'}")
        self.status = status


class _Passing(Exception):
    """A failure worth another attempt; `error` is what to raise when there is none left."""

    def __init__(self, error: ServerError, wait: float | None = None):
        super().__init__(str(error))
        self.error = error
        self.wait = wait


class ApiClient:
    """A client of the server at `url`; safe to use from several threads. At most `connections` at once."""

    def __init__(
        self, url: str, *, patience: RetryPolicy, connections: int, transport: httpx.BaseTransport | None = None
    ):
        self.url = url.rstrip("/")
        self._patience = patience
        self._connections = connections
        self._transport = transport

    def get(self, path: str) -> Any:
        return self._send("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        # ASCII escapes: a question with half a surrogate pair must not break the request.
        return self._send("POST", path, json.dumps(body).encode())

    def post_beside(self, path: str, body: dict[str, Any]) -> Any:
        """To an endpoint that stands beside /v1, not below it."""
        return self._send("POST", path, json.dumps(body).encode(), self.url.removesuffix("/v1"))

    def stream(self, path: str, body: dict[str, Any]) -> Generator[Any, None, None]:
        """The parts of a streamed reply, the last of them `DONE` where the server says that it is the last.

        Asks at once and tries again like any request, but never after the first part. Ending the iteration closes
        the connection.
        """
        address, content = self.url + path, json.dumps(body).encode()
        return self._parts(address, self._retried(lambda end: self._open(address, content, end)))

    def close(self) -> None:
        """Drop the connections; the next request opens new ones."""
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

    def _send(self, method: str, path: str, content: bytes | None, url: str | None = None) -> Any:
        address = (self.url if url is None else url) + path
        return self._retried(lambda end: self._attempt(method, address, content, end))

    def _retried(self, attempt: Callable[[float], Result]) -> Result:
        """`attempt`, which is told when its time is up, as often as patience allows."""
        end = time.monotonic() + self._patience.total
        for number in itertools.count():
            try:
                return attempt(end)
            except _Passing as failure:
                pause = self._pause(number) if failure.wait is None else failure.wait
                if number >= self._patience.retries or time.monotonic() + pause >= end:
                    raise failure.error from None
                self._patience.sleep(pause)
        raise AssertionError("unreachable")

    def _pause(self, attempt: int) -> float:
        return self._patience.backoff * 2.0**attempt * random.uniform(0.5, 1.0)

    def _attempt(self, method: str, url: str, content: bytes | None, end: float) -> Any:
        seconds, client = self._seconds(end), self._client
        with (
            _explained(url, seconds),
            request_deadline(time.monotonic() + seconds),
            client.stream(method, url, content=content, timeout=seconds) as response,
        ):
            whole = read_response(response, url)
        return _judge(url, whole)

    def _open(self, url: str, content: bytes, end: float) -> httpx.Response:
        """The reply to a request, not yet read, if it is a good one."""
        seconds, client = self._seconds(end), self._client
        with _explained(url, seconds), request_deadline(time.monotonic() + seconds):
            request = client.build_request("POST", url, content=content, timeout=seconds)
            response = client.send(request, stream=True)
            if response.is_success:
                return response
            with contextlib.closing(response):
                refusal = read_response(response, url)
        raise _refused(url, refusal)

    def _seconds(self, end: float) -> float:
        return max(0.001, min(self._patience.timeout, end - time.monotonic()))

    def _parts(self, url: str, response: httpx.Response) -> Generator[Any, None, None]:
        watch = Stopwatch()
        with contextlib.closing(response):
            for data in parse_events(self._chunks(url, response, watch)):
                part = data if data == STREAM_END else _parse(url, data.encode())
                if isinstance(part, dict) and part.get("error"):
                    raise ServerError(f"{url} failed in the middle of its answer: {_words_of(part)}")
                with watch.paused():
                    yield part
                if part == STREAM_END:
                    return

    def _chunks(self, url: str, response: httpx.Response, watch: Stopwatch) -> Iterator[bytes]:
        chunks = iter_body(response, url)
        while True:
            with _broken_off(url), request_deadline(time.monotonic() + self._patience.timeout):
                chunk = next(chunks, None)
            if chunk is None:
                return
            if watch.seconds > self._patience.total:
                raise ServerError(
                    f"{url} had not finished its answer after {self._patience.total:.3g} s. "
                    "Check its load, or ask for less: --max-tokens"
                )
            yield chunk


class Stopwatch:
    """Time since it was made, but for the pauses."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._start += time.monotonic() - begun


@contextlib.contextmanager
def _explained(url: str, seconds: float) -> Iterator[None]:
    """What httpx raises before there is a reply, as our errors; those worth another attempt as passing ones."""
    try:
        yield
    except httpx.ConnectTimeout:
        raise _Passing(_unreachable(url, "no connection in time")) from None
    except httpx.TimeoutException:
        raise ServerError(
            f"{url} did not answer within {seconds:.3g} s. Check the server's load, or allow more time."
        ) from None
    except httpx.TransportError as error:
        raise _Passing(_unreachable(url, str(error) or type(error).__name__)) from None
    except httpx.DecodingError:
        raise ModelError(
            f"{url} gave a reply that cannot be decompressed. Check the server and what stands before it."
        ) from None


@contextlib.contextmanager
def _broken_off(url: str) -> Iterator[None]:
    """What httpx raises in the middle of a reply: part of it was used, so there is no second attempt."""
    try:
        yield
    except httpx.TimeoutException:
        raise ServerError(f"{url} stopped in the middle of its answer. Check the server's load.") from None
    except httpx.TransportError as error:
        reason = _shorten(str(error) or type(error).__name__)
        raise ServerError(f"{url} broke off in the middle of its answer ({reason}). Ask again.") from None
    except httpx.DecodingError:
        raise ModelError(
            f"{url} gave a reply that cannot be decompressed. Check the server and what stands before it."
        ) from None


def find_api_key() -> tuple[str, str]:
    """(key, name of its variable) from the environment; both empty when there is none."""
    for name in API_KEY_VARIABLES:
        key = os.environ.get(name, "").strip()
        if key and not (key.isascii() and key.isprintable()):
            raise BadSetting(f"the key in {name} has characters that no key has. Set it again.")
        if key:
            return key, name
    return "", ""


def _unreachable(url: str, reason: str) -> ServerError:
    return ServerError(f"cannot reach {url} ({_shorten(reason)}). Check that the server runs and the URL is right.")


def _judge(url: str, response: HttpResponse) -> Any:
    """The JSON of a good reply; an error for any other."""
    if response.is_success:
        return _parse(url, response.content)
    raise _refused(url, response)


def _refused(url: str, response: HttpResponse) -> Exception:
    """What a reply that is not a good one means."""
    status = response.status
    if status in (401, 403):
        return _wrong_key(url, status)
    error = StatusError(url, status, _own_words(response))
    if status in (408, 429) or (status >= 500 and status != 501):
        return _Passing(error, response.retry_after)
    return error


def _parse(url: str, content: bytes) -> Any:
    try:
        return parse_json_response(content, f"the reply of {url}")
    except ModelError as error:
        raise ModelError(f"{error} Check the server and its URL.") from None


def _wrong_key(url: str, status: int) -> ServerError:
    key, name = find_api_key()
    if key:
        return ServerError(f"{url} refused the key in {name} ({status}). Check that variable.")
    return ServerError(f"{url} wants a key ({status}). Set {API_KEY_VARIABLES[0]}.")


def _own_words(response: HttpResponse) -> str:
    try:
        return _words_of(parse_json_response(response.content, "the refusal"))
    except ModelError:
        return _shorten(response.content[: 4 * MAX_MESSAGE_CHARS].decode(errors="replace"))


def _words_of(value: Any) -> str:
    """The message in a server's JSON."""
    for field in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(field):
            value = value[field]
    return _shorten(value if isinstance(value, str) else json.dumps(value))


def _shorten(text: str) -> str:
    key, _ = find_api_key()
    return redact_message(text, [key] if key else [])
