"""A server that is asked in JSON: every request ends, lost connections and busy servers are tried again, keys hidden.

Knows nothing of what is asked. Built on `servers.py`, which bounds each reply.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from knowgate.errors import BadSetting, ServerError
from knowgate.servers import Whole, one_line, open_client, parse_reply, read_whole, secrets_of, until, without_secrets

AT_ONCE = 8
RETRIES = 2
Item = TypeVar("Item")
Result = TypeVar("Result")


class Endpoint:
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
                f"'{one_line(without_secrets(url))}' is no address of {what}: write http(s)://HOST[:PORT]/..."
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
        return parse_reply(reply, f"the reply of {self.what}")

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
        with ThreadPoolExecutor(min(AT_ONCE, len(items))) as pool:
            return list(pool.map(work, items))

    def told(self, words: str) -> str:
        """A server's words without keys."""
        return one_line(words, [*secrets_of(self.url), *_keys(self._headers)])

    def _send_until(self, method: str, path: str, body: Any, params: Mapping[str, Any] | None) -> Whole:
        end = time.monotonic() + self._deadline
        for attempt in range(RETRIES + 1):
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
            if attempt == RETRIES or time.monotonic() + wait >= end:
                break
            time.sleep(wait)
        over = " It is over its quota, or asked too fast: wait, or ask less." if reply and reply.status == 429 else ""
        raise ServerError(
            f"{self.what} failed: {problem}, after {attempt + 1} tries within {self._deadline:g} s.{over} "
            "Check that it runs."
        )

    def _send(self, method: str, path: str, body: Any, params: Mapping[str, Any] | None, end: float) -> Whole:
        whole = path if path.startswith(("http://", "https://")) else self.url + path
        request = self._client.build_request(method, whole, json=body, params=params)
        request.extensions["timeout"] = httpx.Timeout(max(0.001, end - time.monotonic())).as_dict()
        with until(end), contextlib.closing(self._client.send(request, stream=True)) as response:
            return read_whole(response, self.what)

    def _words(self, reply: Whole) -> str:
        return self.told(reply.content[:2000].decode(errors="replace"))

    @functools.cached_property
    def _client(self) -> httpx.Client:
        client = open_client(self._headers, transport=self._transport)
        weakref.finalize(self, client.close)
        return client


def sendable(text: str) -> str:
    """Half a character (a lone surrogate) cannot be sent."""
    return text.encode("utf-8", "replace").decode()


def _keys(headers: Mapping[str, str]) -> list[str]:
    """What is secret in headers: 'Bearer KEY' is, and so is KEY."""
    return [part for value in headers.values() for part in (value, value.rpartition(" ")[2]) if len(part) > 5]
