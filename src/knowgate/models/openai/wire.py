"""HTTP to an OpenAI-compatible server: one request in, one JSON reply out. Knows nothing of what is asked.

Every request is bounded in time, retried a bounded number of times when the failure may pass, and fails with
one sentence. Neither the key nor the text of a request is ever put into a message.
"""

from __future__ import annotations

import email.utils
import functools
import itertools
import json
import math
import os
import random
import re
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx

from knowgate.errors import BadSetting, ModelError, ServerError

KEY_NAMES = ("KNOWGATE_API_KEY", "OPENAI_API_KEY")
LONGEST_REPLY = 64 * 2**20  # bytes; 128 samples with log-probabilities stay far below
LONGEST_MESSAGE = 300  # characters of a server's own words in an error


@dataclass(frozen=True)
class Patience:
    """How long to wait and how often to try. `total` bounds one request with all its attempts and pauses.

    The clock is looked at between the pieces of a reply, so one that comes drop by drop is cut off too.
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


class Wire:
    """A client of the server at `url`; safe to use from several threads. At most `connections` at once."""

    def __init__(self, url: str, *, patience: Patience, connections: int, transport: httpx.BaseTransport | None = None):
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

    def close(self) -> None:
        """Drop the connections; the next request opens new ones."""
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    @functools.cached_property
    def _client(self) -> httpx.Client:
        headers = {"Content-Type": "application/json"}
        key, _ = find_key()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        limits = httpx.Limits(max_connections=self._connections)
        client = httpx.Client(headers=headers, limits=limits, transport=self._transport)
        weakref.finalize(self, client.close)
        return client

    def _send(self, method: str, path: str, content: bytes | None, url: str | None = None) -> Any:
        address = (self.url if url is None else url) + path
        end = time.monotonic() + self._patience.total
        for attempt in itertools.count():
            try:
                return self._attempt(method, address, content, end)
            except _Passing as failure:
                pause = self._pause(attempt) if failure.wait is None else failure.wait
                if attempt >= self._patience.retries or time.monotonic() + pause >= end:
                    raise failure.error from None
                self._patience.sleep(pause)
        raise AssertionError("unreachable")

    def _pause(self, attempt: int) -> float:
        return self._patience.backoff * 2.0**attempt * random.uniform(0.5, 1.0)

    def _attempt(self, method: str, url: str, content: bytes | None, end: float) -> Any:
        seconds = max(0.001, min(self._patience.timeout, end - time.monotonic()))
        try:
            response = self._exchange(method, url, content, seconds)
        except httpx.ConnectTimeout:
            raise _Passing(_unreachable(url, "no connection in time")) from None
        except httpx.TimeoutException:
            raise ServerError(
                f"{url} did not answer within {seconds:.3g} s. Check the server's load, or allow more time."
            ) from None
        except httpx.TransportError as error:
            raise _Passing(_unreachable(url, str(error) or type(error).__name__)) from None
        except httpx.DecodingError:
            raise ModelError(f"{url} gave a reply that cannot be decompressed.") from None
        return _judge(url, response)

    def _exchange(self, method: str, url: str, content: bytes | None, seconds: float) -> httpx.Response:
        stop = time.monotonic() + seconds
        pieces: list[bytes] = []
        with self._client.stream(method, url, content=content, timeout=seconds) as response:
            for piece in response.iter_bytes():
                pieces.append(piece)
                if time.monotonic() > stop:
                    raise httpx.ReadTimeout("the reply came too slowly")
                if sum(map(len, pieces)) > LONGEST_REPLY:
                    raise ModelError(f"{url} gave a reply of more than {LONGEST_REPLY} bytes.")
        plain = {"Retry-After": response.headers.get("Retry-After", "")}
        return httpx.Response(response.status_code, headers=plain, content=b"".join(pieces))


def find_key() -> tuple[str, str]:
    """(key, name of its variable) from the environment; both empty when there is none."""
    for name in KEY_NAMES:
        key = os.environ.get(name, "").strip()
        if key and not (key.isascii() and key.isprintable()):
            raise BadSetting(f"the key in {name} has characters that no key has. Set it again.")
        if key:
            return key, name
    return "", ""


def without_login(text: str) -> str:
    """The text with any 'user:password@' of an address hidden."""
    return re.sub(r"//[^/\s]*@", "//***@", text)


def _unreachable(url: str, reason: str) -> ServerError:
    return ServerError(f"cannot reach {url} ({_shorten(reason)}). Check that the server runs and the URL is right.")


def _judge(url: str, response: httpx.Response) -> Any:
    """The JSON of a good reply; an error for any other."""
    status = response.status_code
    if 200 <= status < 300:
        return _parse(url, response.content)
    if status in (401, 403):
        raise _wrong_key(url, status)
    error = StatusError(url, status, _own_words(response))
    if status in (408, 429) or (status >= 500 and status != 501):
        raise _Passing(error, _retry_after(response.headers.get("Retry-After", "")))
    raise error


def _parse(url: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ModelError(f"{url} gave a reply that is not JSON. Check that the URL is an API's.") from None


def _wrong_key(url: str, status: int) -> ServerError:
    key, name = find_key()
    if key:
        return ServerError(f"{url} refused the key in {name} ({status}). Check that variable.")
    return ServerError(f"{url} wants a key ({status}). Set {KEY_NAMES[0]}.")


def _own_words(response: httpx.Response) -> str:
    try:
        value = json.loads(response.content)
    except (ValueError, RecursionError):
        return _shorten(response.content[: 4 * LONGEST_MESSAGE].decode(errors="replace"))
    for field in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(field):
            value = value[field]
    return _shorten(value if isinstance(value, str) else json.dumps(value))


def _shorten(text: str) -> str:
    """One line of bounded length, without the key should the server have repeated it."""
    key, _ = find_key()
    text = " ".join((text.replace(key, "***") if key else text).split())
    return text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "…"


def _retry_after(value: str) -> float | None:
    """Seconds to wait, from seconds or from a date; None when the header says nothing usable."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (email.utils.parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
