"""The door for servers: a client whose every request ends, and replies that are bounded in time, size and shape.

httpx bounds each read, not all of them together: here every read and write of a connection also ends with the request
(`until`), so a server that sends its headers a byte a second is cut off like one that says nothing. Redirects are not
followed. Keys and logins are hidden from what is said about a server. Knows nothing of what is asked.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import math
import os
import re
import ssl
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import unquote

import httpcore
import httpx

from knowgate.core.validation import parse_json
from knowgate.errors import BadInput, BadSetting, ServerError

PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")


def create_client(**options: Any) -> httpx.Client:
    """`httpx.Client`, which reads the environment when it is made."""
    try:
        return httpx.Client(**options)
    except ImportError:
        raise BadSetting(
            f"{_set(PROXY_VARIABLES)} asks for a SOCKS proxy, which needs a package: pip install 'httpx[socks]', or unset it."
        ) from None
    except (ValueError, httpx.InvalidURL):
        raise BadSetting(
            f"{_set(PROXY_VARIABLES)} holds no address such as http://host:port. Correct or unset it."
        ) from None
    except OSError as error:
        raise BadSetting(
            f"the certificates of {_set(CERTIFICATE_VARIABLES)} cannot be used ({error.strerror or error}). Correct or unset it."
        ) from None


def _set(names: tuple[str, ...]) -> str:
    """Those of these variables that are set, in either spelling."""
    found = [name for upper in names for name in (upper, upper.lower()) if os.environ.get(name)]
    return " or ".join(found) or "the environment"


MAX_RESPONSE_BYTES = 32 << 20  # bytes; 128 samples, or a whole vocabulary with log-probabilities, stay far below
MAX_MESSAGE_CHARS = 300  # characters of a server's own words in an error
ALLOWED_ENCODINGS = (
    "",
    "identity",
    "gzip",
)  # one layer of gzip grows a piece at most a thousandfold; others have no limit
REQUEST_DEADLINE: ContextVar[float] = ContextVar("when the request of this thread must be over", default=math.inf)


@dataclass(frozen=True)
class HttpResponse:
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
    client = create_client(headers=given, limits=limits, transport=transport, follow_redirects=False)
    for way in (client._transport, *client._mounts.values()):
        if isinstance(way, httpx.HTTPTransport):  # httpx has no public way to choose what its pool connects with
            way._pool._network_backend = DeadlineBackend(way._pool._network_backend)
    return client


@contextlib.contextmanager
def request_deadline(end: float) -> Iterator[None]:
    """What is read and written inside, by this thread, is over at `end` (of time.monotonic)."""
    token = REQUEST_DEADLINE.set(end)
    try:
        yield
    finally:
        REQUEST_DEADLINE.reset(token)


def iter_body(response: httpx.Response, server: str) -> Iterator[bytes]:
    """The body as it comes, decompressed, to its end or its limit."""
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ALLOWED_ENCODINGS:
        raise ServerError(
            f"{server} gave a reply in the encoding '{redact_message(encoding)}', which was not asked for."
        )
    size = 0
    for piece in response.iter_bytes():
        size += len(piece)
        if size > MAX_RESPONSE_BYTES:
            raise ServerError(f"{server} gave a reply of more than {MAX_RESPONSE_BYTES:,} bytes.")
        yield piece


def read_response(response: httpx.Response, server: str) -> HttpResponse:
    """All of it, before `until`'s end; a reply that was made in memory has to look at the clock here."""
    body = bytearray()
    for piece in iter_body(response, server):
        body += piece
        if time.monotonic() > REQUEST_DEADLINE.get():
            raise httpx.ReadTimeout("the reply came too slowly")
    return HttpResponse(response.status_code, bytes(body), parse_retry_after(response.headers.get("Retry-After", "")))


