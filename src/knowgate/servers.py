"""The door for servers: a client whose every request ends, and replies that are bounded in time, size and shape.

httpx bounds each read, not all of them together: here every read and write of a connection also ends with the request
(`until`), so a server that sends its headers a byte a second is cut off like one that says nothing. Redirects are not
followed. Keys and logins are hidden from what is said about a server. Knows nothing of what is asked.
"""

from __future__ import annotations

import contextlib
import email.utils
import math
import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import httpcore
import httpx

from knowgate.doors import parse_json
from knowgate.errors import BadInput, ServerError
from knowgate.proxies import new_client

LONGEST_REPLY = 32 << 20  # bytes; 128 samples, or a whole vocabulary with log-probabilities, stay far below
LONGEST_MESSAGE = 300  # characters of a server's own words in an error
ENCODINGS = ("", "identity", "gzip")  # one layer of gzip grows a piece at most a thousandfold; others have no limit
END: ContextVar[float] = ContextVar("when the request of this thread must be over", default=math.inf)


@dataclass(frozen=True)
class Whole:
    """A reply, read to its end. retry_after: seconds the server wants to be left alone, where it said so."""

    status: int
    content: bytes
    retry_after: float | None

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


def open_client(
    headers: Mapping[str, str], *, connections: int | None = None, transport: httpx.BaseTransport | None = None
) -> httpx.Client:
    """A client that keeps to `until`. transport: of a test, instead of the network."""
    limits = httpx.Limits(max_connections=connections)
    given = {"Accept-Encoding": "gzip", **headers}
    client = new_client(headers=given, limits=limits, transport=transport, follow_redirects=False)
    for way in (client._transport, *client._mounts.values()):
        if isinstance(way, httpx.HTTPTransport):  # httpx has no public way to choose what its pool connects with
            way._pool._network_backend = ClockedBackend(way._pool._network_backend)
    return client


@contextlib.contextmanager
def until(end: float) -> Iterator[None]:
    """What is read and written inside, by this thread, is over at `end` (of time.monotonic)."""
    token = END.set(end)
    try:
        yield
    finally:
        END.reset(token)


def pieces(response: httpx.Response, server: str) -> Iterator[bytes]:
    """The body as it comes, decompressed, to its end or its limit."""
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ENCODINGS:
        raise ServerError(f"{server} gave a reply in the encoding '{one_line(encoding)}', which was not asked for.")
    size = 0
    for piece in response.iter_bytes():
        size += len(piece)
        if size > LONGEST_REPLY:
            raise ServerError(f"{server} gave a reply of more than {LONGEST_REPLY:,} bytes.")
        yield piece


def read_whole(response: httpx.Response, server: str) -> Whole:
    """All of it, before `until`'s end; a reply that was made in memory has to look at the clock here."""
    body = bytearray()
    for piece in pieces(response, server):
        body += piece
        if time.monotonic() > END.get():
            raise httpx.ReadTimeout("the reply came too slowly")
    return Whole(response.status_code, bytes(body), retry_after(response.headers.get("Retry-After", "")))


def parse_reply(content: bytes, where: str) -> Any:
    """JSON that a server sent; see `parse_json` for what is refused."""
    try:
        return parse_json(content.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        raise ServerError(f"{where} is not valid JSON: byte {error.start} is part of no UTF-8 character.") from None
    except BadInput as error:
        raise ServerError(str(error)) from None


def retry_after(value: str) -> float | None:
    """Seconds to wait, from seconds or from a date; None when the header says nothing usable."""
    if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", value.strip(), re.ASCII):
        return float(value)
    try:
        seconds = (email.utils.parsedate_to_datetime(value[:100]) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(0.0, seconds)


def one_line(text: str, secrets: Iterable[str] = ()) -> str:
    """A server's words: one line of bounded length, without the secrets should the server have repeated them."""
    text = text[: 20 * LONGEST_MESSAGE]
    for secret in secrets:
        text = text.replace(secret, "***")
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "…"


def without_login(text: str) -> str:
    """The text with any 'user:password@' of an address hidden."""
    return re.sub(r"//[^/\s]*@", "//***@", text)


def without_secrets(text: str) -> str:
    """Any address in the text without login and parameters, which may hold keys."""
    return re.sub(r"(https?://[^\s?#]*)[?#]\S*", r"\1?***", without_login(text))


def secrets_of(url: str) -> list[str]:
    """What in an address may be a key: login and parameters, as written and as meant; longest first."""
    address, _, parameters = url.partition("?")
    login = re.match(r"https?://([^/\s]*)@", address)
    parts = login.group(1).split(":", 1) if login else []
    parts += [pair.partition("=")[2] for pair in parameters.split("&") if "{" not in pair]
    found = {form for part in parts for form in (part, unquote(part)) if len(form) > 2}
    return sorted(found, key=len, reverse=True)


class ClockedBackend(httpcore.NetworkBackend):
    """Connections whose every step ends with the request it belongs to."""

    def __init__(self, inner: httpcore.NetworkBackend):
        self._inner = inner

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, *rest: Any, **more: Any) -> Any:
        return ClockedStream(
            self._inner.connect_tcp(host, port, _left(timeout, httpcore.ConnectTimeout), *rest, **more)
        )

    def connect_unix_socket(self, path: str, timeout: float | None = None, *rest: Any, **more: Any) -> Any:
        left = _left(timeout, httpcore.ConnectTimeout)
        return ClockedStream(self._inner.connect_unix_socket(path, left, *rest, **more))

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class ClockedStream(httpcore.NetworkStream):
    """One such connection."""

    def __init__(self, inner: httpcore.NetworkStream):
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, _left(timeout, httpcore.WriteTimeout))

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = _left(timeout, httpcore.ConnectTimeout)
        return ClockedStream(self._inner.start_tls(ssl_context, server_hostname, left))

    def close(self) -> None:
        self._inner.close()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def _left(timeout: float | None, late: Callable[[str], Exception]) -> float | None:
    left = END.get() - time.monotonic()
    if left <= 0:
        raise late("the request had to be over by now")
    return timeout if left == math.inf else min(left, timeout if timeout is not None else left)