def parse_json_response(content: bytes, where: str) -> Any:
    """JSON that a server sent; see `parse_json` for what is refused."""
    try:
        return parse_json(content.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        raise ServerError(f"{where} is not valid JSON: byte {error.start} is part of no UTF-8 character.") from None
    except BadInput as error:
        raise ServerError(str(error)) from None


def parse_retry_after(value: str) -> float | None:
    """Seconds to wait, from seconds or from a date; None when the header says nothing usable."""
    if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", value.strip(), re.ASCII):
        return float(value)
    try:
        seconds = (email.utils.parsedate_to_datetime(value[:100]) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(0.0, seconds)


def redact_message(text: str, secrets: Iterable[str] = ()) -> str:
    """A server's words: one line of bounded length, without the secrets should the server have repeated them."""
    text = text[: 20 * MAX_MESSAGE_CHARS]
    for secret in secrets:
        text = text.replace(secret, "***")
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "…"


def redact_logins(text: str) -> str:
    """The text with any 'user:password@' of an address hidden."""
    return re.sub(r"//[^/\s]*@", "//***@", text)


def redact_urls(text: str) -> str:
    """Any address in the text without login and parameters, which may hold keys."""
    return re.sub(r"(https?://[^\s?#]*)[?#]\S*", r"\1?***", redact_logins(text))


def find_url_secrets(url: str) -> list[str]:
    """What in an address may be a key: login and parameters, as written and as meant; longest first."""
    address, _, parameters = url.partition("?")
    login = re.match(r"https?://([^/\s]*)@", address)
    parts = login.group(1).split(":", 1) if login else []
    parts += [pair.partition("=")[2] for pair in parameters.split("&") if "{" not in pair]
    found = {form for part in parts for form in (part, unquote(part)) if len(form) > 2}
    return sorted(found, key=len, reverse=True)


class DeadlineBackend(httpcore.NetworkBackend):
    """Connections whose every step ends with the request it belongs to."""

    def __init__(self, inner: httpcore.NetworkBackend):
        self._inner = inner

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, *rest: Any, **more: Any) -> Any:
        return DeadlineStream(
            self._inner.connect_tcp(host, port, _left(timeout, httpcore.ConnectTimeout), *rest, **more)
        )

    def connect_unix_socket(self, path: str, timeout: float | None = None, *rest: Any, **more: Any) -> Any:
        left = _left(timeout, httpcore.ConnectTimeout)
        return DeadlineStream(self._inner.connect_unix_socket(path, left, *rest, **more))

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class DeadlineStream(httpcore.NetworkStream):
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
        return DeadlineStream(self._inner.start_tls(ssl_context, server_hostname, left))

    def close(self) -> None:
        self._inner.close()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def _left(timeout: float | None, late: Callable[[str], Exception]) -> float | None:
    left = REQUEST_DEADLINE.get() - time.monotonic()
    if left <= 0:
        raise late("the request had to be over by now")
    return timeout if left == math.inf else min(left, timeout if timeout is not None else left)


MAX_CONCURRENT_REQUESTS = 8
MAX_RETRIES = 2
Item = TypeVar("Item")
Result = TypeVar("Result")


class JsonClient:
    """`what` names it in errors. deadline: seconds per request, all tries together; 429 and 5xx are tried again.

    advice: what to do where it refuses. headers may hold keys, and so may the address: neither is ever shown.
    """

    def __init__(
        self,
        url: str,
        what: str,
        *,
        headers: Mapping[str, str] | None = None,
        advice: str = "Check its address and key.",
        deadline: float = 30.0,
        pause: float = 0.3,
        transport: httpx.BaseTransport | None = None,
    ):
        try:
            host = httpx.URL(url).host if url.startswith(("http://", "https://")) else ""
        except httpx.InvalidURL:
            host = ""
        if not host:
            raise BadSetting(
                f"'{redact_message(redact_urls(url))}' is no address of {what}: write http(s)://HOST[:PORT]/..."
            )
        self.url, self.what = url.rstrip("/"), what
        self._headers = {name: value for name, value in (headers or {}).items() if value}
        self._advice, self._deadline, self._pause = advice, deadline, pause
        self._transport = transport

    def ask(
        self,
        method: str,
        path: str = "",
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        passed: Sequence[int] = (),
    ) -> Any:
        """The JSON it answers. passed: statuses other than success whose JSON is given back, too."""
        reply = self.fetch(method, path, body=body, params=params, passed=passed)
        return parse_json_response(reply, f"the reply of {self.what}")

    def fetch(
        self,
        method: str,
        path: str = "",
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        passed: Sequence[int] = (),
    ) -> bytes:
        """What it answers, as it is. path: what follows the address, or a whole one."""
        reply = self._send_until(method, path, body, params)
        if not reply.is_success and reply.status not in passed:
            words = self._words(reply) or "no reason given"
            raise ServerError(f"{self.what} answered with status {reply.status}: {words.rstrip('.')}. {self._advice}")
        return reply.content

    def each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """`work` on each item, side by side, in order."""
        _ = self._client
        if len(items) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(min(MAX_CONCURRENT_REQUESTS, len(items))) as pool:
            return list(pool.map(work, items))

    def told(self, words: str) -> str:
        """A server's words without keys."""
        return redact_message(words, [*find_url_secrets(self.url), *_keys(self._headers)])

    def _send_until(self, method: str, path: str, body: Any, params: Mapping[str, Any] | None) -> HttpResponse:
        end = time.monotonic() + self._deadline
        for attempt in range(MAX_RETRIES + 1):
            wait, reply = self._pause * 2**attempt, None
            try:
                reply = self._send(method, path, body, params, end)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {self.told(str(error))}"
            else:
                if reply.status != 429 and reply.status < 500:
                    return reply
                words = self._words(reply)
                problem = f"status {reply.status}{': ' + words if words else ''}"
                wait = max(wait, reply.retry_after or 0.0)
            if attempt == MAX_RETRIES or time.monotonic() + wait >= end:
                break
            time.sleep(wait)
        over = " It is over its quota, or asked too fast: wait, or ask less." if reply and reply.status == 429 else ""
        raise ServerError(
            f"{self.what} failed: {problem}, after {attempt + 1} tries within {self._deadline:g} s.{over} "
            "Check that it runs."
        )

    def _send(self, method: str, path: str, body: Any, params: Mapping[str, Any] | None, end: float) -> HttpResponse:
        whole = path if path.startswith(("http://", "https://")) else self.url + path
        request = self._client.build_request(method, whole, json=body, params=params)
        request.extensions["timeout"] = httpx.Timeout(max(0.001, end - time.monotonic())).as_dict()
        with request_deadline(end), contextlib.closing(self._client.send(request, stream=True)) as response:
            return read_response(response, self.what)

    def _words(self, reply: HttpResponse) -> str:
        return self.told(reply.content[:2000].decode(errors="replace"))

    @functools.cached_property
    def _client(self) -> httpx.Client:
        client = open_client(self._headers, transport=self._transport)
        weakref.finalize(self, client.close)
        return client


def replace_surrogates(text: str) -> str:
    """Half a character (a lone surrogate) cannot be sent."""
    return text.encode("utf-8", "replace").decode()


def _keys(headers: Mapping[str, str]) -> list[str]:
    """What is secret in headers: 'Bearer KEY' is, and so is KEY."""
    return [part for value in headers.values() for part in (value, value.rpartition(" ")[2]) if len(part) > 5]
